"""Counts the traffic of services: receives the end of each flow, and periodically reads the open ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import NamedTuple

from vipd.dataplane.conntrack.listener import FlowEndListener
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import ConntrackTable, FlowTable

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""How often to check whether the kernel counts traffic."""
BATCH_SECONDS = 0.25
"""Ends are read together, some thousand at once on a busy host."""
READ_EVERY_SECONDS = 60.0
"""Open flows are read so often, or less often where that would take more than `MAX_CPU_SHARE`."""
MAX_CPU_SHARE = 0.01
CLOSE_SECONDS = 2.0
"""When vipd stops, open flows are read once more unless that takes longer."""
LOG_EVERY_SECONDS = 3600.0


class UncountedReason(NamedTuple):
    """Why traffic is not counted, and the remedy."""

    why: str
    hint: str


TURNED_OFF = UncountedReason(
    "the setting traffic_accounting is false", "traffic_accounting: true in vipd.yaml"
)
NO_ACCOUNTING = UncountedReason("the kernel does not count it", "sysctl -w net.netfilter.nf_conntrack_acct=1")
NO_END_EVENTS = UncountedReason(
    "the kernel does not tell of flows that end", "sysctl -w net.netfilter.nf_conntrack_events=1"
)


class TrafficCounting:
    """Adds the traffic of flows to the totals: periodically reads the open ones, and receives the ends."""

    def __init__(
        self,
        table: FlowTable,
        totals: FlowTotals,
        *,
        wanted: bool = True,
    ) -> None:
        self._table, self._totals, self._wanted = table, totals, wanted
        self._lost = 0
        self._read_at = self._logged_at = float("-inf")
        self._fault = ""

    def uncounted(self, table: ConntrackTable) -> UncountedReason | None:
        """Why traffic is not counted, given this connection tracking table; None if it is."""
        return self._reason(table) or (UncountedReason(self._fault, "") if self._fault else None)

    async def run(self) -> None:
        """Count for ever. Raises ConntrackError when the kernel does not report flows that end."""
        try:
            while True:
                if self.uncounted(self._table.table()):
                    await self._table.stop_listening()
                self._start()
                if (listening := self._table.listening) is None:
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                await _readable(listening)
                await asyncio.sleep(BATCH_SECONDS)
                await self._take()
                pause = max(READ_EVERY_SECONDS, self._table.seconds / MAX_CPU_SHARE)
                if time.monotonic() - self._read_at >= pause:
                    await self._read()
        finally:
            await self._table.stop_listening()

    async def refresh(self) -> None:
        """Read what the kernel has reported. `run` reports a failure."""
        with contextlib.suppress(ConntrackError):
            self._start()
            await self._take()

    async def close(self) -> None:
        """Read open flows a last time, if that is quick."""
        if self._table.listening is not None and self._table.seconds < CLOSE_SECONDS:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._read()

    def _reason(self, table: ConntrackTable) -> UncountedReason | None:
        """Why there is nothing to count."""
        if not self._wanted:
            return TURNED_OFF
        if not table.accounting:
            return NO_ACCOUNTING
        return None if table.events else NO_END_EVENTS

    def _start(self) -> None:
        """Listen only if there are flows to report: it costs the kernel time."""
        if self._table.listening is not None or self._reason(self._table.table()):
            return
        try:
            self._table.start_listening()
            self._lost, self._fault = 0, ""
        except ConntrackError as error:
            self._fault = str(error)
            raise

    async def _take(self) -> None:
        try:
            await self._table.count_ended()
        except ConntrackError as error:
            self._fault = str(error)  # only `run` may stop listening, as it waits for this socket
            raise
        finally:
            self._note_losses()

    async def _read(self) -> None:
        self._read_at = time.monotonic()
        try:
            await self._table.sums(force=True)
        except ConntrackError as error:
            # Not raised: ends of flows are still received, and only the open ones are outdated for a while.
            log.debug("open flows cannot be read: %s; trying again", error)
        self._note_losses()

    def _note_losses(self) -> None:
        listening = self._table.listening
        if listening is None or listening.lost == self._lost:
            return
        lost, self._lost = listening.lost - self._lost, listening.lost
        self._totals.add_lost(lost)
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_SECONDS:
            self._logged_at = now
            log.warning("the kernel could not tell of the end of %d flows: traffic is a lower bound", lost)


async def _readable(listening: FlowEndListener) -> None:
    """Wait for something to read, for some seconds at most."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listening.fileno(), readable.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await readable.wait()
    finally:
        loop.remove_reader(listening.fileno())
