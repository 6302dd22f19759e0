"""What goes on beside the reconciler, in simulated time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.lab.simulated_time import simulate
from vipd.control.background_tasks import collect_garbage, save_ended_overrides
from vipd.host.supervisor import Supervisor, Work
from vipd.sources.store import StoreError

HOUR_SECONDS = 3600.0


class Reconciler:
    """Counts what it is asked for; its clock is the simulated one."""

    def __init__(self) -> None:
        self.wakes = self.sweeps = 0

    def request_sync(self) -> int:
        self.wakes += 1
        return self.wakes

    async def collect_garbage(self) -> None:
        self.sweeps += 1

    def clock(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=asyncio.get_running_loop().time())


class Unsaved:
    """Overrides that have ended, and whose file cannot be written."""

    unsaved = True

    def __init__(self) -> None:
        self.saves = 0

    def save_expired(self) -> None:
        self.saves += 1
        raise StoreError("the disk is full")


async def supervised(work: Work, seconds: float, beside: Callable[[], Any] | None = None) -> Supervisor:
    supervisor = Supervisor((StoreError,))
    running = [asyncio.create_task(supervisor.run("work", work))]
    if beside:
        running.append(asyncio.create_task(beside()))
    await asyncio.sleep(seconds)
    for task in running:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return supervisor


def test_ended_overrides_that_cannot_be_saved_are_tried_with_growing_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    overrides = Unsaved()

    async def story() -> Supervisor:
        changed = asyncio.Event()
        return await supervised(lambda: save_ended_overrides(overrides, changed), HOUR_SECONDS)

    supervisor = simulate(story())
    assert 50 < overrides.saves < 100, "not every ten milliseconds"
    assert len(caplog.records) == 1
    assert "the disk is full" in supervisor.warnings[0]


def test_changes_without_a_pause_do_not_starve_the_deletion_of_old_rules() -> None:
    reconciler = Reconciler()

    async def story() -> None:
        woken = asyncio.Event()

        async def changes() -> None:
            while True:
                woken.set()
                await asyncio.sleep(0.3)

        await supervised(lambda: collect_garbage(reconciler, woken), 60.0, changes)  # type: ignore[arg-type]

    simulate(story())
    assert 4 <= reconciler.sweeps <= 7, "every ten seconds"
