"""Selects the backends that get new flows, and the share of each. Pure.

The input is a declared service. The result is the dataplane's input: one `Forwarding` for each port of the
service in each of its address families. A forwarding covers all addresses of its family, because kube-proxy's
chains do (contract 1.5), so these addresses share affinity. Contract section 4 defines the choice of
endpoints.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from vipd.model.backend_status import DEFAULT_STATUS, AdminState, BackendStatuses
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import (
    Backend,
    BackendState,
    Balance,
    ExternalAddress,
    Family,
    Masquerade,
    Service,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
    family_of,
    port_names,
    socket_text,
)

if TYPE_CHECKING:  # pydantic is slow to import, and selection does not need it
    from vipd.host.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Facts about this host that selection requires."""

    addresses: frozenset[str]
    node_name: str
    zone: str
    node_names_only: bool
    """A backend is local only by its node name, as for kube-proxy; if false, also by an address of this
    host."""

    def is_local(self, backend: Backend) -> bool:
        """Whether a backend is on this host."""
        if backend.node and self.node_name:
            return backend.node == self.node_name
        return not self.node_names_only and backend.address in self.addresses

    def within(self, networks: Iterable[str]) -> bool:
        """Whether one of this host's addresses is in one of the networks."""
        parsed = [ipaddress.ip_network(network) for network in networks]
        own = [ipaddress.ip_address(address) for address in self.addresses] if parsed else []
        return any(address in network for address in own for network in parsed)


@dataclass(frozen=True, slots=True)
class SelectionPolicy:
    """What selection needs besides the service: the masquerade mode for services that declare none, and facts
    about this host."""

    masquerade: Mapping[Family, Masquerade]
    host: HostIdentity

    @classmethod
    def of(cls, settings: Settings, host_addresses: Iterable[str]) -> SelectionPolicy:
        """The policy for these settings on a host with these addresses."""
        host = HostIdentity(
            frozenset(host_addresses), settings.node_name, settings.zone, settings.compat == "kube-proxy"
        )
        return cls({family: settings.masquerade_for(family) for family in Family}, host)


class _Candidate(NamedTuple):
    """A backend that could serve one port in one family. It is eligible for new flows if its overrides,
    health check and weight allow them."""

    endpoint: Endpoint
    zones: tuple[str, ...]
    local: bool
    ready: bool
    """Eligible, declared `up`, and no backup."""
    ready_backup: bool
    """Eligible, declared `up`, and a backup."""
    terminating: bool
    """Eligible, but declared `drain`."""
    end_flows: bool
    """Its existing flows should end."""
    full: bool
    """It would be eligible, but for its `max_connections`."""
    keeps_affinity: bool
    """An override drains it, but clients with affinity to it still reach it."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """The candidates for traffic under each policy, and whether there are any on any host."""

    cluster: tuple[_Candidate, ...]
    local: tuple[_Candidate, ...]
    has_endpoints: bool
    ready_local: tuple[_Candidate, ...]
    """The ready ones on this host, whatever the policy."""


class _Chosen(NamedTuple):
    """What a forwarding gets of the service's backends: the fields of the same names."""

    endpoints: tuple[Endpoint, ...]
    has_endpoints: bool
    local_endpoints: tuple[Endpoint, ...] = ()
    without_new_flows: tuple[Endpoint, ...] = ()
    unavailable: tuple[Endpoint, ...] = ()
    ready_local: tuple[str, ...] = ()
    affinity_only: tuple[Endpoint, ...] = ()
    full_under: frozenset[TrafficPolicy] = frozenset()


def select_backends(
    service: Service, policy: SelectionPolicy, backend_statuses: BackendStatuses = MappingProxyType({})
) -> tuple[Forwarding, ...]:
    """All forwardings of a service whose backends have the given statuses.

    Backends of weight 0 get no new flows. The first of these groups that is not empty serves: ready backends,
    ready backups, terminating backends, unhealthy backends (if `keeps_unhealthy`), the fallback's backends.
    If all are empty, the flow is refused as the service defines.
    """
    families = sorted({family_of(address) for address in service.all_addresses()})
    names = port_names(service.ports)
    all_serve = not backend_statuses and _all_serve(service, policy.host)
    found = []
    for family in families:
        external = _external(service, family) if service.external_addresses else ()
        for port, name in zip(service.ports, names, strict=True):
            if all_serve:
                endpoints = _every_endpoint(service.backends, port, family)
                chosen = _Chosen(endpoints, has_endpoints=bool(endpoints))
            else:
                exposed = bool(port.node_port or external)
                chosen = _choose(service, port, family, exposed, policy.host, backend_statuses)
            key = ForwardingKey(service.name, name, port.protocol, family)
            found.append(_forwarding(service, port, key, policy, external, chosen))
    return tuple(found)


