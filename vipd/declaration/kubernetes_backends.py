"""Converts the endpoints of each port, as in Kubernetes, to backends of a whole service. Pure.

Kubernetes lets every port of a service have its own endpoints at its own port numbers. Nearly always they
are the same servers at the same numbers: then each port gets that number as its target, and a backend is an
address. A server that differs gets its own port, or ports by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vipd.declaration.fields import Located, Report
from vipd.declaration.kubernetes_endpoints import EndpointGroup
from vipd.declaration.kubernetes_services import HINTS_ANNOTATION, KubernetesService
from vipd.declaration.service_rules import check_backends
from vipd.declaration.service_size import check_address_endpoints, check_size, service_network_count
from vipd.model import limits
from vipd.model.service import Backend, BackendState, Family, Service, ServicePort, family_of

_RANKS = {BackendState.UP: 0, BackendState.DRAIN: 1, BackendState.DOWN: 2}

_ByPort = dict[str, dict[tuple[str, int], Located[Backend]]]
"""By the name of the service's port: the servers by address and number."""


def with_backends(
    report: Report, declared: KubernetesService, groups: Sequence[EndpointGroup]
) -> Service | None:
    """The service with the backends of these groups, all of this service; None if there are too
    many, which is reported."""
    if not _within_limits(report, declared, groups):
        return None
    _note_hints(report, declared, groups)
    servers = _servers_by_port(declared, groups)
    numbers = {port: Counter(number for _, number in found) for port, found in servers.items()}
    placed = [p._replace(value=_with_target(p.value, numbers[p.value.name])) for p in declared.ports]
    ports = tuple(port.value for port in placed)
    if not _can_combine(report, declared, servers):
        return None
    backends = _backends(ports, servers)
    check_backends(report, backends, declared.addresses, placed)
    return replace(declared.service, ports=ports, backends=tuple(backend.value for backend in backends))


def _note_hints(report: Report, declared: KubernetesService, groups: Sequence[EndpointGroup]) -> None:
    """Note hints that do not count, and a preference that has none to go by."""
    hinted = any(server.value.zones for group in groups for server in group.servers)
    name, asked = declared.service.name, declared.prefers_zone
    if hinted and declared.zone_hints is None:
        why = f"it has neither trafficDistribution nor the annotation {HINTS_ANNOTATION}"
        report.note(declared.service.origin.line, f"Service {name}: hints of its endpoints left out: {why}")
    if asked is not None and not hinted and any(group.servers for group in groups):
        text = f"Service {name}: trafficDistribution {asked.value} has no effect: no endpoint has hints"
        report.note(asked.line, text)


def _within_limits(report: Report, declared: KubernetesService, groups: Sequence[EndpointGroup]) -> bool:
    """Whether the number of servers, in all and at each port, is within the limits."""
    served = {(port.value.name, port.value.protocol) for port in declared.ports}
    servers = [server for group in groups for server in group.servers]
    reached = sum(len(g.servers) * sum((p.name, p.protocol) in served for p in g.ports) for g in groups)
    line, ports = declared.service.origin.line, [*declared.ports]
    networks = service_network_count(declared.service)
    if not check_size(report, line, "", ports, servers, len(declared.service.all_addresses()) + networks):
        return False
    if reached > limits.SERVICE_ENDPOINTS:
        what = f"its endpoints reach {reached} ports of servers: {limits.SERVICE_ENDPOINTS} are the most"
        report.add(line, "", what, "divide it into several services")
        return False
    return check_address_endpoints(report, line, "", len(declared.service.all_addresses()), reached)


def _can_combine(report: Report, declared: KubernetesService, servers: _ByPort) -> bool:
    """Whether the servers' numbers at each port are few enough to list for each which ports it has."""
    reached = len(declared.ports) * sum(map(len, servers.values()))
    if reached > limits.NAMED_PORT_LOOKUPS and len({*map(frozenset, servers.values())}) > 1:
        what = f"its ports have different endpoints, which make {reached} combinations"
        hint = f"{limits.NAMED_PORT_LOOKUPS} are the most: divide it into several services"
        report.add(declared.service.origin.line, "", what, hint)
        return False
    return True


def _servers_by_port(declared: KubernetesService, groups: Iterable[EndpointGroup]) -> _ByPort:
    """If an address and number occurs twice for a port, the readier one is kept, else the first."""
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
) -> list[Located[Backend]]:
    """The group's servers for this service: of its families, with zones only if hints count."""
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
    known: dict[tuple[str, int], Located[Backend]], servers: Sequence[Located[Backend]], number: int
) -> None:
    for server in servers:
        key = (server.value.address, number)
        earlier = known.get(key)
        if earlier is None or _RANKS[server.value.state] < _RANKS[earlier.value.state]:
            known[key] = server


def _with_target(port: ServicePort, numbers: Counter[int]) -> ServicePort:
    """The port with the number of most endpoints, or the lowest such; without any, unchanged."""
    if not numbers:
        return port
    most = min(numbers, key=lambda number: (-numbers[number], number))
    return replace(port, target=None if most == port.port else most)


def _backends(ports: Sequence[ServicePort], servers: _ByPort) -> list[Located[Backend]]:
    """A backend for each server; several where it has several numbers for one port."""
    numbers: dict[Backend, dict[str, list[int]]] = {}
    places: dict[Backend, Located[Backend]] = {}
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
