"""The flows in connection tracking, by service and backend, and those that have ended.

Reading takes CPU in proportion to the whole table, so sums are cached for a while: see `MAX_CPU_SHARE`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.entries import Entry, Traffic
from vipd.dataplane.conntrack.flow_end import FlowEnd, FlowTuple
from vipd.dataplane.conntrack.listener import FlowEndListener, open_flow_end_listener
from vipd.dataplane.conntrack.live import CLOSED_STATES
from vipd.dataplane.conntrack.netlink import Conntrack, ConntrackError, open_socket
from vipd.dataplane.counting import BackendKey
from vipd.host.observer import Observer
from vipd.model.forwarding import Forwarding
from vipd.observe.flow_stats.owners import FlowOwners
from vipd.observe.flow_stats.totals import NO_TRAFFIC, FlowTotals, added

MAX_CPU_SHARE = 0.02
MIN_PAUSE_SECONDS = 2.0
SETTLE_SECONDS = 0.01
"""The kernel reports a flow's end a moment before the flow is out of the table."""
MAX_ENDED_PER_READ = 20_000
SYSCTLS = Path("/proc/sys/net/netfilter")


class Flow(NamedTuple):
    """A tracked flow of a service."""

    place: BackendKey
    entry: Entry


@dataclass(slots=True)
class TrackedFlows:
    """Connection tracking's data of one backend."""

    flows: int = 0
    """Those that have not ended."""
    traffic: Traffic = NO_TRAFFIC
    """Of all its flows, including ended ones that have not expired."""

    def add(self, entry: Entry) -> None:
        """One flow more."""
        self.flows += entry.tcp_state not in CLOSED_STATES
        if entry.traffic:
            self.traffic = added(self.traffic, entry.traffic)


@dataclass(frozen=True, slots=True)
class TrackedSnapshot:
    """One reading."""

    at: datetime
    backends: Mapping[BackendKey, TrackedFlows] = field(default_factory=dict)


class ConntrackTable(NamedTuple):
    """The connection tracking table as a whole; None: the kernel does not report it."""

    entries: int | None
    limit: int | None
    accounting: bool
    """New flows have their packets and bytes counted."""
    events: bool = True
    """The kernel reports flows that end."""


Traffics = Mapping[BackendKey, Traffic]


class TableReading(NamedTuple):
    """The table, and the ends that were reported until it was read."""

    sums: TrackedSnapshot
    seconds: float
    """CPU time that it took."""
    before: Traffics
    """Traffic of the flows that had ended by then."""
    after: Traffics
    """Traffic of the flows that have ended since they were read."""


