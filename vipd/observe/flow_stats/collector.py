"""Maintains the numbers: reads the kernel's counts from time to time, and on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import ApplyError
from vipd.dataplane.counting import BackendKey, FlowCounter
from vipd.host.batches import in_batches
from vipd.host.durable import error_text
from vipd.host.systemd.fields import Event, fields
from vipd.model.forwarding import Forwarding
from vipd.observe.flow_stats import saved_totals
from vipd.observe.flow_stats.refusals import Refusals
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import FlowTable
from vipd.observe.flow_stats.traffic_counting import TrafficCounting
from vipd.sources.cache import Cache
from vipd.sources.state import StoreError

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
COPIED_AT_ONCE = 200
"""Services: some milliseconds."""
CLOSE_SECONDS = 3.0


class FlowCollector:
    """The totals of one daemon, which the cache keeps."""

    def __init__(
        self, counter: FlowCounter, cache: Cache, forwardings: Callable[[], Iterable[Forwarding]]
    ) -> None:
        """Reads what an earlier run had. If that cannot be used, the log says so."""
        self._counter, self._forwardings = counter, forwardings
        self._bucket = cache.bucket("total", json.dumps, self._whole)
        self._counts: dict[str, object] = {}
        """The kernel's counts, as kept."""
        self._about: dict[str, object] = {}
        self._written = True
        """The totals are on disk."""
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
            self.refusals.add(await self._counter.refused())
            self._report_refusals(began)
            self._failed, self.read_at = False, datetime.now(UTC)
            if began - self._last_write_at >= max(
                WRITE_EVERY_SECONDS, self._write_seconds / WRITE_TIME_SHARE
            ):
                await self._write()
            # Only what is on disk may go from the kernel: a crash must lose no flow.
            kept = self._written and not self.totals.changed
            if kept and began - self._last_garbage_at >= EXPIRE_EVERY_SECONDS:
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
        """Write the totals if they changed. After a failed reading they lack its counts. Raises OSError."""
        about = saved_totals.about(self.totals, self.refusals)
        if self._failed or (self._written and not self.totals.changed and about == self._about):
            return
        self._written, self._about = False, about
        self._last_write_at = began = time.monotonic()
        # No other `take` is between the last one and this: both report the same moment.
        state, changed = self._counter.saved_state(), self.totals.changed.copy()
        self.totals.changed.clear()
        changes = about.copy()
        async for part in in_batches(dict.fromkeys(changed), COPIED_AT_ONCE):
            rows = dict(self.totals.rows(part))
            changes.update({saved_totals.service_key(name): rows.get(name) for name in part})
        try:
            await asyncio.to_thread(self._write_changes, changes, state)
            self._written = True
        except StoreError as error:
            raise OSError(str(error)) from None
        finally:
            self._write_seconds = time.monotonic() - began

    def _write_changes(self, changes: dict[str, object], state: object) -> None:
        """Write these, and the counts of a state that have changed. Raises StoreError."""
        before, self._counts = self._counts, dict(saved_totals.flat(state))
        changes.update(dict.fromkeys(before.keys() - self._counts.keys()))
        changes.update(item for item in self._counts.items() if before.get(item[0]) != item[1])
        self._bucket.put(changes)
        self._bucket.write()

    def _whole(self) -> dict[str, object]:
        rows = self.totals.rows(list(self.totals.services))
        services = {saved_totals.service_key(name): row for name, row in rows}
        return {**self._about, **services, **self._counts}

    def _read(self) -> saved_totals.SavedTotals:
        try:
            saved = saved_totals.decode(self._bucket.load())
        except ValueError as error:
            log.warning("the totals cannot be read, so flows are counted from zero: %s", error_text(error))
            self._bucket.clear()
            return saved_totals.SavedTotals(FlowTotals(), Refusals(), None)
        self._counts = dict(saved_totals.flat(saved.counter_state))
        return saved


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
    def of(cls, counter: FlowCounter, reconciler: Reconciler, cache: Cache, *, traffic: bool) -> FlowStats:
        """For the services of a reconciler; the `cache` keeps the totals; `traffic`: count that, too."""

        def forwardings() -> list[Forwarding]:
            return [f for part in reconciler.forwardings.values() for f in part]

        collector = FlowCollector(counter, cache, forwardings)
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
