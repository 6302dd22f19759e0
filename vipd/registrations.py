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
        self._known: dict[str, tuple[Service, tuple[Backend, ...], Service]] = {}

    def extended(
        self, services: Mapping[str, Service], registrations: Registrations
    ) -> Mapping[str, Service]:
        """The services with their registered backends.

        What is declared wins over what is registered at the same address and port. An address of the service
        itself is no backend of it: its packets would come back to the rules for ever.
        """
        if not registrations:
            self._known.clear()
            return services
        known, self._known = self._known, {}
        found = dict(services)
        for name in registrations.keys() & services.keys():
            service, registered = services[name], registrations[name]
            before = known.get(name)
            same = before is not None and before[0] is service and before[1] is registered
            extended = before[2] if same and before else _extended(service, registered)
            self._known[name] = (service, registered, extended)
            found[name] = extended
        return found


def _extended(service: Service, registered: tuple[Backend, ...]) -> Service:
    taken = {(backend.address, backend.port) for backend in service.backends}
    own = set(service.all_addresses())
    fresh = [b for b in registered if (b.address, b.port) not in taken and b.address not in own]
    added = tuple(replace(backend, registered=True) for backend in fresh)
    return replace(service, backends=(*service.backends, *added)) if added else service
