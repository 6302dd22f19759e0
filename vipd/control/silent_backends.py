"""Warns of backends whose flows have had no reply for a minute, whether or not a check looks at them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol as Interface
from typing import TypeVar

from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.entries import SocketAddress
from vipd.dataplane.conntrack.netlink import open_socket
from vipd.dataplane.conntrack.stale import Destination, FlowTargets
from vipd.dataplane.conntrack.unanswered import BackendFlows, Flows, Reached, read_answered, read_unanswered
from vipd.model.formatting import time_text
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Protocol

T = TypeVar("T")

POLL_SECONDS = 15.0
"""Less than the 30 s for which the kernel keeps a UDP flow without reply: each is seen twice."""
SILENT_SECONDS = 60.0
MAX_CPU_SHARE = 0.01
"""Part of one CPU that readings may take: they are further apart where the table is large."""
MAX_SUSPECTS = 1000
HOSTS_NAMED = 10
SERVICES_NAMED = 3


class Conntracked(Interface):
    """The scheduler of connection tracking, as far as it is needed here."""

    @property
    def flow_targets(self) -> FlowTargets:
        """Every destination with its backends."""

    def owner(self, destination: Destination) -> ForwardingKey | None:
        """The forwarding that has a destination."""


@dataclass(slots=True)
class _Suspicion:
    """A backend whose new flows had no reply."""

    since: float
    began: datetime
    expected: bool
    """Replies are expected: always by TCP and SCTP, by UDP where a flow to a destination had one."""
    destinations: set[Destination] = field(default_factory=set)
    """Where its clients send."""
    answered: Set[int] | None = None
    """Its flows that had a reply when this began; None: not read yet."""


class SilentBackends:
    """Judges readings of the conntrack table.

    A flow counts that two readings in a row have seen without a reply; its backend is suspected from the
    first of them on. A reply to a flow that had none then ends that; what is still unanswered does not count
    again: the kernel keeps a connection that its client has given up for two minutes.
    """

    def __init__(
        self,
        conntrack: Conntracked,
        forwardings: Callable[[], Mapping[str, Iterable[Forwarding]]],
        time_of_day: Callable[[], datetime],
        connect: Connect = open_socket,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._conntrack, self._forwardings, self._time_of_day = conntrack, forwardings, time_of_day
        self._connect, self._clock = connect, clock
        self._last: Flows = {}
        self._read_at: tuple[float, datetime] | None = None
        """When the last reading was."""
        self._suspicions: dict[Reached, _Suspicion] = {}
        self._given_up: dict[BackendFlows, Set[int]] = {}
        """Unanswered flows from before a backend's reply."""
        self._silent: dict[str, tuple[datetime, tuple[str, ...]]] = {}
        self._seconds = 0.0
        """CPU time of the last poll."""

    async def run(self) -> None:
        """One reading, and the pause before the next. Raises ConntrackError."""
        self._seconds = 0.0
        await self.poll()
        await asyncio.sleep(max(POLL_SECONDS, self._seconds / MAX_CPU_SHARE))

    async def poll(self) -> None:
        """Read and judge. Raises ConntrackError."""
        targets, now = self._conntrack.flow_targets, (self._clock(), self._time_of_day())
        if not targets.targets:
            self._last, self._read_at, self._suspicions, self._silent = {}, None, {}, {}
            return
        unanswered = await self._read(lambda: read_unanswered(targets, self._connect))
        self._suspect(unanswered)
        if self._suspicions:
            suspects = frozenset(self._suspicions)
            places = (place for suspicion in self._suspicions.values() for place in suspicion.destinations)
            udp = frozenset(place for place in places if place.protocol is Protocol.UDP)
            answered = await self._read(lambda: read_answered(targets, suspects, udp, self._connect))
            self._clear(answered, unanswered)
        self._last, self._read_at = unanswered, now
        self._silent = self._by_host(now[0])

    async def _read(self, read: Callable[[], T]) -> T:
        """Read in a thread, and count its CPU time."""

        def timed() -> tuple[T, float]:
            began = time.thread_time()
            return read(), time.thread_time() - began

        answer, seconds = await asyncio.to_thread(timed)
        self._seconds += seconds
        return answer

    def warnings(self) -> list[str]:
        """A line for each host of silent backends, up to a number."""
        lines = []
        for address, (began, services) in list(self._silent.items())[:HOSTS_NAMED]:
            more = len(services) - SERVICES_NAMED
            named = ", ".join(services[:SERVICES_NAMED]) + (f" and {more} more" if more > 0 else "")
            what = f"backend {address} of {named}: new flows have had no reply since {time_text(began)}"
            lines.append(f"{what}; hint: vipctl doctor {services[0]} connects to its backends")
        more = len(self._silent) - len(lines)
        return [*lines, *([f"and {more} more hosts whose backends do not reply"] if more > 0 else [])]

    def _suspect(self, unanswered: Flows) -> None:
        """Suspect the backends with flows that this reading and the last one saw unanswered."""
        nothing = frozenset[int]()
        kept = {flows: known & unanswered.get(flows, nothing) for flows, known in self._given_up.items()}
        self._given_up = {flows: known for flows, known in kept.items() if known}
        counting = {flows: seen - self._given_up.get(flows, nothing) for flows, seen in unanswered.items()}
        with_flows = {flows.reached for flows, seen in counting.items() if seen}
        self._suspicions = {reached: s for reached, s in self._suspicions.items() if reached in with_flows}
        for flows, seen in counting.items():
            known = flows.reached in self._suspicions or len(self._suspicions) < MAX_SUSPECTS
            if self._read_at and known and seen & self._last.get(flows, nothing):
                expected = flows.destination.protocol is not Protocol.UDP
                new = _Suspicion(*self._read_at, expected)
                self._suspicions.setdefault(flows.reached, new).destinations.add(flows.destination)

    def _clear(self, answered: Flows | None, unanswered: Flows) -> None:
        """End the suspicion of backends that have replied since it began; of all, if too many flows have."""
        replied, replying = defaultdict[Reached, set[int]](set), set[Destination]()
        for flows, seen in (answered or {}).items():
            replied[flows.reached] |= seen
            replying.add(flows.destination)
        cleared = set[Reached]()
        for reached, suspicion in self._suspicions.items():
            suspicion.expected = suspicion.expected or not suspicion.destinations.isdisjoint(replying)
            if suspicion.answered is None and answered is not None:
                suspicion.answered = replied[reached]
            if suspicion.answered is None or replied[reached] - suspicion.answered:
                cleared.add(reached)
        for reached in cleared:
            del self._suspicions[reached]
        self._given_up |= {flows: seen for flows, seen in unanswered.items() if flows.reached in cleared}

    def _by_host(self, now: float) -> dict[str, tuple[datetime, tuple[str, ...]]]:
        """For each address of silent backends that take new flows: since when, and their services."""
        began, services = dict[str, datetime](), dict[str, dict[str, None]]()
        taking = dict[ForwardingKey, frozenset[SocketAddress]]()
        for reached, suspicion in sorted(self._suspicions.items()):
            if not suspicion.expected or now - suspicion.since < SILENT_SECONDS:
                continue
            address = reached.backend[0]
            for key in filter(None, map(self._conntrack.owner, sorted(suspicion.destinations))):
                if key not in taking:
                    known = self._forwardings().get(key.service, ())
                    taking[key] = frozenset(e[:2] for f in known if f.key == key for e in f.reachable())
                if reached.backend in taking[key]:
                    began[address] = min(suspicion.began, began.get(address, suspicion.began))
                    services.setdefault(address, {})[key.service] = None
        return {address: (began[address], tuple(names)) for address, names in services.items()}
