"""One reading of what is counted: new flows ever, and the flows that the kernel tracks now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.counting import Place
from vipd.observe.counters.door import Numbers
from vipd.observe.counters.ledger import Ledger
from vipd.observe.counters.traffic import Sum, Table


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known at one time. The ledger goes on counting: it is to be read on the event loop."""

    at: datetime
    """When the new flows were counted."""
    ledger: Ledger
    table: Table
    tracked: Mapping[Place, Sum] | None = None
    """Flows now, of backends that have any; None: the kernel does not say."""
    by_service: Mapping[str, Sum] = field(default_factory=dict)
    """The same in all of a service's backends."""


ReadFlows = Callable[[], Awaitable[Reading]]


def reader(numbers: Numbers) -> ReadFlows:
    """Readings of a daemon's numbers."""
    return partial(_read, numbers)


def by_service(tracked: Mapping[Place, Sum]) -> Mapping[str, Sum]:
    """The sums of all backends of each service."""
    found: dict[str, Sum] = {}
    for place, each in tracked.items():
        total = found.setdefault(place.key.service, Sum())
        total.flows += each.flows
        total.bytes_in += each.bytes_in
        total.bytes_out += each.bytes_out
    return found


async def _read(numbers: Numbers) -> Reading:
    await numbers.counting.refresh()
    try:
        tracked = (await numbers.table.sums()).backends
    except ConntrackError:
        tracked = None
    at, table = numbers.counting.at, numbers.table.table()
    return Reading(at, numbers.counting.ledger, table, tracked, by_service(tracked or {}))
