"""Backends that registered themselves, added to the services that they are for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vipd import limits
from vipd.model import Backend, Service

Registrations = Mapping[str, tuple[Backend, ...]]
"""Registered backends by the name of their service. What has not changed is the same object."""


def declared(service: Service) -> Service:
    """The service without the backends that registered themselves."""
    if not any(backend.registered for backend in service.backends):
        return service
    return replace(service, backends=tuple(b for b in service.backends if not b.registered))


class Registrar:
    """Adds registered backends; a service for which nothing has changed stays the same object."""

    def __init__(self) -> None:
        self._registrations: dict[str, tuple[Backend, ...]] = {}
        self._known: dict[str, tuple[Service, tuple[Backend, ...], Service]] = {}
        self._sizes: dict[str, int] = {}
        """Endpoints that registered backends add to each service."""
        self._size = 0
        self._left_out: dict[str, int] = {}

    def take(self, registrations: Registrations) -> set[str]:
        """These are all registrations now; the services for which they are other than before."""
        before = self._registrations
        changed = {name for name in registrations if before.get(name) is not registrations[name]}
        changed |= before.keys() - registrations.keys()
        if changed:
            self._registrations = dict(registrations)
        return changed

    def extended(self, service: Service) -> Service:
        """A service with its registered backends.

        What is declared wins over what is registered at the same address and port. An address of the service
        itself is no backend of it: its packets would come back to the rules for ever. What is beyond
        `vipd.limits` is left out.
        """
        registered = self._registrations.get(service.name)
        if registered is None:
            self.forget(service.name)
            return service
        before = self._known.get(service.name)
        if before is not None and before[0] is service and before[1] is registered:
            return before[2]
        self.forget(service.name)
        fresh = _fresh(service, registered)
        room = self._room(service)
        if len(fresh) > room:  # those that serve already come first
            serving = {(b.address, b.port) for b in before[2].backends} if before else set()
            fresh.sort(key=lambda b: (b.address, b.port) not in serving)
        added = fresh[:room]
        made = service
        if added:
            more = tuple(replace(backend, registered=True) for backend in added)
            made = replace(service, backends=(*service.backends, *more))
        self._known[service.name] = (service, registered, made)
        self._sizes[service.name] = len(added) * len(service.ports)
        self._size += self._sizes[service.name]
        if len(added) < len(fresh):
            self._left_out[service.name] = len(fresh) - len(added)
        return made

    def forget(self, service: str) -> None:
        """A service is no more, or has no registered backends."""
        self._known.pop(service, None)
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

    def _room(self, service: Service) -> int:
        """How many registered backends a service may have."""
        declared, ports = len(service.backends) + len(service.fallback), len(service.ports)
        in_all = max(0, limits.ALL_ENDPOINTS - self._size) // ports
        own = min(limits.BACKENDS, limits.SERVICE_ENDPOINTS // ports) - declared
        return max(0, min(own, in_all))


def _fresh(service: Service, registered: tuple[Backend, ...]) -> list[Backend]:
    """The registered backends that are not declared, and are no address of the service itself."""
    taken = {(backend.address, backend.port) for backend in service.backends}
    own = set(service.all_addresses())
    return [b for b in registered if (b.address, b.port) not in taken and b.address not in own]
