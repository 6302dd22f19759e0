"""Backends that registered themselves, added to the services that they are for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from vipd.control.address_policy import AddressPolicy, admit_registered
from vipd.declaration.problems import Problem, internal_problem
from vipd.model import limits
from vipd.model.service import Backend, RegisteredBackend, Service

Registrations = Mapping[str, tuple[RegisteredBackend, ...]]
"""Registered backends by the name of their service. Unchanged ones are the same object."""

MAX_PROBLEMS = 100
"""Registrations that do not take part and have a problem each; the rest shares one problem."""

_Problems = Mapping[str, tuple[Problem, ...]]
"""By the place of a registration."""


class _Joined(NamedTuple):
    service: Service
    registered: tuple[RegisteredBackend, ...]
    result: Service


class Registrar:
    """Adds registered backends; an unchanged service stays the same object. The service, and this host's
    limits for etcd, decide which registrations take part."""

    def __init__(self) -> None:
        self._registrations: dict[str, tuple[RegisteredBackend, ...]] = {}
        self._policy = AddressPolicy()
        self._known: dict[str, _Joined] = {}
        self._ignoring: dict[str, _Problems] = {}
        """Ignored registrations, by service."""
        self._sizes: dict[str, int] = {}
        """Endpoints that registered backends add to each service."""
        self._size = 0
        self._left_out: dict[str, int] = {}

    def set_registrations(self, registrations: Registrations, policy: AddressPolicy) -> set[str]:
        """Replace all registrations; returns the services whose registrations, or the limits on them,
        changed.
        """
        before, lasting = self._registrations, policy.for_accepted()
        changed = {name for name in registrations if before.get(name) is not registrations[name]}
        changed |= before.keys() - registrations.keys()
        if lasting != self._policy:
            changed.update(registrations)
            self._known.clear()
        self._policy = lasting
        if changed:
            self._registrations = dict(registrations)
        return changed

    def update(self, names: Iterable[str], services: Mapping[str, Service]) -> None:
        """Determine the registrations that take part in these services as declared now."""
        for name in names:
            if name in services:
                self.with_registered(services[name])
            else:
                self.remove(name)

    def with_registered(self, service: Service) -> Service:
        """A service with its registered backends.

        A declared backend wins over a registered one with the same address and port. An address of the
        service itself is not accepted as its backend: its packets would return to the rules for ever.
        Registrations beyond `vipd.model.limits` are left out.
        """
        registered = self._registrations.get(service.name)
        if registered is None:
            self.remove(service.name)
            return service
        before = self._known.get(service.name)
        if before is not None and before.service is service and before.registered is registered:
            return before.result
        self.remove(service.name)
        ignored = {each.origin: why for each in registered if (why := self._problems_of(service, each))}
        if ignored:
            self._ignoring[service.name] = ignored
        made = self._joined(
            service, _fresh(service, registered, ignored), before.result if before else service
        )
        self._known[service.name] = _Joined(service, registered, made)
        return made

    def _joined(self, service: Service, fresh: list[Backend], before: Service) -> Service:
        """A service with as many of these backends as it has room for, first those that it had `before`."""
        room = backend_room(service, self._size)
        if len(fresh) > room:
            serving = {(b.address, b.port) for b in before.backends}
            fresh.sort(key=lambda b: (b.address, b.port) not in serving)
            self._left_out[service.name] = len(fresh) - room
        added = tuple(replace(backend, registered=True) for backend in fresh[:room])
        self._sizes[service.name] = len(added) * len(service.ports)
        self._size += self._sizes[service.name]
        return replace(service, backends=(*service.backends, *added)) if added else service

    def ignored(self, service: str) -> tuple[Problem, ...]:
        """Why registrations for a service do not take part in it."""
        return tuple(problem for found in self._ignoring.get(service, {}).values() for problem in found)

    def problems(self) -> dict[str, tuple[Problem, ...]]:
        """Problems of registrations by their place, up to a limit."""
        found = [(place, why) for ignored in self._ignoring.values() for place, why in ignored.items()]
        told = dict(found[:MAX_PROBLEMS])
        if more := found[MAX_PROBLEMS:]:
            place, why = more[0]
            what = f"{len(more)} more registered backends do not take part"
            told[place] = (*why, Problem(place, 0, "", what, "vipctl describe SERVICE tells of each service"))
        return told

    def remove(self, service: str) -> None:
        """A service is gone, or has no registrations."""
        if not (self._known or self._ignoring or self._sizes or self._left_out):
            return  # mostly no service has any
        self._known.pop(service, None)
        self._ignoring.pop(service, None)
        self._size -= self._sizes.pop(service, 0)
        self._left_out.pop(service, None)

    def warnings(self) -> list[str]:
        """One line about the services that have more registered backends than they can have."""
        if not self._left_out:
            return []
        first, number = next(iter(self._left_out.items()))
        others = f" (and of {len(self._left_out) - 1} more services)" if len(self._left_out) > 1 else ""
        what = f"{number} registered backends of {first}{others} are left out"
        why = f"a service has {limits.BACKENDS} backends and {limits.SERVICE_ENDPOINTS} endpoints at most"
        return [f"{what}: {why}; hint: remove keys below backends/"]

    def _problems_of(self, service: Service, registered: RegisteredBackend) -> tuple[Problem, ...]:
        """An unexpected exception is a problem of this registration alone."""
        try:
            return admit_registered(service, registered, self._policy)
        except Exception as error:
            return (internal_problem(error, f"admitting it to {service.name}", registered.origin),)


def backend_room(service: Service, added: int) -> int:
    """How many backends may be added to a service; `added`: the endpoints that others were given already."""
    declared, ports = len(service.backends) + len(service.fallback), len(service.ports)
    in_all = max(0, limits.MAX_TOTAL_SIZE - added) // ports
    at_each = limits.ADDRESS_ENDPOINTS // (ports * max(1, len(service.all_addresses())))
    own = min(limits.BACKENDS, limits.SERVICE_ENDPOINTS // ports, at_each) - declared
    return max(0, min(own, in_all))


def _fresh(service: Service, registered: Iterable[RegisteredBackend], ignored: _Problems) -> list[Backend]:
    """The registered backends that take part: they are not declared, and no address of the service itself."""
    taken = {(backend.address, backend.port) for backend in service.backends}
    own = set(service.all_addresses())
    joining = [backend for place, backend in registered if place not in ignored]
    return [b for b in joining if (b.address, b.port) not in taken and b.address not in own]
