"""FlowStats and tracked flows as JSON values. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from vipd.control.service_status import ready_backends, unchecked_backends
from vipd.dataplane.conntrack.entries import Traffic, flow_state
from vipd.dataplane.counting import BackendKey
from vipd.declaration.bounded_json import Json
from vipd.model.backend_status import UNCHECKED, BackendStatuses
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import Forwarding
from vipd.model.service import Frontend, Service, socket_text
from vipd.observe.endpoint_views import backend_status_by_address
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import Flow, TrackedFlows

TRAFFIC = Traffic._fields


@dataclass(frozen=True, slots=True)
class FlowSnapshot:
    """All numbers of one moment."""

    totals: FlowTotals
    tracked: Mapping[BackendKey, TrackedFlows] | None
    """For backends that have flows; None: connection tracking is unavailable."""
    traffic: bool
    """The totals has the traffic, too."""
    refused: Mapping[str, Mapping[Limit, int]] = field(default_factory=dict)
    """Flows over each limit of the services that have limits."""

    def by_service(self) -> Mapping[str, Sequence[BackendKey]]:
        """The backends that have flows of each service."""
        found: dict[str, list[BackendKey]] = {}
        for place in self.tracked or ():
            found.setdefault(place.key.service, []).append(place)
        return found

    def stats_view(self, new_flows: int, places: Iterable[BackendKey], traffic: Traffic) -> Json:
        """FlowStats; unknown values are null."""
        tracked = self.tracked
        return {
            "new_flows": new_flows,
            "flows": None if tracked is None else sum(tracked[p].flows for p in places if p in tracked),
            **(dict(zip(TRAFFIC, traffic, strict=True)) if self.traffic else dict.fromkeys(TRAFFIC)),
        }


def service_stats_view(
    service: Service,
    forwardings: Sequence[Forwarding],
    snapshot: FlowSnapshot,
    tracked: Sequence[BackendKey],
    *,
    backends: bool,
    backend_statuses: BackendStatuses = MappingProxyType({}),
) -> Json:
    """One item of `services` in the answer to `/v1/stats`; `tracked`: the backends that have flows."""
    totals = snapshot.totals
    name = service.name
    view: Json = {
        "name": name,
        "ready": ready_backends(service, forwardings),
        "declared": len(service.backends),
        "unchecked": unchecked_backends(service, backend_statuses),
        **snapshot.stats_view(totals.flows_of_service(name), tracked, totals.traffic_of_service(name)),
    }
    if service.limits:
        refused = snapshot.refused.get(name, {})
        view["refused"] = {each.limit.value: refused.get(each.limit, 0) for each in service.limits.applied()}
    if not backends:
        return view
    known = [
        BackendKey(f.key, endpoint.address, endpoint.port)
        for f in forwardings
        for endpoint in (*f.reachable(), *f.without_new_flows, *f.unavailable)
    ]
    gone = {*totals.backends_of(name), *tracked}.difference(known)
    ready = {BackendKey(f.key, e.address, e.port) for f in forwardings for e in f.reachable()}
    health = {
        BackendKey(f.key, *address): standing.health
        for f in forwardings
        for address, standing in backend_status_by_address(service, f, backend_statuses).items()
    }
    places = [*((place, False) for place in known), *((place, True) for place in sorted(gone))]
    view["backends"] = [
        {
            "endpoint": socket_text(place.address, place.port),
            "port_name": place.key.port_name,
            "protocol": place.key.protocol,
            "family": str(place.key.family),
            "gone": is_gone,
            "ready": place in ready,
            "health": "" if is_gone else health.get(place, UNCHECKED),
            **snapshot.stats_view(totals.flows_of_backend(place), [place], totals.traffic_of_backend(place)),
        }
        for place, is_gone in places
    ]
    return view


def flow_view(flow: Flow, now: float) -> Json:
    """One item of `flows` in the answer to `/v1/conntrack`; `now` in seconds since 1970."""
    entry = flow.entry
    traffic = entry.traffic
    return {
        "client": socket_text(*entry.source),
        "frontend": str(Frontend(*entry.destination, entry.protocol)),
        "backend": socket_text(*entry.reply_source),
        "protocol": entry.protocol,
        "family": str(entry.family),
        "state": flow_state(entry),
        "masqueraded": entry.reply_destination[0] != entry.source[0],
        "timeout": entry.timeout,
        "age": None if entry.began is None else round(max(now - entry.began / 1e9, 0.0), 3),
        **{name: getattr(traffic, name) if traffic else None for name in TRAFFIC},
    }


def flow_sort_key(flow: Flow) -> tuple[object, ...]:
    """Flows are listed by backend, then by client."""
    entry = flow.entry
    ends = (entry.reply_source, entry.source, entry.destination)
    addresses = [part for address, port in ends for part in (int(ipaddress.ip_address(address)), port)]
    return (entry.family, *addresses, entry.protocol)
