"""Background tasks beside the reconciler: they poll for changes, and clean up after steps.

Each is one round of a loop, or a loop; `vipd.host.supervisor` restarts it, and handles the exceptions that
it raises."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import Dataplane
from vipd.dataplane.conntrack.scheduler import ConntrackScheduler
from vipd.dataplane.iptables.watch.external_change import ExternalChange, named
from vipd.dataplane.iptables.watch.repair_backoff import RepairBackoff
from vipd.dataplane.iptables.watch.stream import ExternalChangeStream
from vipd.host.systemd.fields import Event, fields
from vipd.sources.files import SETTLE_SECONDS, FileSource
from vipd.sources.overrides import OverrideStore
from vipd.sources.store import StoreSource

log = logging.getLogger(__name__)

POLL_HOST_SECONDS = 5.0
CONNTRACK_POLL_SECONDS = 5.0
MAX_PAUSE_SECONDS = 60.0
MIN_PAUSE_SECONDS = 0.01
_SETTLES = "scan files again"
READERS = 3
"""Authors whose large files are parsed at the same time."""
GC_QUIET_SECONDS = 1.0
GC_MAX_DELAY_SECONDS = 10.0
"""Leftovers of changes are deleted after this time, however often changes continue."""
CONFIRM_POLL_SECONDS = 10.0
REPAIR_SECONDS = 60.0
MAX_KINDS_LOGGED = 5


class HostPoller(Protocol):
    """Something that may differ from time to time."""

    async def refresh(self) -> bool:
        """Poll; returns whether anything changed. Raises OSError."""


async def watch_files(files: FileSource, reconciler: Reconciler) -> None:
    """Wake the reconciler whenever a file's content has changed, or the directory disappears or reappears;
    for ever."""
    watcher = _FileWatcher(files, reconciler)
    try:
        async for _ in files.changes():
            await watcher.scan()
            watcher.begin()
    finally:
        watcher.end()


class _FileWatcher:
    """Scans, and does beside that what a scan has left because it takes long."""

    def __init__(self, files: FileSource, reconciler: Reconciler) -> None:
        self._files, self._reconciler = files, reconciler
        self._reading = set[str]()
        """Authors whose files are parsed."""
        self._tasks = set[asyncio.Task[None]]()

    async def scan(self) -> None:
        """Scan; the reconciler wakes if anything is new."""
        files, faults = self._files, self._files.faults()
        if await asyncio.to_thread(files.scan, False) or files.faults() != faults:
            self._reconciler.request_sync()

    def begin(self) -> None:
        """Begin what is left, as far as nothing does it. Raises what has ended such work."""
        ended = {task for task in self._tasks if task.done()}
        self._tasks -= ended
        for task in ended:
            task.result()
        if self._files.unsettled and not any(task.get_name() == _SETTLES for task in self._tasks):
            self._tasks.add(asyncio.create_task(self._settle(), name=_SETTLES))
        for _ in range(min(len(self._waiting()), READERS - len(self._reading))):
            self._tasks.add(asyncio.create_task(self._read(), name="read large files"))

    def end(self) -> None:
        """End all of it."""
        for task in self._tasks:
            task.cancel()

    def _waiting(self) -> list[str]:
        return [author for author in self._files.postponed if author not in self._reading]

    async def _settle(self) -> None:
        while self._files.unsettled:
            await asyncio.sleep(SETTLE_SECONDS)
            await self.scan()

    async def _read(self) -> None:
        while len(self._reading) < READERS and (waiting := self._waiting()):
            self._reading.add(waiting[0])
            try:
                await asyncio.to_thread(self._files.read_postponed, waiting[0])
            finally:
                self._reading.discard(waiting[0])
            await self.scan()


async def poll_host(host: HostPoller, reconciler: Reconciler) -> None:
    """After a pause, wake the reconciler if this host got or lost an address. Raises OSError."""
    await asyncio.sleep(POLL_HOST_SECONDS)
    if await host.refresh():
        reconciler.request_sync()


class Expiring(Protocol):
    """Overrides, some of which end by themselves."""

    def next_expiry(self) -> datetime | None:
        """When the next one ends."""

    def expire_due(self) -> None:
        """End those whose time has come."""


class SlowStart(Protocol):
    """Shares, some of which grow with time."""

    def due(self) -> float | None:
        """When the next one grows, on the monotonic clock."""

    def tick(self) -> bool:
        """Mark the shares that are due; returns whether there are any."""


async def expire_overrides(overrides: Expiring, reconciler: Reconciler, changed: asyncio.Event) -> None:
    """Wait until the next override ends, and wake the reconciler then. `changed`: set when another may be
    due."""
    changed.clear()
    moment = overrides.next_expiry()
    pause = MAX_PAUSE_SECONDS
    if moment is not None:
        pause = min(pause, (moment - reconciler.clock()).total_seconds())
    if await _set_within(changed, pause):
        return
    overrides.expire_due()
    if moment is not None and moment <= reconciler.clock():
        reconciler.request_sync()


async def take_back_unconfirmed(store: StoreSource, reconciler: Reconciler) -> None:
    """Wait until the time to confirm the last change of the store is over, take the change back, and wake the
    reconciler. Raises StoreError while the disk lacks that; it is due again then."""
    changed = store.confirmation_changed
    changed.clear()
    if store.unsaved:
        async with store.change_lock:
            await asyncio.to_thread(store.save_taken_back)
    left = store.seconds_to_confirm()
    # The event loop's clock stands still while the host is suspended, so the pause is short.
    pause = CONFIRM_POLL_SECONDS if left is None else min(CONFIRM_POLL_SECONDS, left)
    if await _set_within(changed, pause) or left is None:
        return
    async with store.change_lock:
        if actions := await asyncio.to_thread(store.take_back_due):
            reconciler.causes.note(actions, "time limit")
            reconciler.request_sync()


async def save_ended_overrides(overrides: OverrideStore, changed: asyncio.Event) -> None:
    """Record on disk that overrides have expired; they expire without waiting for it. `changed`: set when
    some may have expired. Raises StoreError; the record is then due again."""
    changed.clear()
    if not overrides.unsaved:
        await _set_within(changed, MAX_PAUSE_SECONDS)
    await overrides.save_expired()


async def advance_slow_start(shares: SlowStart, reconciler: Reconciler, changed: asyncio.Event) -> None:
    """Wait until the next share of a slow start grows, and wake the reconciler then."""
    changed.clear()
    at = shares.due()
    pause = MAX_PAUSE_SECONDS if at is None else min(MAX_PAUSE_SECONDS, at - time.monotonic())
    if not await _set_within(changed, pause) and shares.tick():
        reconciler.request_sync()


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; returns whether it was set in time."""
    try:
        async with asyncio.timeout(max(seconds, MIN_PAUSE_SECONDS)):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def collect_garbage(reconciler: Reconciler, woken: asyncio.Event) -> None:
    """Delete the leftovers of changes once changes have paused, or after some seconds in which they did
    not. Raises ApplyError."""
    await woken.wait()
    clock = asyncio.get_running_loop().time
    latest = clock() + GC_MAX_DELAY_SECONDS
    while (left := latest - clock()) > 0:
        woken.clear()
        if not await _set_within(woken, min(GC_QUIET_SECONDS, left)):
            break
    await reconciler.collect_garbage()


