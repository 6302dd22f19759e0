"""Backends that DNS names stand for, added to the services that name them. Pure.

What a name resolves to is another's word: each address must be one that a backend may have, in
`allowed_backends`, no service's own, and none that this host has or needs. One that is not is left out, and
named; the rest serves.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from vipd.control.address_policy import AddressPolicy
from vipd.control.registrations import backend_room
from vipd.declaration.problems import Problem
from vipd.declaration.syntax import resolved_address_fault
from vipd.model import limits
from vipd.model.claim_limits import SOURCES
from vipd.model.service import Backend, Frontend, NamedBackend, Service, family_of
from vipd.resolver.answers import Question, Target, backends_of

Answers = Mapping[Question, tuple[Target, ...]]
"""What serves, by question. Unchanged values are the same object."""

MAX_PROBLEMS = 20
"""Addresses of one service that are refused, and have a problem each; the rest shares one."""
_HINT = "the name server's administrators can correct it; see also allowed_backends in vipd's settings"


class _Resolved(NamedTuple):
    service: Service
    result: Service


class NamedBackends:
    """Adds the backends of names; an unchanged service stays the same object."""

    def __init__(
        self, is_vip: Callable[[str], bool], is_frontend: Callable[[Frontend], bool] = lambda _: False
    ) -> None:
        """`is_vip` returns whether an address is the virtual IP of a service, `is_frontend` whether a service
        has an address and port, also an external one."""
        self._is_vip, self._is_frontend = is_vip, is_frontend
        self._answers: Answers = {}
        self._policy = AddressPolicy()
        self._known: dict[str, _Resolved] = {}
        self._questions: dict[str, tuple[Question, ...]] = {}
        """Those of each service, and in `_users` the services of each question."""
        self._users: dict[Question, set[str]] = {}
        self._refused: dict[str, tuple[Problem, ...]] = {}
        self._sizes: dict[str, int] = {}
        """Endpoints that names add to each service."""
        self._size = 0
        self._left_out: dict[str, int] = {}

    def set_answers(self, answers: Answers, policy: AddressPolicy) -> set[str]:
        """Replace all answers; returns the services whose answers, or the limits on them, changed."""
        before, lasting = self._answers, replace(policy.for_accepted(), host=policy.host)
        questions = {q for q in answers if before.get(q) is not answers[q]} | (before.keys() - answers.keys())
        changed = {name for question in questions for name in self._users.get(question, ())}
        if lasting != self._policy or lasting.host.roles != self._policy.host.roles:
            changed.update(self._known)
        self._answers, self._policy = answers, lasting
        for name in changed:
            self._forget(name)
        return changed

    def recheck(self) -> set[str]:
        """Returns the services whose names must be judged again, because virtual IPs have changed: those with
        an address that is one now, or with a refused address."""
        found = {
            name
            for name, known in self._known.items()
            if name in self._refused
            or any(
                backend.resolved_from and self._leads_back(known.service, backend)
                for backend in (*known.result.backends, *known.result.fallback)
            )
        }
        for name in found:
            self._forget(name)
        return found

    def update(self, names: Iterable[str], services: Mapping[str, Service]) -> Mapping[str, Service]:
        """Resolve these services as declared now. Returns at least these services with their backends."""
        resolved: dict[str, Service] = {}
        for name in names:
            service = services.get(name)
            if name in self._questions or (service is not None and service.names):
                self._set_questions(name, service)
            if service is not None and service.names:
                resolved[name] = self.with_resolved(service)
        return ChainMap(resolved, services) if resolved else services  # type: ignore[arg-type]

    def _set_questions(self, service: str, declared: Service | None) -> None:
        """Note what a service names now; None: it is gone."""
        known = self._known.get(service)
        if known is not None and known.service is not declared:
            self._forget(service)
        for question in self._questions.pop(service, ()):
            users = self._users[question]
            users.discard(service)
            if not users:
                del self._users[question]
        questions = tuple(dict.fromkeys(map(Question.of, declared.names))) if declared else ()
        if questions:
            self._questions[service] = questions
        for question in questions:
            self._users.setdefault(question, set()).add(service)

    def with_resolved(self, service: Service) -> Service:
        """A service with the backends that its names stand for.

        A declared backend wins over one of a name with the same address and port, an earlier name over a
        later one, and a backend of the service over one of its fallback. What exceeds `vipd.model.limits` is
        left out, first of the fallback.
        """
        if not service.names:
            return service
        before = self._known.get(service.name)
        if before is not None and before.service is service:
            return before.result
        self._forget(service.name)
        backends, fallback = self._fresh(service)
        found, room = len(backends) + len(fallback), backend_room(service, self._size)
        if found > room:
            self._left_out[service.name] = found - room
            backends = backends[:room]
            fallback = fallback[: room - len(backends)]
        self._sizes[service.name] = min(found, room) * len(service.ports)
        self._size += self._sizes[service.name]
        result = service
        if backends or fallback:
            result = replace(
                service,
                backends=(*service.backends, *backends),
                fallback=(*service.fallback, *fallback),
            )
        self._known[service.name] = _Resolved(service, result)
        return result

    def _fresh(self, service: Service) -> tuple[list[Backend], list[Backend]]:
        """The backends of its names that may serve, and those of its fallback's, each address and port
        once."""
        taken = {place for backend in service.backends for place in _places(backend, service)}
        refused: dict[str, Problem] = {}
        backends = list(self._usable(service, service.named_backends, taken, refused))
        taken.update(place for backend in service.fallback for place in _places(backend, service))
        fallback = list(self._usable(service, service.named_fallback, taken, refused))
        if refused:
            self._refused[service.name] = tuple(_shortened(list(refused.values())))
        return backends, fallback

    def _usable(
        self,
        service: Service,
        names: Iterable[NamedBackend],
        taken: set[tuple[str, str, int]],
        refused: dict[str, Problem],
    ) -> Iterator[Backend]:
        """The backends of names that may serve and are not `taken` yet; adds their places to `taken`, and a
        problem for each that may not serve to `refused`."""
        families = frozenset(map(family_of, service.all_addresses()))
        for named in names:
            targets = self._answers.get(Question.of(named), ())
            for backend in backends_of(named, targets, families):
                if why := self._refusal(service, backend):
                    what = f"{service.name}: {named} resolves to {backend.address}, which is left out: {why}"
                    refused.setdefault(what, Problem("", 0, "", what, _HINT))
                    continue
                places = _places(backend, service)
                if taken.isdisjoint(places):
                    taken.update(places)
                    yield backend

    def _refusal(self, service: Service, backend: Backend) -> str:
        """Why one that a name resolves to may be no backend of a service; empty: it may."""
        if fault := resolved_address_fault(backend.address):
            return fault
        if self._leads_back(service, backend):
            # Packets to it would not be translated again: the kernel translates a packet only once.
            return "it is the virtual IP of a service"
        return self._policy.resolved_refusal(backend.address, service.origin.source)

    def _leads_back(self, service: Service, backend: Backend) -> bool:
        """Whether a service answers at a backend's address, or at the external one that it has with its
        port."""
        if self._is_vip(backend.address):
            return True
        reached = ((port, backend.port_for(port)) for port in service.ports)
        return any(
            number and self._is_frontend(Frontend(backend.address, number, port.protocol))
            for port, number in reached
        )

    def may_serve(self, address: str) -> bool:
        """Whether a service of any source may have a backend at an address that a name resolves to."""
        if resolved_address_fault(address):
            return False
        return any(not self._policy.resolved_refusal(address, source) for source in SOURCES)

    def ignored(self, service: str) -> tuple[Problem, ...]:
        """Why addresses of its names are left out."""
        return self._refused.get(service, ())

    def warnings(self) -> list[str]:
        """A line about refused addresses of each service, up to a limit; and one about services whose names
        stand for more backends than they can have."""
        found = [
            str(problems[0]) + (f" (and {len(problems) - 1} more)" if problems[1:] else "")
            for problems in islice(self._refused.values(), MAX_PROBLEMS)
        ]
        if not self._left_out:
            return found
        first, number = next(iter(self._left_out.items()))
        others = f" (and of {len(self._left_out) - 1} more services)" if len(self._left_out) > 1 else ""
        what = f"{number} backends of names of {first}{others} are left out"
        why = f"a service has {limits.BACKENDS} backends and {limits.SERVICE_ENDPOINTS} endpoints at most"
        return [*found, f"{what}: {why}; hint: divide it, or lower dns_max_addresses in vipd's settings"]

    def _forget(self, service: str) -> None:
        """Resolve a service anew when it is asked for next."""
        self._known.pop(service, None)
        self._refused.pop(service, None)
        self._size -= self._sizes.pop(service, 0)
        self._left_out.pop(service, None)


def _places(backend: Backend, service: Service) -> set[tuple[str, str, int]]:
    """Where a backend is reached for each port that it serves."""
    reached = ((port, backend.port_for(port)) for port in service.ports)
    return {(backend.address, str(port), number) for port, number in reached if number}


def _shortened(problems: list[Problem]) -> list[Problem]:
    """The first problems, and the number of the others."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    what = f"{more} more addresses that names resolve to are left out"
    return [*problems[:MAX_PROBLEMS], replace(problems[0], what=what)]
