"""What two services cannot both have: a frontend, a name. Across one file or many. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from vipd.declaration.problems import Problem
from vipd.model import Frontend, Service


def find_conflicts(services: Iterable[Service]) -> tuple[Problem, ...]:
    """Every frontend and every name that an earlier service has already, in time linear in the frontends.

    The problem stands at the later service; the earlier one keeps what it claims, also against a third.
    """
    names: dict[str, Service] = {}
    owners: dict[Frontend, Service] = {}
    problems: list[Problem] = []
    for service in services:
        namesake = names.setdefault(service.name, service)
        if namesake is not service and not _default_name(service):
            problems.append(claim_problem(service, service.name, namesake))
        for frontend in service.frontends():
            owner = owners.setdefault(frontend, service)
            if owner is not service:
                problems.append(claim_problem(service, frontend, owner))
    return tuple(problems)


def claim_problem(service: Service, claim: Frontend | str, owner: Service) -> Problem:
    """A service's fault that another one has a frontend, or the name, that it claims."""
    origin = service.origin
    if isinstance(claim, str):
        what = f"the name {claim} is already taken by the service {_place(owner)}"
        hint = "give each service its own name"
    else:
        claimant = "" if _default_name(service) else f"{service.name}: "
        holder = "the service" if _default_name(owner) else owner.name
        what = f"{claimant}{claim} already belongs to {holder} {_place(owner)}"
        hint = "one address, port and protocol can serve once"
    return Problem(origin.path or origin.source, origin.line, "", what, hint)


def _place(service: Service) -> str:
    return f"at {service.origin}" if service.origin.path else "added by vipctl"


def _default_name(service: Service) -> bool:
    """Whether the name is the first frontend's: then the clash of that frontend tells it all."""
    frontends = service.frontends()
    return bool(frontends) and service.name == str(frontends[0])
