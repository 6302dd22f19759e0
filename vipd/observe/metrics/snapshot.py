"""The content of a scrape, collected from the daemon's objects on its event loop without blocking it.

The objects belong to the loop, so a thread may not read them; with many services other tasks run after
each part. A thread then formats the snapshot as text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, runtime_checkable
from typing import Protocol as Shape

from vipd.control.progress import healthy
from vipd.control.reconciler import Reconciler
from vipd.control.service_status import ready_backends
from vipd.dataplane.conntrack.entries import Traffic
from vipd.dataplane.counting import BackendKey
from vipd.model.backend_status import DEFAULT_STATUS, UNCHECKED, AdminState, BackendStatus
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import Protocol, Service
from vipd.observe.endpoint_views import backend_status_by_address
from vipd.observe.flow_stats.totals import NO_TRAFFIC, added
from vipd.observe.flow_stats.traffic import ConntrackTable
from vipd.observe.metrics.flows import FlowReading
from vipd.observe.views import services_by_state
from vipd.resolver.resolver import Resolver
from vipd.sources.base import Source

YIELD_AFTER_SECONDS = 0.01
"""After so long the loop gets its turn."""

_WORST_FIRST = ("down", "unhealthy", "unknown", UNCHECKED, "healthy")

_ADMIN = {AdminState.ACTIVE: 0, AdminState.DRAINING: 1, AdminState.DISABLED: 2}


@runtime_checkable
class ConnectedSource(Shape):
    """A source that may be cut off from where its declarations are."""

    @property
    def connected(self) -> bool:
        """Whether it receives changes."""


class BackendState(NamedTuple):
    """A backend where it is reached; several service ports that lead there count as one."""

    health: str
    """`healthy`, `unhealthy`, `unknown`, `unchecked`, or `down` as declared."""
    admin: int
    weight: int
    new_flows: int
    flows: int
    traffic: Traffic

    def merged(self, other: BackendState) -> BackendState:
        """Both as one."""
        return BackendState(
            min(self.health, other.health, key=_WORST_FIRST.index),
            max(self.admin, other.admin),
            max(self.weight, other.weight),
            self.new_flows + other.new_flows,
            self.flows + other.flows,
            added(self.traffic, other.traffic),
        )


@dataclass(frozen=True, slots=True)
class ServiceColumns:
    """A row for each service. Stored as columns: as many objects as cells would start long garbage
    collections, during which nothing else runs."""

    names: list[str] = field(default_factory=list)
    backends: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    new_flows: list[int] = field(default_factory=list)
    flows: list[int] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)

    def add(self, service: Service, ready: int, new_flows: int, flows: int, traffic: Traffic) -> None:
        """One more row."""
        self.names.append(service.name)
        self.backends.append(len(service.backends))
        self.ready.append(ready)
        self.new_flows.append(new_flows)
        self.flows.append(flows)
        self.traffic.append(traffic)


@dataclass(frozen=True, slots=True)
class BackendColumns:
    """A row for each backend of each service, as columns too."""

    services: list[str] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)
    protocols: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    admin: list[int] = field(default_factory=list)
    weight: list[int] = field(default_factory=list)
    new_flows: list[int] = field(default_factory=list)
    flows: list[int] = field(default_factory=list)
    bytes_in: list[int] = field(default_factory=list)
    bytes_out: list[int] = field(default_factory=list)

    def add(self, service: str, endpoint: str, protocol: str, state: BackendState) -> None:
        """One more row."""
        self.services.append(service)
        self.endpoints.append(endpoint)
        self.protocols.append(protocol)
        self.health.append(state.health)
        self.admin.append(state.admin)
        self.weight.append(state.weight)
        self.new_flows.append(state.new_flows)
        self.flows.append(state.flows)
        self.bytes_in.append(state.traffic.bytes_in)
        self.bytes_out.append(state.traffic.bytes_out)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Everything except the content of `MetricCounters`."""

    in_sync: bool
    healthy: bool
    applies: int
    failures: int
    quarantined: int
    states: Mapping[str, int]
    """Number of services in each state."""
    problems: Mapping[str, int]
    """By source."""
    connected: Mapping[str, bool]
    """By source, of those that can be disconnected."""
    services: ServiceColumns
    backends: BackendColumns
    counted: bool
    """The numbers of new flows are known; else they are 0."""
    tracked: bool
    """The numbers of current flows are known; else they are 0."""
    traffic: bool
    """The traffic is known; else it is 0."""
    lost_flows: int
    """Flows whose end was missed, so that their traffic is not fully known."""
    table: ConntrackTable | None
    """Connection tracking as a whole."""
    refused: Mapping[str, Mapping[Limit, int]] = field(default_factory=dict)
    """New flows over each limit, of the services that have limits."""
    names: Mapping[str, int] = field(default_factory=dict)
    """Numbers of DNS names, by metric; empty without name resolution."""
    lookups: Mapping[str, int] = field(default_factory=dict)
    """Lookups by how they ended."""


