"""Backends that registered themselves, added to the services that they are for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
        itself is no backend of it: its packets would come back to the rules for ever.
        """
        registered = self._registrations.get(service.name)
        if registered is None:
            self._known.pop(service.name, None)
            return service
        before = self._known.get(service.name)
        if before is not None and before[0] is service and before[1] is registered:
            return before[2]
        made = _extended(service, registered)
        self._known[service.name] = (service, registered, made)
        return made

    def forget(self, service: str) -> None:
        """A service is no more."""
        self._known.pop(service, None)


def _extended(service: Service, registered: tuple[Backend, ...]) -> Service:
    taken = {(backend.address, backend.port) for backend in service.backends}
    own = set(service.all_addresses())
    fresh = [b for b in registered if (b.address, b.port) not in taken and b.address not in own]
    added = tuple(replace(backend, registered=True) for backend in fresh)
    return replace(service, backends=(*service.backends, *added)) if added else service
