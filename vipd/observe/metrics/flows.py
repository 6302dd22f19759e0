"""One reading of the counters: new flows in total, and the currently tracked flows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.counting import BackendKey
from vipd.model.flow_limits import Limit
from vipd.observe.flow_stats.collector import FlowStats
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import ConntrackTable, TrackedFlows


@dataclass(frozen=True, slots=True)
class FlowReading:
    """The values at one time. The totals keep changing: read them on the event loop."""

    at: datetime
    """When the new flows were counted."""
    totals: FlowTotals
    table: ConntrackTable
    tracked: Mapping[BackendKey, TrackedFlows] | None = None
    """Current flows, of backends that have any; None: unavailable."""
    by_service: Mapping[str, int] = field(default_factory=dict)
    """The same of all of a service's backends, as a number."""
    traffic: bool = False
    """The totals has the traffic, too."""
    traffic_at: datetime | None = None
    """When open flows were read, which may be some seconds ago; None: at `at`."""
    refused: Mapping[str, Mapping[Limit, int]] = field(default_factory=dict)
    """Flows over each limit of the services that have limits."""


ReadFlows = Callable[[], Awaitable[FlowReading]]


def flow_reader(flow_stats: FlowStats) -> ReadFlows:
    """Readings of a daemon's numbers."""
    return partial(_read, flow_stats)


def by_service(tracked: Mapping[BackendKey, TrackedFlows]) -> Mapping[str, int]:
    """The flows of all backends of each service."""
    found = Counter[str]()
    for place, each in tracked.items():
        found[place.key.service] += each.flows
    return found


async def _read(flow_stats: FlowStats) -> FlowReading:
    await flow_stats.refresh()
    tracked, read_at = None, None
    with contextlib.suppress(ConntrackError):
        sums = await flow_stats.table.sums()
        tracked, read_at = sums.backends, sums.at
    at, table = flow_stats.collector.read_at, flow_stats.table.table()
    traffic = flow_stats.traffic.uncounted(table) is None
    flows = by_service(tracked or {})
    totals, refused = flow_stats.collector.totals, flow_stats.collector.refusals.services()
    return FlowReading(at, totals, table, tracked, flows, traffic, read_at, refused)
