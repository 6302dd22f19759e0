"""The API's view of a forwarding and its endpoints, as JSON values. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from vipd.dataplane.base import Dataplane
from vipd.declaration.bounded_json import Json
from vipd.model.backend_status import GOOD, BackendStatus, BackendStatuses
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import Backend, Frontend, Policy, Refusal, Service, port_names

Place = tuple[str, int]
"""A backend's address and port."""

NONE_WAIT: Mapping[Place, str] = MappingProxyType({})


def backend_status_by_place(
    service: Service, forwarding: Forwarding, backend_statuses: BackendStatuses
) -> Mapping[Place, BackendStatus]:
    """The status of backends, by the address and port in the forwarding."""
    places = _places(service, forwarding) if backend_statuses else {}
    return {place: backend_statuses[str(b)] for place, b in places.items() if str(b) in backend_statuses}


def waiting_by_place(service: Service, forwarding: Forwarding) -> Mapping[Place, str]:
    """Why backends that could serve take no new flows: the backups and the fallback's."""
    if not (service.fallback or any(backend.backup for backend in service.backends)):
        return {}
    return {
        place: "backup, waiting" if backend.backup else "fallback, waiting"
        for place, backend in _places(service, forwarding).items()
        if backend.backup or backend in service.fallback
    }


def _places(service: Service, forwarding: Forwarding) -> dict[Place, Backend]:
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
    backend_statuses: Mapping[Place, BackendStatus],
    waiting: Mapping[Place, str] = NONE_WAIT,
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
        "refusal": _refusal(forwarding),
        "chain": chain if forwarding.reachable() else "",
        "endpoints": list(_endpoint_views(forwarding, dataplane, backend_statuses, waiting)),
    }


def _refusal(forwarding: Forwarding) -> Refusal:
    """How a flow without an endpoint is refused: under `local` other hosts may still serve it."""
    local = Policy.LOCAL in (forwarding.internal_policy, forwarding.external_policy)
    return Refusal.DROP if local and forwarding.served else forwarding.refusal


def _endpoint_views(
    forwarding: Forwarding,
    dataplane: Dataplane,
    backend_statuses: Mapping[Place, BackendStatus],
    waiting: Mapping[Place, str],
) -> Iterator[Json]:
    _, chains = dataplane.chains_of(forwarding)
    shares = forwarding.shares()
    for endpoint in forwarding.reachable():
        standing = backend_statuses.get(endpoint[:2], GOOD)
        yield _endpoint_view(endpoint, standing, shares.get(endpoint, 0.0), chains[endpoint])
    for endpoint in (*forwarding.resting, *forwarding.down):
        standing = backend_statuses.get(endpoint[:2], GOOD)
        yield _endpoint_view(endpoint, standing) | {
            "ready": False,
            "reason": standing.reason or _why_idle(endpoint, forwarding, waiting),
        }


def _endpoint_view(endpoint: Endpoint, standing: BackendStatus, share: float = 0.0, chain: str = "") -> Json:
    return {
        "endpoint": str(endpoint),
        "address": endpoint.address,
        "port": endpoint.port,
        "weight": endpoint.weight if standing.shown_weight is None else standing.shown_weight,
        "share": round(share, 6),
        "ready": True,
        "reason": standing.reason,
        "health": standing.health,
        "check": standing.answer,
        "chain": chain,
    }


def _why_idle(endpoint: Endpoint, forwarding: Forwarding, waiting: Mapping[Place, str]) -> str:
    if endpoint in forwarding.down:
        return "declared down"
    return waiting.get(endpoint[:2], "not in use now") if endpoint.weight else "weight 0"