async def watch_rules(
    open_watch: Callable[[], ExternalChangeStream],
    backoff: RepairBackoff,
    dataplane: Dataplane,
    reconciler: Reconciler,
) -> None:
    """Repair vipd's rules after changes by others, for ever: at once, or after a pause if another program
    keeps undoing the repair. Raises OSError and ApplyError when the rules cannot be watched."""
    async with open_watch() as watch:
        if reconciler.progress.attempted:  # changes from before the watch began are unknown
            dataplane.invalidate_all()
            reconciler.request_sync()
        while True:
            await _repair(await _until_due(watch, backoff), backoff, dataplane, reconciler)


async def _until_due(watch: ExternalChangeStream, backoff: RepairBackoff) -> list[ExternalChange]:
    """Wait for a disturbance, and then until its repair is due; returns the changes until then."""
    clock = asyncio.get_running_loop().time
    seen = [await anext(watch)]
    due = backoff.record_change(seen[0].actors, clock())
    while (left := due - clock()) > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                seen.append(await anext(watch))
            due = backoff.record_change(seen[-1].actors, clock())
    return seen


async def _repair(
    seen: Sequence[ExternalChange],
    backoff: RepairBackoff,
    dataplane: Dataplane,
    reconciler: Reconciler,
) -> None:
    written = reconciler.progress.applies
    if any(disturbance.everything for disturbance in seen):
        dataplane.invalidate_all()
    else:
        dataplane.invalidate({chain for disturbance in seen for chain in disturbance.chains})
    await reconciler.wait_synced(reconciler.request_sync(), REPAIR_SECONDS)
    repaired = reconciler.progress.applies > written
    backoff.record_repair(repaired, asyncio.get_running_loop().time())
    if repaired:
        actors = named(actor for disturbance in seen for actor in disturbance.actors)
        done = list(dict.fromkeys(disturbance.kind_of_change for disturbance in seen))
        more = f"; and {len(done) - MAX_KINDS_LOGGED} more" if len(done) > MAX_KINDS_LOGGED else ""
        deeds = "; ".join(done[:MAX_KINDS_LOGGED]) + more
        cause = ", ".join(f"process {actor}" for actor in actors)
        extra = fields(Event.RULES_REPAIRED, cause=cause, reason=deeds)
        who = ", ".join(actors) or "somebody"
        log.warning("rules repaired; what had happened: %s: %s", who, deeds, extra=extra)


async def clean_flows(scheduler: ConntrackScheduler, reconciler: Reconciler, woken: asyncio.Event) -> None:
    """End the flows that must end: when rules have changed, and from time to time. Raises ConntrackError; it
    is due again then."""
    if not scheduler.due:
        await _set_within(woken, CONNTRACK_POLL_SECONDS)
    woken.clear()
    while scheduler.due:
        resets = scheduler.resets()
        try:
            cleaned = await scheduler.clean()
        finally:
            if scheduler.resets() != resets:  # their rules are written by a step
                reconciler.request_sync()
        if cleaned.deleted:
            ended = ", ".join(f"{number} {reason}" for reason, number in cleaned.deleted.items())
            extra = fields(Event.FLOWS_ENDED)
            text = "flows ended: %s; %d examined in %.2f s"
            log.info(text, ended, cleaned.examined, cleaned.seconds, extra=extra)
