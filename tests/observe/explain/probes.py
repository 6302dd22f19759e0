"""Who sends what to the frontends of services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.lab.inside import declare
from tests.observe.explain.asking import Declared
from tests.observe.explain.probe_lab import (
    HOST_ADDRESSES,
    NODE,
    ON_B1,
    OTHER_NODE,
    SENDERS,
    Sender,
    backend_sender,
)
from vipd.model.service import Family, Frontend, Service, family_of

Probe = tuple[Service, Frontend, Sender]


def on_the_host(text: str, settings: dict[str, object]) -> tuple[tuple[Service, ...], Declared]:
    """The services of a declaration, and a daemon on the lab's host that has it."""
    services = declare(text)
    assert services.problems == ()
    return services.services, Declared(text, settings | {"host_addresses": sorted(HOST_ADDRESSES)})


def families(services: Iterable[Service]) -> list[Family]:
    """Those that the services have addresses of."""
    return sorted({family_of(address) for service in services for address in service.addresses})


def probes(services: Iterable[Service], family: Family) -> Iterator[Probe]:
    """Every sender to every frontend."""
    for service in services:
        for to in dict.fromkeys(_targets(service, family)):
            yield from ((service, to, sender) for sender in _senders(service, family))


def _targets(service: Service, family: Family) -> Iterator[Frontend]:
    """Every frontend of a service, its node ports at two addresses of the host, and a port it lacks."""
    for frontend in service.frontends():
        if frontend.address:
            if family_of(frontend.address) is family:
                yield frontend
        elif family is Family.IPV4:
            yield from (frontend._replace(address=address) for address in (NODE, OTHER_NODE))
    own = [address for address in service.addresses if family_of(address) is family]
    yield from (Frontend(address, 7, service.ports[0].protocol) for address in own[:1])


def _senders(service: Service, family: Family) -> list[Sender]:
    """The usual ones, and the service's backend on b1 if there is one."""
    own = [b.address for b in service.backends if b.address in ON_B1 and family_of(b.address) is family]
    return [*SENDERS, *map(backend_sender, own)]
