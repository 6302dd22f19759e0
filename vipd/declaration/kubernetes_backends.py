"""From the endpoints of each port, which is how Kubernetes sees them, to backends of a whole service. Pure.

Kubernetes lets every port of a service have its own endpoints at its own port numbers. Nearly always they
are the same servers at the same numbers: then each port gets that number as its target, and a backend is an
address. A server that differs says so by a port of its own, or by ports per name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vipd.declaration.fields import Placed, Report
from vipd.declaration.kubernetes_endpoints import EndpointGroup
from vipd.declaration.kubernetes_services import KubernetesService
from vipd.declaration.service_rules import check_backends
from vipd.model import Backend, BackendState, Family, Service, ServicePort, family_of

_RANKS = {BackendState.UP: 0, BackendState.DRAIN: 1, BackendState.DOWN: 2}

_ByPort = dict[str, dict[tuple[str, int], Placed[Backend]]]
"""By the name of the service's port: the servers by address and number."""


def with_backends(report: Report, declared: KubernetesService, groups: Iterable[EndpointGroup]) -> Service:
    """The service with the backends that these groups, all of this service, make."""
    servers = _servers_by_port(declared, groups)
    numbers = {port: Counter(number for _, number in found) for port, found in servers.items()}
    placed = [p._replace(value=_with_target(p.value, numbers[p.value.name])) for p in declared.ports]
    ports = tuple(port.value for port in placed)
    backends = _backends(ports, servers)
    check_backends(report, backends, declared.addresses, placed)
    return replace(declared.service, ports=ports, backends=tuple(backend.value for backend in backends))


def _servers_by_port(declared: KubernetesService, groups: Iterable[EndpointGroup]) -> _ByPort:
    """Of one address and number that stands twice for a port, the readier one is kept, else the first."""
    families = {family_of(address) for address in declared.service.addresses}
    found: _ByPort = {port.value.name: {} for port in declared.ports}
    served = {(port.value.name, port.value.protocol) for port in declared.ports}
    for group in groups:
        servers = _servers(declared, group, families)
        for port in group.ports:
            if (port.name, port.protocol) in served:
                _merge(found[port.name], servers, port.number)
    return found


def _servers(
    declared: KubernetesService, group: EndpointGroup, families: set[Family]
) -> list[Placed[Backend]]:
    """The group's servers as this service sees them: of its families, zones only if hints count."""
    found = []
    for index, server in enumerate(group.servers):
        if family_of(server.value.address) not in families:
            continue
        late = index in group.not_ready and not declared.publish_not_ready
        value = replace(
            server.value,
            state=BackendState.DOWN if late else server.value.state,
            zones=server.value.zones if declared.zone_hints else (),
        )
        found.append(server._replace(value=value))
    return found


def _merge(
    known: dict[tuple[str, int], Placed[Backend]], servers: Sequence[Placed[Backend]], number: int
) -> None:
    for server in servers:
        key = (server.value.address, number)
        earlier = known.get(key)
        if earlier is None or _RANKS[server.value.state] < _RANKS[earlier.value.state]:
            known[key] = server


def _with_target(port: ServicePort, numbers: Counter[int]) -> ServicePort:
    """The port with the number that most endpoints have, or the lowest such; without any, as it is."""
    if not numbers:
        return port
    most = min(numbers, key=lambda number: (-numbers[number], number))
    return replace(port, target=None if most == port.port else most)


def _backends(ports: Sequence[ServicePort], servers: _ByPort) -> list[Placed[Backend]]:
    """A backend for each server; several where it has several numbers for one port."""
    numbers: dict[Backend, dict[str, list[int]]] = {}
    places: dict[Backend, Placed[Backend]] = {}
    for name, found in servers.items():
        for (_, number), server in found.items():
            numbers.setdefault(server.value, {}).setdefault(name, []).append(number)
            places.setdefault(server.value, server)
    backends = []
    for value, of_ports in numbers.items():
        for turn in range(max(map(len, of_ports.values()))):
            own = {name: several[turn] for name, several in of_ports.items() if turn < len(several)}
            backends.append(places[value]._replace(value=_backend(value, ports, own)))
    return backends


def _backend(server: Backend, ports: Sequence[ServicePort], own: Mapping[str, int]) -> Backend:
    if all(own.get(port.name) == (port.target or port.port) for port in ports):
        return server
    if len(ports) == 1:
        return replace(server, port=own[ports[0].name])
    return replace(server, ports=tuple((port.name, own[port.name]) for port in ports if port.name in own))
