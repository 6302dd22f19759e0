"""Decides on a change of services: from a state of one moment, and in a thread if the change is
large."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from vipd.control.address_policy import (
    AddressPolicy,
    admit_service,
    checks_to_query,
    host_port_numbers,
    port_share_problem,
)
from vipd.declaration import operations
from vipd.declaration.listed_backends import as_declared
from vipd.declaration.operations import Moment, Outcome, Services, invalid
from vipd.declaration.problems import Problem
from vipd.host.gc_control import gc_paused
from vipd.model.check import Check
from vipd.model.service import Service

NEW_OR_CHANGED = ("created", "changed")
INLINE_MAX_SERVICES = 200
"""Services up to which a decision takes some milliseconds."""
THREAD_ATTEMPTS = 3
"""How often a decision is made in a thread, because the state changes meanwhile. The last one counts: what it
has not seen is refused by the next step, as it would be if it came right after the decision."""

CheckProblems = Mapping[Check, tuple[str, ...]]


Change = Callable[[Moment], Outcome]
"""The change of a request, computed from all services and those of its store. Raises RefusedError."""


@dataclass(frozen=True, slots=True)
class ServicesSnapshot:
    """Every service as declared at one moment. The mappings do not change."""

    running: Services
    """The reconciler's services, which alone would be outdated while a step is running."""
    fleet: Services
    """The services in etcd, as last received."""
    local_store: Services
    """The services in this host's own store."""

    def services(self) -> dict[str, Service]:
        """Files as last read by a step, etcd and the store as they are now; without backends that registered
        themselves."""
        files = {name: as_declared(service) for name, service in self._in_files()}
        # A key in etcd whose name a file already has does not serve.
        return {**self.fleet, **files, **self.local_store}

    def _in_files(self) -> Iterator[tuple[str, Service]]:
        changeable = (operations.CLI, "etcd")
        return ((n, s) for n, s in self.running.items() if s.origin.source not in changeable)

    def same(self, other: ServicesSnapshot) -> bool:
        """Whether nothing has changed in between. The step after somebody's change brings `running` nothing
        that the stores did not have."""
        return (
            self.local_store is other.local_store
            and self.fleet == other.fleet
            and (self.running is other.running or dict(self._in_files()) == dict(other._in_files()))
        )

    def __len__(self) -> int:
        return len(self.running) + len(self.fleet) + len(self.local_store)


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """A requested change."""

    change: Change
    source: str
    """The source of the services that it may change."""
    policy: AddressPolicy
    """The claims that services may make at the time of the request."""
    size: int = 1
    """Number of services that it names."""
    dry_run: bool = False
    """Nothing will be stored, so that it may be decided on the services of a moment ago."""


@dataclass(frozen=True, slots=True)
class _Decision:
    outcome: Outcome
    unchecked: frozenset[Check]
    """Checks that only this host can judge, and about which it has not been queried."""
    problems: tuple[Problem, ...]


async def decide(
    request: ChangeRequest,
    take_snapshot: Callable[[], ServicesSnapshot],
    ask_host: Callable[[Collection[Check]], Awaitable[CheckProblems]],
) -> Outcome:
    """The outcome of a change. Raises RefusedError.

    When this returns, a new snapshot would have the same stored services as its basis if the caller keeps
    the store from changes, and the same others unless those never rest, so a caller that stores the outcome
    without awaiting stores a valid result.

    Others may change services while the host is queried, so the decision is repeated after each answer. A
    check without an answer counts as one without problems, and is not queried again.
    """
    check_problems: dict[Check, tuple[str, ...]] = {}
    while True:
        decision = await _decide_current(request, take_snapshot, check_problems)
        if not decision.unchecked:
            break
        found = await ask_host(decision.unchecked)
        check_problems.update({check: found.get(check, ()) for check in decision.unchecked})
    if decision.problems:
        raise invalid(decision.problems)
    return decision.outcome


async def _decide_current(
    request: ChangeRequest, take_snapshot: Callable[[], ServicesSnapshot], check_problems: CheckProblems
) -> _Decision:
    """The judgement on the state at the time when this returns. Raises RefusedError."""
    for attempt in range(1, THREAD_ATTEMPTS + 1):
        snapshot = take_snapshot()
        if len(snapshot) + request.size <= INLINE_MAX_SERVICES:
            break
        with gc_paused(temporary=True):
            judging = asyncio.ensure_future(
                asyncio.to_thread(_evaluate, request, snapshot, dict(check_problems))
            )
            await asyncio.wait((judging,))
        if request.dry_run or attempt == THREAD_ATTEMPTS or snapshot.same(take_snapshot()):
            return judging.result()
        judging.exception()
    return _evaluate(request, take_snapshot(), check_problems)


def _evaluate(request: ChangeRequest, snapshot: ServicesSnapshot, check_problems: CheckProblems) -> _Decision:
    """The outcome of a change, and its problems. Pure. Raises RefusedError."""
    all_services = snapshot.services()
    stored = snapshot.local_store if request.source == operations.CLI else snapshot.fleet
    outcome = request.change(Moment(all_services, stored, request.source))
    new_or_changed = [
        outcome.stored[name] for name, action in outcome.results.items() if action in NEW_OR_CHANGED
    ]
    unknown = {
        check for service in new_or_changed for check in checks_to_query(service, request.policy)
    } - check_problems.keys()
    problems = (
        () if unknown else tuple(_problems(new_or_changed, all_services, request.policy, check_problems))
    )
    return _Decision(outcome, frozenset(unknown), problems)


def _problems(
    new_or_changed: Collection[Service],
    all_services: Services,
    policy: AddressPolicy,
    check_problems: CheckProblems,
) -> list[Problem]:
    """Why new services are refused: services must not claim these things. An existing claim of a service is
    not a problem: it may be repaired, and lose backends, however the host has changed."""
    policy = replace(policy, check_problems=partial(_problems_of_check, check_problems))
    problems = [
        problem
        for service in new_or_changed
        for problem in admit_service(service, policy, all_services.get(service.name))
    ]
    return [*problems, *_port_share_problems(new_or_changed, all_services, policy.host_ports_per_author)]


def _port_share_problems(
    new_or_changed: Collection[Service], all_services: Services, most: int
) -> Iterator[Problem]:
    """Why services get no new ports of this host: their author would have too many."""
    growing: dict[str, list[Service]] = {}
    for service in new_or_changed:
        known = all_services.get(service.name)
        if not host_port_numbers(service) <= (host_port_numbers(known) if known else set()):
            growing.setdefault(service.origin.author, []).append(service)
    changed = {service.name for service in new_or_changed} if growing else set[str]()
    for author, services in growing.items():
        others = (s for s in all_services.values() if s.origin.author == author and s.name not in changed)
        taken = {number for other in others for number in host_port_numbers(other)}
        if problem := port_share_problem(services, taken, most):
            yield problem


def _problems_of_check(check_problems: CheckProblems, check: Check) -> tuple[str, ...]:
    return check_problems.get(check, ())