def _forwarding(
    service: Service,
    port: ServicePort,
    key: ForwardingKey,
    policy: SelectionPolicy,
    external: tuple[ExternalAddress, ...],
    chosen: _Chosen,
) -> Forwarding:
    allowed = tuple([network for network in service.allow_from if family_of(network) is key.family])
    return Forwarding(
        key=key,
        addresses=tuple([a for a in service.addresses if family_of(a) is key.family]),
        port=port.port,
        endpoints=chosen.endpoints,
        masquerade=service.masquerade or policy.masquerade[key.family],
        affinity_timeout=service.affinity.timeout if service.affinity else None,
        refusal=service.refusal,
        without_new_flows=chosen.without_new_flows,
        unavailable=chosen.unavailable,
        ends_flows=service.ends_flows,
        answers_ping=service.answers_ping,
        local_endpoints=chosen.local_endpoints,
        has_endpoints=chosen.has_endpoints,
        internal_policy=service.internal_policy,
        external_policy=service.external_policy if port.node_port or external else TrafficPolicy.CLUSTER,
        external_addresses=external,
        allow_host=bool(external)
        and policy.host.within(network for e in external for network in e.allow_from or ()),
        allow_from=allowed,
        allow_host_inside=bool(allowed) and policy.host.within(allowed),
        node_port=port.node_port,
        health_port=service.health_port,
        ready_local=chosen.ready_local,
        # Rules choose at random; the weights follow the flows.
        balance=Balance.RANDOM if service.balance is Balance.LEAST_CONNECTIONS else service.balance,
        affinity_only=chosen.affinity_only,
        announcement=service.announcement,
        flow_takeover=service.flow_takeover,
        limits=service.limits,
        full_under=chosen.full_under,
    )


def _all_serve(service: Service, host: HostIdentity) -> bool:
    """Whether every backend of a service gets new flows of all clients, as those of most services do while no
    status differs from the declared one. `_choose` then comes to the same result, in four times the time."""
    if (
        service.fallback
        or service.health_port
        or service.internal_policy is not TrafficPolicy.CLUSTER
        or service.external_policy is not TrafficPolicy.CLUSTER
        or service.traffic_distribution is not TrafficDistribution.PREFER_SAME_ZONE
    ):
        return False
    for backend in service.backends:
        if backend.state is not BackendState.UP or not backend.weight or backend.backup:
            return False
        if backend.zones and host.zone:
            return False
    return True


def _every_endpoint(backends: tuple[Backend, ...], port: ServicePort, family: Family) -> tuple[Endpoint, ...]:
    """The endpoints of all backends of one family, in the order of `_candidates`."""
    found = []
    for backend in backends:
        address = backend.address
        number = backend.port_for(port)
        if number is not None and family_of(address) is family:
            found.append((socket_text(address, number), Endpoint(address, number, backend.weight)))
    found.sort(key=_FIRST)
    return tuple([endpoint for _, endpoint in found])


_FIRST = itemgetter(0)


def _choose(
    service: Service,
    port: ServicePort,
    family: Family,
    externally_exposed: bool,
    host: HostIdentity,
    backend_statuses: BackendStatuses,
) -> _Chosen:
    """Choose among the backends of one family by their states and statuses."""
    candidates = _candidates(service.backends, port, family, host, backend_statuses)
    fallback_candidates = _candidates(service.fallback, port, family, host, backend_statuses)
    chosen = _choose_endpoints(candidates, service, externally_exposed, host)
    full = tuple(c for c in candidates if c.full) if backend_statuses else ()
    if not chosen.has_endpoints and service.keeps_unhealthy and not full:
        candidates = _candidates(service.backends, port, family, host, backend_statuses, ignore_health=True)
        chosen = _choose_endpoints(candidates, service, externally_exposed, host)
    if fallback_candidates and not chosen.has_endpoints:
        chosen = _choose_endpoints(fallback_candidates, service, externally_exposed, host)
    known = (*candidates, *fallback_candidates)
    left: tuple[_Candidate, ...] = ()
    if len(chosen.cluster) < len(known):  # mostly each known backend serves
        used = {candidate.endpoint for candidate in (*chosen.cluster, *chosen.local)}
        left = tuple(c for c in known if c.endpoint not in used)
    return _Chosen(
        endpoints=_endpoints(chosen.cluster),
        has_endpoints=chosen.has_endpoints,
        local_endpoints=_endpoints(chosen.local),
        without_new_flows=tuple(c.endpoint for c in left if not c.end_flows),
        unavailable=tuple(c.endpoint for c in known if c.end_flows),
        ready_local=_addresses(chosen.ready_local) if service.health_port else (),
        affinity_only=_draining_with_affinity(candidates, left) if service.affinity is not None else (),
        full_under=_policies_with(full) if full else frozenset(),
    )