async def take_snapshot(
    reconciler: Reconciler, sources: Sequence[Source], reading: FlowReading | None
) -> MetricsSnapshot:
    """The daemon's current state; services that change meanwhile may be old or new."""
    services, backends = await _rows(reconciler, reading)
    progress = reconciler.progress
    return MetricsSnapshot(
        in_sync=progress.state == "in-sync",
        healthy=healthy(progress, reconciler.clock())[0],
        applies=progress.applies,
        failures=progress.failures,
        quarantined=len(progress.quarantined),
        states=services_by_state(reconciler),
        problems={source.name: _problems(source, reconciler) for source in sources},
        connected={
            source.name: source.connected for source in sources if isinstance(source, ConnectedSource)
        },
        services=services,
        backends=backends,
        counted=reading is not None,
        tracked=reading is not None and reading.tracked is not None,
        traffic=reading is not None and reading.traffic,
        lost_flows=reading.totals.lost if reading else 0,
        table=reading.table if reading else None,
        refused=reading.refused if reading else {},
        names=_names(reconciler.resolver),
        lookups=dict(reconciler.resolver.lookups) if reconciler.resolver else {},
    )


def _names(resolver: Resolver | None) -> Mapping[str, int]:
    states = resolver.states.values() if resolver else ()
    return {
        "vipd_names": len(states),
        "vipd_names_failing": sum(1 for state in states if state.fault),
        "vipd_names_held": sum(1 for state in states if state.held),
    }


async def _rows(reconciler: Reconciler, reading: FlowReading | None) -> tuple[ServiceColumns, BackendColumns]:
    services, backends, began = ServiceColumns(), BackendColumns(), perf_counter()
    for name in tuple(reconciler.services):
        service = reconciler.services.get(name)
        if service is None:
            continue
        forwardings = reconciler.forwardings.get(name, ())
        counts = (0, 0, NO_TRAFFIC)
        if reading:
            totals = reading.totals
            traffic = totals.traffic_of_service(name) if reading.traffic else NO_TRAFFIC
            counts = (totals.flows_of_service(name), reading.by_service.get(name, 0), traffic)
        services.add(service, ready_backends(service, forwardings), *counts)
        for (endpoint, protocol), state in _backend_states(reconciler, service, forwardings, reading).items():
            backends.add(name, endpoint, protocol, state)
        if perf_counter() - began > YIELD_AFTER_SECONDS:
            await asyncio.sleep(0)
            began = perf_counter()
    return services, backends


def _backend_states(
    reconciler: Reconciler, service: Service, forwardings: Sequence[Forwarding], reading: FlowReading | None
) -> Mapping[tuple[str, Protocol], BackendState]:
    places: dict[tuple[str, Protocol], BackendState] = {}
    backend_statuses = reconciler.backend_statuses(service)
    for forwarding in forwardings:
        stood = backend_status_by_address(service, forwarding, backend_statuses)
        for endpoint, weight in _endpoints(forwarding):
            state = _backend(forwarding, endpoint, weight, stood.get(endpoint[:2], DEFAULT_STATUS), reading)
            known = places.get(where := (str(endpoint), forwarding.key.protocol))
            places[where] = known.merged(state) if known else state
    return places


def _endpoints(forwarding: Forwarding) -> Iterable[tuple[Endpoint, int]]:
    """Every endpoint with its weight for new flows."""
    yield from ((endpoint, endpoint.weight) for endpoint in forwarding.reachable())
    yield from ((endpoint, 0) for endpoint in (*forwarding.without_new_flows, *forwarding.unavailable))


def _backend(
    forwarding: Forwarding,
    endpoint: Endpoint,
    weight: int,
    status: BackendStatus,
    reading: FlowReading | None,
) -> BackendState:
    down = endpoint in forwarding.unavailable and status.admin is not AdminState.DISABLED
    health = "down" if down else status.health
    if reading is None:
        return BackendState(health, _ADMIN[status.admin], weight, 0, 0, NO_TRAFFIC)
    place = BackendKey(forwarding.key, endpoint.address, endpoint.port)
    now = reading.tracked.get(place) if reading.tracked else None
    new_flows = reading.totals.flows_of_backend(place)
    traffic = reading.totals.traffic_of_backend(place) if reading.traffic else NO_TRAFFIC
    return BackendState(health, _ADMIN[status.admin], weight, new_flows, now.flows if now else 0, traffic)


def _problems(source: Source, reconciler: Reconciler) -> int:
    units = source.units()
    return len(source.faults()) + sum(len(found) for u, found in reconciler.problems.items() if u in units)
