"""What goes on beside the reconciler: looking for changes and cleaning after them. Loops run for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from typing import Protocol

from vipd.dataplane.base import ApplyError
from vipd.dataplane.conntrack.keeper import ConntrackKeeper
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.watch.disturbance import Disturbance, named
from vipd.dataplane.iptables.watch.peace import Peace
from vipd.dataplane.opening import RuleWatch
from vipd.model import Family
from vipd.reconciler import Reconciler
from vipd.sources.files import FileSource
from vipd.sources.store import StoreError
from vipd.systemd.fields import Event, fields

log = logging.getLogger(__name__)

LOOK_AT_HOST_SECONDS = 5.0
LOOK_AT_CONNTRACK_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 60.0
SHORTEST_PAUSE_SECONDS = 0.01
SWEEP_AFTER_SECONDS = 1.0
WATCH_AGAIN_SECONDS = 5.0
REPAIR_SECONDS = 60.0
DEEDS_TOLD = 5


class Looking(Protocol):
    """Something that may differ from time to time."""

    async def look(self) -> bool:
        """Look; whether anything is different. Raises OSError."""


class Doubting(Protocol):
    """A dataplane whose rules somebody else may have changed."""

    def forget(self) -> None:
        """Trust nothing that is known about the kernel."""

    def doubt(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Trust nothing that is known about these chains."""


async def watch_files(files: FileSource, reconciler: Reconciler) -> None:
    """Wake the reconciler whenever a file's content has changed, or the directory goes or comes back."""
    async for _ in files.changes():
        faults = files.faults()
        if await asyncio.to_thread(files.scan) or files.faults() != faults:
            reconciler.wake()


async def watch_host(host: Looking, reconciler: Reconciler) -> None:
    """Wake the reconciler when this host gets or loses an address."""
    while True:
        await asyncio.sleep(LOOK_AT_HOST_SECONDS)
        try:
            changed = await host.look()
        except OSError as error:
            log.warning("this host cannot be looked at: %s", error)
            continue
        if changed:
            reconciler.wake()


class Fading(Protocol):
    """Orders, some of which end by themselves."""

    def due(self) -> datetime | None:
        """When the next one ends."""

    def tick(self) -> None:
        """Let those end whose time has come. Raises StoreError."""


class Growing(Protocol):
    """Shares, some of which grow by themselves."""

    def due(self) -> float | None:
        """When the next one grows, on the monotonic clock."""

    def tick(self) -> bool:
        """Note those whose time has come; whether there are any."""


async def watch_time(orders: Fading, shares: Growing, reconciler: Reconciler, changed: asyncio.Event) -> None:
    """Wake the reconciler when an order ends or a share grows. `changed`: set when others may be due."""
    while True:
        changed.clear()
        pauses = [LONGEST_PAUSE_SECONDS]
        if (moment := orders.due()) is not None:
            pauses.append((moment - reconciler.clock()).total_seconds())
        if (at := shares.due()) is not None:
            pauses.append(at - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(min(pauses), SHORTEST_PAUSE_SECONDS)):
                await changed.wait()
            continue
        try:
            ended = moment is not None and moment <= reconciler.clock()
            orders.tick()
        except StoreError as error:
            log.error("orders cannot end: %s", error)
            ended = False
        if shares.tick() or ended:
            reconciler.wake()


async def sweep(reconciler: Reconciler, woken: asyncio.Event) -> None:
    """Clear away what changes left behind, once they have paused."""
    while True:
        await woken.wait()
        woken.clear()
        await asyncio.sleep(SWEEP_AFTER_SECONDS)
        if not woken.is_set():
            await reconciler.sweep()


async def watch_rules(
    open_watch: Callable[[], RuleWatch], peace: Peace, dataplane: Doubting, reconciler: Reconciler
) -> None:
    """Repair what others do to our rules: at once, or after a pause where somebody keeps undoing it."""
    while True:
        try:
            async with open_watch() as watch:
                while True:
                    await _repair(await _until_due(watch, peace), peace, dataplane, reconciler)
        except (OSError, ApplyError) as error:
            log.warning("changes of our rules by others cannot be seen: %s; trying again", error)
            await asyncio.sleep(WATCH_AGAIN_SECONDS)


async def _until_due(watch: RuleWatch, peace: Peace) -> list[Disturbance]:
    """Wait for a disturbance, and then until its repair is due; what happened until then."""
    clock = asyncio.get_running_loop().time
    seen = [await anext(watch)]
    due = peace.disturbed(seen[0].actors, clock())
    while (left := due - clock()) > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                seen.append(await anext(watch))
            due = peace.disturbed(seen[-1].actors, clock())
    return seen


async def _repair(
    seen: Sequence[Disturbance], peace: Peace, dataplane: Doubting, reconciler: Reconciler
) -> None:
    written = reconciler.progress.applies
    if any(disturbance.everything for disturbance in seen):
        dataplane.forget()
    else:
        dataplane.doubt({chain for disturbance in seen for chain in disturbance.chains})
    await reconciler.settled(reconciler.wake(), REPAIR_SECONDS)
    repaired = reconciler.progress.applies > written
    peace.repaired(repaired, asyncio.get_running_loop().time())
    if repaired:
        actors = named(actor for disturbance in seen for actor in disturbance.actors)
        done = list(dict.fromkeys(disturbance.deed for disturbance in seen))
        more = f"; and {len(done) - DEEDS_TOLD} more" if len(done) > DEEDS_TOLD else ""
        deeds = "; ".join(done[:DEEDS_TOLD]) + more
        cause = ", ".join(f"process {actor}" for actor in actors)
        extra = fields(Event.RULES_REPAIRED, cause=cause, reason=deeds)
        who = ", ".join(actors) or "somebody"
        log.warning("rules repaired; what had happened: %s: %s", who, deeds, extra=extra)


async def keep_conntrack(
    keeper: ConntrackKeeper, woken: asyncio.Event, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """End the flows that must end: when rules have changed, and from time to time. Holds up nothing."""
    failures = 0
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AT_CONNTRACK_SECONDS):
                await woken.wait()
        woken.clear()
        while keeper.due:
            try:
                cleaned = await keeper.clean()
            except ConntrackError as error:
                failures += 1
                log.warning("flows cannot be cleaned: %s", error)
                await sleep(min(2.0**failures, LONGEST_PAUSE_SECONDS))
                continue
            failures = 0
            if cleaned.deleted:
                told = ", ".join(f"{number} {reason}" for reason, number in cleaned.deleted.items())
                extra = fields(Event.FLOWS_ENDED)
                text = "flows ended: %s; %d examined in %.2f s"
                log.info(text, told, cleaned.examined, cleaned.seconds, extra=extra)