def _policies_with(candidates: tuple[_Candidate, ...]) -> frozenset[TrafficPolicy]:
    """The policies under which one of these would serve."""
    local = {TrafficPolicy.LOCAL} if _on_host(candidates) else set()
    return frozenset({TrafficPolicy.CLUSTER, *local})


def _choose_endpoints(
    candidates: tuple[_Candidate, ...], service: Service, externally_exposed: bool, host: HostIdentity
) -> _Selection:
    """Choose ready backends; if there are none, ready backups, and then terminating ones (contract 4).
    Each policy has its own choice.

    A frontend that is accessible from outside also needs the endpoints of the cluster policy, for clients on
    this host.
    """
    local_internal = service.internal_policy is TrafficPolicy.LOCAL
    local_external = externally_exposed and service.external_policy is TrafficPolicy.LOCAL
    backups = tuple(c for c in candidates if c.ready_backup)
    ready = tuple(c for c in candidates if c.ready) or backups
    terminating = tuple(c for c in candidates if c.terminating)
    cluster = (
        () if local_internal and not externally_exposed else _nearest(ready, service, host) or terminating
    )
    local = _on_host(ready) or _on_host(terminating) if local_internal or local_external else ()
    return _Selection(cluster, local, has_endpoints=bool(ready or terminating), ready_local=_on_host(ready))


def _nearest(ready: tuple[_Candidate, ...], service: Service, host: HostIdentity) -> tuple[_Candidate, ...]:
    """The ready backends on this host, if the service prefers them and there are any; else those for this
    host's zone, if all have zones and at least one has this zone; else all."""
    if service.traffic_distribution is TrafficDistribution.PREFER_SAME_NODE and (here := _on_host(ready)):
        return here
    same_zone = tuple(c for c in ready if host.zone in c.zones)
    return same_zone if host.zone and same_zone and all(c.zones for c in ready) else ready


def _on_host(candidates: tuple[_Candidate, ...]) -> tuple[_Candidate, ...]:
    return tuple(c for c in candidates if c.local)


def _external(service: Service, family: Family) -> tuple[ExternalAddress, ...]:
    """The external addresses of one family, each with the networks of that family that may use it."""
    found = []
    for external in service.external_addresses:
        if family_of(external.address) is family:
            allowed = service.allow_from if external.allow_from is None else external.allow_from
            networks = tuple(network for network in allowed if family_of(network) is family)
            found.append(replace(external, allow_from=networks))
    return tuple(found)


def _draining_with_affinity(
    candidates: tuple[_Candidate, ...], left: tuple[_Candidate, ...]
) -> tuple[Endpoint, ...]:
    """Draining backends that clients with affinity to them still reach; none of the fallback's."""
    unused = {c.endpoint for c in left}
    return tuple(c.endpoint for c in candidates if c.keeps_affinity and c.endpoint in unused)


def _candidates(
    backends: tuple[Backend, ...],
    port: ServicePort,
    family: Family,
    host: HostIdentity,
    backend_statuses: BackendStatuses,
    *,
    ignore_health: bool = False,
) -> tuple[_Candidate, ...]:
    """The backends of one family, sorted by their text as kube-proxy sorts endpoints.

    `ignore_health`: treat all as healthy.
    """
    found = []
    for backend in backends:
        number = backend.port_for(port)
        if number is None or family_of(backend.address) is not family:
            continue
        status = backend_statuses.get(str(backend), DEFAULT_STATUS) if backend_statuses else DEFAULT_STATUS
        weight = backend.weight if status.weight is None else status.weight
        healthy = status.healthy or ignore_health
        able = healthy and status.admin is AdminState.ACTIVE and weight > 0
        eligible = able and not status.full
        up = eligible and backend.state is BackendState.UP
        end_flows = backend.state is BackendState.DOWN or status.admin is AdminState.DISABLED or not healthy
        found.append(
            _Candidate(
                Endpoint(backend.address, number, weight),
                backend.zones,
                host.is_local(backend),
                up and not backend.backup,
                up and backend.backup,
                eligible and backend.state is BackendState.DRAIN,
                end_flows,
                able and status.full and backend.state is BackendState.UP,
                status.keeps_affinity and not end_flows and status.admin is AdminState.DRAINING,
            )
        )
    if len(found) > 1:
        found.sort(key=_sort_key)
    return tuple(found)


def _sort_key(candidate: _Candidate) -> str:
    endpoint = candidate.endpoint
    return socket_text(endpoint.address, endpoint.port)


def _endpoints(candidates: tuple[_Candidate, ...]) -> tuple[Endpoint, ...]:
    return tuple(candidate.endpoint for candidate in candidates)


def _addresses(candidates: tuple[_Candidate, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(candidate.endpoint.address for candidate in candidates))
