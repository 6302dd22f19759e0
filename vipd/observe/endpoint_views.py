"""The API's view of a forwarding and its endpoints, as JSON values. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from vipd.dataplane.base import Dataplane
from vipd.declaration.bounded_json import Json
from vipd.model.backend_status import DEFAULT_STATUS, BackendStatus, BackendStatuses
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import (
    Backend,
    BackendState,
    Frontend,
    RejectAction,
    Service,
    TrafficDistribution,
    TrafficPolicy,
    port_names,
)

AddressPort = tuple[str, int]
"""A backend's address and port."""

_UNUSED = "not in use now"

NONE_WAITING: Mapping[AddressPort, str] = MappingProxyType({})
NO_LIMITS: Mapping[AddressPort, int] = MappingProxyType({})


def backend_status_by_address(
    service: Service, forwarding: Forwarding, backend_statuses: BackendStatuses
) -> Mapping[AddressPort, BackendStatus]:
    """The status of backends, by the address and port in the forwarding."""
    places = _backends_by_address(service, forwarding) if backend_statuses else {}
    return {place: backend_statuses[str(b)] for place, b in places.items() if str(b) in backend_statuses}


def waiting_by_address(service: Service, forwarding: Forwarding) -> Mapping[AddressPort, str]:
    """Why backends that could serve take no new flows: the backups, the fallback's, those that drain, and
    those that traffic policy or distribution leave out."""
    if not forwarding.without_new_flows:
        return {}
    return {
        place: _why_waiting(service, forwarding, backend)
        for place, backend in _backends_by_address(service, forwarding).items()
    }


def limits_by_address(service: Service, forwarding: Forwarding) -> Mapping[AddressPort, int]:
    """The `max_connections` of the backends that have one."""
    if not any(backend.max_connections for backend in (*service.backends, *service.fallback)):
        return {}
    places = _backends_by_address(service, forwarding)
    return {place: each.max_connections for place, each in places.items() if each.max_connections}


def _why_waiting(service: Service, forwarding: Forwarding, backend: Backend) -> str:
    if backend.backup:
        return "backup, waiting"
    if backend in service.fallback:
        return "fallback, waiting"
    if backend.state is BackendState.DRAIN:
        return "declared drain"
    if forwarding.internal_policy is TrafficPolicy.LOCAL:
        return "on another host, traffic policy local"
    if service.traffic_distribution is TrafficDistribution.PREFER_SAME_NODE:
        return "others are nearer, prefer-same-node"
    return f"for another zone: {', '.join(backend.zones)}" if backend.zones else _UNUSED


def _backends_by_address(service: Service, forwarding: Forwarding) -> dict[AddressPort, Backend]:
    """Every backend of a service, by where one of its forwardings reaches it."""
    key = forwarding.key
    names = zip(service.ports, port_names(service.ports), strict=True)
    port = next((p for p, name in names if (p.protocol, name) == (key.protocol, key.port_name)), None)
    if port is None:
        return {}
    return {
        (backend.address, number): backend
        for backend in (*service.fallback, *service.backends)
        if (number := backend.port_for(port))
    }


def forwarding_view(
    forwarding: Forwarding,
    dataplane: Dataplane,
    backend_statuses: Mapping[AddressPort, BackendStatus],
    waiting: Mapping[AddressPort, str] = NONE_WAITING,
    limits: Mapping[AddressPort, int] = NO_LIMITS,
) -> Json:
    """A ForwardingView of docs/api.md."""
    chain, _ = dataplane.chains_of(forwarding)
    key, outside = forwarding.key, forwarding.external_addresses
    return {
        "name": key.service_port,
        "protocol": key.protocol,
        "family": str(key.family),
        "frontends": [str(Frontend(a, forwarding.port, key.protocol)) for a in forwarding.addresses],
        "external": [str(Frontend(e.address, forwarding.port, key.protocol)) for e in outside],
        "node_port": forwarding.node_port,
        "health_port": forwarding.health_port,
        "traffic_policy": {"internal": forwarding.internal_policy, "external": forwarding.external_policy},
        "masquerade": forwarding.masquerade,
        "affinity_seconds": forwarding.affinity_timeout,
        "refusal": _reject_action(forwarding),
        "chain": chain if forwarding.reachable() else "",
        "endpoints": list(_endpoint_views(forwarding, dataplane, backend_statuses, waiting, limits)),
    }


def _reject_action(forwarding: Forwarding) -> RejectAction:
    """How a flow without an endpoint is refused: under `local` other hosts may still serve it."""
    local = TrafficPolicy.LOCAL in (forwarding.internal_policy, forwarding.external_policy)
    return RejectAction.DROP if local and forwarding.has_endpoints else forwarding.refusal


def _endpoint_views(
    forwarding: Forwarding,
    dataplane: Dataplane,
    backend_statuses: Mapping[AddressPort, BackendStatus],
    waiting: Mapping[AddressPort, str],
    limits: Mapping[AddressPort, int],
) -> Iterator[Json]:
    _, chains = dataplane.chains_of(forwarding)
    shares = forwarding.shares()
    for endpoint in forwarding.reachable():
        status = backend_statuses.get(endpoint[:2], DEFAULT_STATUS)
        yield _endpoint_view(endpoint, status, shares.get(endpoint, 0.0), chains[endpoint]) | {
            "max_connections": limits.get(endpoint[:2])
        }
    for endpoint in (*forwarding.without_new_flows, *forwarding.unavailable):
        status = backend_statuses.get(endpoint[:2], DEFAULT_STATUS)
        yield _endpoint_view(endpoint, status) | {
            "ready": False,
            "reason": status.reason or _why_idle(endpoint, forwarding, waiting),
            "max_connections": limits.get(endpoint[:2]),
        }


def _endpoint_view(endpoint: Endpoint, status: BackendStatus, share: float = 0.0, chain: str = "") -> Json:
    return {
        "endpoint": str(endpoint),
        "address": endpoint.address,
        "port": endpoint.port,
        "weight": endpoint.weight if status.shown_weight is None else status.shown_weight,
        "share": round(share, 6),
        "ready": True,
        "reason": status.reason,
        "health": status.health,
        "check": status.probe_result,
        "chain": chain,
    }


def _why_idle(endpoint: Endpoint, forwarding: Forwarding, waiting: Mapping[AddressPort, str]) -> str:
    if endpoint in forwarding.unavailable:
        return "declared down"
    return waiting.get(endpoint[:2], _UNUSED) if endpoint.weight else "weight 0"