class FlowTable(Observer):
    """Reads the table of the network namespace that vipd is in. Methods may raise ConntrackError."""

    def __init__(
        self,
        services: Callable[[], Mapping[str, tuple[Forwarding, ...]]],
        host_addresses: Callable[[], Collection[str]],
        connect: Connect = open_socket,
        sysctls: Path = SYSCTLS,
        *,
        totals: FlowTotals,
        listen: Callable[[], FlowEndListener] = open_flow_end_listener,
    ) -> None:
        """`services`: the forwardings of each. `totals` gets the traffic of flows while the table listens."""
        self._services, self._host_addresses = services, host_addresses
        self._connect, self._sysctls = connect, sysctls
        self._totals, self._listen = totals, listen
        self._owners, self._dirty = FlowOwners(), True
        self._lock = asyncio.Lock()
        self._sums: TrackedSnapshot | None = None
        self._next = 0.0
        self.seconds = 0.0
        """CPU time that the last reading took."""
        self._held: list[FlowEnd] = []
        """Ended flows that were received by a reading that has just failed."""
        self._ended: FlowEndListener | None = None
        """The socket for ended flows; None while not listening."""

    def stepped(self) -> None:
        """The forwardings may be others now."""
        self._dirty = True

    def table(self) -> ConntrackTable:
        """The current fill level of the table."""
        entries, limit, accounting, events = (
            _number(self._sysctls / f"nf_conntrack_{name}") for name in ("count", "max", "acct", "events")
        )
        return ConntrackTable(entries, limit, bool(accounting), events != 0)

    async def sums(self, *, force: bool = False) -> TrackedSnapshot:
        """The data of each backend; some seconds old if reading takes long, unless `force`."""
        async with self._lock:
            if self._sums and not force and time.monotonic() < self._next:
                return self._sums
            await self._update_owners()
            ended = self._ended
            try:
                reading = await asyncio.to_thread(self._add_up, ended)
            except ConntrackError:
                # Not kept for the next reading: the table may be unreadable for days.
                held, self._held = self._held, []
                self._totals.add_ended(await asyncio.to_thread(self._by_place, held))
                raise
            self._sums, self.seconds = reading.sums, reading.seconds
            self._next = time.monotonic() + max(MIN_PAUSE_SECONDS, reading.seconds / MAX_CPU_SHARE)
            if ended is not None:
                self._totals.add_ended(reading.before)
                self._totals.set_open({place: each.traffic for place, each in reading.sums.backends.items()})
                self._totals.add_ended(reading.after)
            return reading.sums

    async def count_ended(self) -> None:
        """Add the flows that have ended to the totals."""
        async with self._lock:
            if (ended := self._ended) is not None:
                await self._update_owners()
                self._totals.add_ended(
                    await asyncio.to_thread(lambda: self._by_place(ended.read(MAX_ENDED_PER_READ)))
                )

    def start_listening(self) -> None:
        """Listen for flows that end. Raises ConntrackError."""
        self._ended = self._listen()

    @property
    def listening(self) -> FlowEndListener | None:
        """The socket for ended flows; None while not listening."""
        return self._ended

    async def stop_listening(self) -> None:
        """Close the socket when no reading uses it."""
        async with self._lock:
            if self._ended is not None:
                self._ended.close()
                self._ended = None

    async def flows(self, forwardings: Sequence[Forwarding], wanted: Callable[[Flow], bool]) -> list[Flow]:
        """Every current flow through these forwardings that is wanted, including ended ones."""
        async with self._lock:
            owners, seen = FlowOwners(forwardings, self._host_addresses()), set[bytes]()

            def found() -> list[Flow]:
                return [flow for part in self._parts(owners, seen) for flow in part if wanted(flow)]

            return await asyncio.to_thread(found)

    async def _update_owners(self) -> None:
        if self._dirty:
            self._dirty = False
            # In a thread: with 100,000 services the first time takes a second.
            services, addresses = dict(self._services()), self._host_addresses()
            await asyncio.to_thread(self._owners.update, services, addresses)

    def _add_up(self, listening: FlowEndListener | None) -> TableReading:
        began, at = time.thread_time(), datetime.now(UTC)
        ended: list[FlowEnd] = []
        found, seen = dict[BackendKey, TrackedFlows](), set[bytes]()

        def read_ended() -> None:
            ended.extend(listening.read(MAX_ENDED_PER_READ) if listening else ())

        try:
            read_ended()
            earlier = len(ended)
            time.sleep(SETTLE_SECONDS if listening else 0)
            for part in self._parts(self._owners, seen):
                for place, entry in part:
                    found.setdefault(place, TrackedFlows()).add(entry)
                read_ended()
            read_ended()
        except ConntrackError:
            self._held = ended
            raise
        # The traffic of a flow that was read and has ended since is in the reading.
        since = [each for each in ended[earlier:] if each.identity in seen]
        before = [*ended[:earlier], *(each for each in ended[earlier:] if each.identity not in seen)]
        late, early = self._by_place(since), self._by_place(before)
        return TableReading(TrackedSnapshot(at, found), time.thread_time() - began, early, late)

    def _parts(self, owners: FlowOwners, seen: set[bytes]) -> Iterator[list[Flow]]:
        """The flows as they are read, some hundred at once; adds the identity of each to `seen`."""
        for query in owners.queries():
            with Conntrack(self._connect()) as table:
                for chunk in table.dump(query):
                    part = list[Flow]()
                    for entry in chunk:
                        place = owners.backend_key(FlowTuple.of(entry))
                        if place is not None and entry.identity not in seen:  # an entry may appear twice
                            seen.add(entry.identity)
                            part.append(Flow(place, entry))
                    yield part

    def _by_place(self, ended: Iterable[FlowEnd]) -> Traffics:
        ways = dict[FlowTuple, list[int]]()
        for way, (packets_in, bytes_in, packets_out, bytes_out), _ in ended:
            sum_of = ways.setdefault(way, [0, 0, 0, 0])
            sum_of[0] += packets_in
            sum_of[1] += bytes_in
            sum_of[2] += packets_out
            sum_of[3] += bytes_out
        found = dict[BackendKey, Traffic]()
        for way, numbers in ways.items():
            if (place := self._owners.backend_key(way)) is not None:
                found[place] = added(found.get(place, NO_TRAFFIC), Traffic(*numbers))
        return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
