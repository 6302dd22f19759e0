"""Maintains the numbers: reads the kernel's counts from time to time, and on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import ApplyError
from vipd.dataplane.counting import BackendKey, FlowCounter
from vipd.host.batches import in_batches
from vipd.host.durable import error_text, move_aside
from vipd.host.systemd.fields import Event, fields
from vipd.model.forwarding import Forwarding
from vipd.observe.flow_stats import totals_file
from vipd.observe.flow_stats.refusals import Refusals
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import FlowTable
from vipd.observe.flow_stats.traffic_counting import TrafficCounting

log = logging.getLogger(__name__)

EVERY_SECONDS = 10.0
PERIODIC_CPU_SHARE = 0.01
"""Share of one CPU that periodic readings may use."""
ON_REQUEST_CPU_SHARE = 0.05
MIN_PAUSE_SECONDS = 0.5
"""Minimum seconds between two readings on request."""
WRITE_EVERY_SECONDS = 8.0
"""Less than `EVERY_SECONDS`, so that each periodic reading is saved, unless that would take more than
`WRITE_TIME_SHARE`."""
WRITE_TIME_SHARE = 0.01
EXPIRE_EVERY_SECONDS = 30.0
ADDED_AT_ONCE = 5000
"""Backends with new flows: some milliseconds."""
CLOSE_SECONDS = 3.0


class FlowCollector:
    """The totals of one daemon, and the file behind it."""

    def __init__(
        self, counter: FlowCounter, path: Path, forwardings: Callable[[], Iterable[Forwarding]]
    ) -> None:
        """Reads the file. One that cannot be used is reported in the log, and left behind."""
        self._counter, self._path, self._forwardings = counter, path, forwardings
        self.totals, self.refusals, counter_state = self._read()
        if counter_state is not None:
            counter.restore(counter_state)
        self.read_at = datetime.now(UTC)
        """When the kernel's counters were last read."""
        self._lock = asyncio.Lock()
        self._last_read_at = self._last_write_at = float("-inf")
        # Not at once: at first no service is known.
        self._last_expired_at = self._last_garbage_at = time.monotonic()
        self._write_seconds = 0.0
        """Seconds that the last write took."""
        self._failed = False
        """The last reading failed."""

    async def run(self) -> None:
        """Reads the counters periodically, for ever. Raises ApplyError and OSError."""
        while True:
            await self._collect(0.0)
            await asyncio.sleep(max(EVERY_SECONDS, self._counter.seconds / PERIODIC_CPU_SHARE))

    async def refresh(self) -> None:
        """Reads the counters if the last reading is old enough. Ignores failures: `run` reports them."""
        with contextlib.suppress(ApplyError, OSError):
            await self._collect(max(MIN_PAUSE_SECONDS, self._counter.seconds / ON_REQUEST_CPU_SHARE))

    async def collect_now(self) -> None:
        """Read the counts, however recent the last reading is: counters are about to be deleted. `run`
        reports a failure."""
        with contextlib.suppress(ApplyError, OSError):
            await self._collect(0.0)

    async def close(self) -> None:
        """Reads the counters a last time, and writes the totals. Takes a few seconds at most."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._collect(0.0)
        except (TimeoutError, ApplyError, OSError):
            log.warning("the last flows are not counted: the kernel or the disk does not answer")
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._lock.acquire()
        except TimeoutError:
            return  # a reading hangs, and what it lacks must not be saved
        try:
            await self._write()
        except OSError as error:
            log.warning("%s", error)
        finally:
            self._lock.release()

    async def _collect(self, min_pause: float) -> None:
        """Reads the counters unless that was done a moment ago. Raises ApplyError and OSError."""
        async with self._lock:
            began = time.monotonic()
            if began - self._last_read_at < min_pause:
                return
            if began - self._last_expired_at >= EXPIRE_EVERY_SECONDS:
                self._last_expired_at = began
                await self._expire_old()
            self._last_read_at, self._failed = began, True
            # After a failure the next reading includes its counts: the rates are of all that time.
            async for part in in_batches(await self._counter.take(), ADDED_AT_ONCE):
                self.totals.add(part)
            refused = self.refusals.add(await self._counter.refused())
            self.totals.changed = self.totals.changed or refused
            self._report_refusals(began)
            self._failed, self.read_at = False, datetime.now(UTC)
            if began - self._last_write_at >= max(
                WRITE_EVERY_SECONDS, self._write_seconds / WRITE_TIME_SHARE
            ):
                await self._write()
            # Only what is on disk may go from the kernel: a crash must lose no flow.
            if not self.totals.changed and began - self._last_garbage_at >= EXPIRE_EVERY_SECONDS:
                self._last_garbage_at = began
                self.totals.add(await self._counter.collect_garbage())

    def _report_refusals(self, now: float) -> None:
        for service, refused in self.refusals.take_report(now).items():
            counts = ", ".join(f"{number} over {limit}" for limit, number in refused.items())
            extra = fields(Event.FLOWS_REFUSED, service=service, cause="limits", reason=counts)
            log.warning("%s refused new flows: %s", service, counts, extra=extra)

    async def _expire_old(self) -> None:
        """Drops the totals of backends that have been gone for long."""
        # In a thread: with 100,000 services it takes a second.
        counted = [f for f in self._forwardings() if f.key.service in self.totals.services]
        known = await asyncio.to_thread(_backend_keys, counted)
        self.totals.expire(known, time.time())
        self.refusals.expire()

    async def _write(self) -> None:
        """Write the totals if they changed. After a failed reading they lack its counts.
        Raises OSError."""
        if not self.totals.changed or self._failed:
            return
        self.totals.changed = False
        self._last_write_at = began = time.monotonic()
        # No other `take` is between the last one and this: both report the same moment.
        saved = totals_file.SavedTotals(self.totals, self.refusals, self._counter.saved_state())
        try:
            value = await totals_file.value_of(saved)
            await asyncio.to_thread(totals_file.write, self._path, value)
        except OSError as error:
            self.totals.changed = True
            raise OSError(f"{self._path} cannot be written: {error_text(error)}") from None
        finally:
            self._write_seconds = time.monotonic() - began

    def _read(self) -> totals_file.SavedTotals:
        try:
            return totals_file.read(self._path)
        except (OSError, ValueError) as error:
            what, aside = "cannot be read, so flows are counted from zero", move_aside(self._path)
            log.warning("%s %s: %s; %s", self._path, what, error_text(error), aside)
            return totals_file.SavedTotals(FlowTotals(), Refusals(), None)


def _backend_keys(forwardings: Iterable[Forwarding]) -> set[BackendKey]:
    """Every backend, whether it serves or not."""
    return {
        BackendKey(f.key, e.address, e.port)
        for f in forwardings
        for e in (*f.reachable(), *f.without_new_flows, *f.unavailable)
    }


@dataclass(frozen=True, slots=True)
class FlowStats:
    """The parts that count flows."""

    collector: FlowCollector
    table: FlowTable
    traffic: TrafficCounting

    @classmethod
    def of(cls, counter: FlowCounter, reconciler: Reconciler, path: Path, *, traffic: bool) -> FlowStats:
        """For the services of a reconciler; `path` is the file of the totals; `traffic`: count that, too."""

        def forwardings() -> list[Forwarding]:
            return [f for part in reconciler.forwardings.values() for f in part]

        collector = FlowCollector(counter, path, forwardings)
        table = FlowTable(
            lambda: reconciler.forwardings, lambda: reconciler.host_addresses, totals=collector.totals
        )
        reconciler.observers.add(table)
        return cls(collector, table, TrafficCounting(table, collector.totals, wanted=traffic))

    def loops(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The loops that read counters, for ever."""
        return {"counting flows": self.collector.run, "counting traffic": self.traffic.run}

    async def refresh(self) -> None:
        """Refreshes the counters, within the CPU limit."""
        await self.collector.refresh()
        await self.traffic.refresh()

    async def close(self) -> None:
        """Reads the counters a last time, and writes the totals. Takes a few seconds at most."""
        await self.traffic.close()
        await self.collector.close()
