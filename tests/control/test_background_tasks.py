"""What goes on beside the reconciler, in simulated time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.lab.simulated_time import simulate
from tests.sources.store_machine import START, A, B, full_disk, holding
from vipd.control.background_tasks import collect_garbage, save_ended_overrides, take_back_unconfirmed
from vipd.host.supervisor import Supervisor, Work
from vipd.sources.confirmation import Clocks
from vipd.sources.history import ChangeNote
from vipd.sources.store import StoreError, StoreSource

HOUR_SECONDS = 3600.0


class Reconciler:
    """Counts what it is asked for; its clock is the simulated one."""

    def __init__(self) -> None:
        self.wakes = self.sweeps = 0
        self.woken_at: list[float] = []
        self.causes = self
        self.noted: list[tuple[dict[str, str], str]] = []

    def request_sync(self) -> int:
        self.wakes += 1
        self.woken_at.append(asyncio.get_running_loop().time())
        return self.wakes

    def note(self, actions: dict[str, str], cause: str) -> None:
        self.noted.append((actions, cause))

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


async def _run_inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """In place of a thread, for which simulated time would not wait."""
    return function(*arguments)


@pytest.mark.parametrize("full", [(), ("history.jsonl", "services.yaml")])
@pytest.mark.parametrize("jump", [timedelta(days=-400), timedelta(0), timedelta(days=400)])
def test_an_unconfirmed_change_is_taken_back_at_its_time_whatever_the_clock_and_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: tuple[str, ...], jump: timedelta
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", _run_inline)
    reconciler, time_of_day = Reconciler(), START

    async def story() -> StoreSource:
        loop = asyncio.get_running_loop()
        store = StoreSource(
            tmp_path / "services.yaml", Clocks(lambda: time_of_day, loop.time, lambda: "boot")
        )
        store.save(holding(A))

        async def change() -> None:
            nonlocal time_of_day
            await asyncio.sleep(1000)
            store.save(holding(B), ChangeNote("ann", "", 93))
            store.confirmation_changed.set()
            time_of_day += jump
            full_disk(monkeypatch, *full)
            await asyncio.sleep(92)
            assert dict(store.services) == holding(B)
            await asyncio.sleep(2)
            assert dict(store.services) == holding(A)

        supervisor = await supervised(
            lambda: take_back_unconfirmed(store, reconciler),  # type: ignore[arg-type]
            1100,
            change,
        )
        assert bool(supervisor.warnings) == store.unsaved == bool(full)
        return store

    simulate(story())
    assert reconciler.woken_at == [pytest.approx(1093, abs=0.1)]
    assert reconciler.noted == [({"b": "removed", "a": "created"}, "time limit")]


def test_a_confirmed_change_is_not_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", _run_inline)
    reconciler = Reconciler()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        store = StoreSource(tmp_path / "services.yaml", Clocks(lambda: START, loop.time, lambda: "boot"))

        async def change() -> None:
            store.save(holding(A), ChangeNote("ann", "", 90))
            store.confirmation_changed.set()
            await asyncio.sleep(89)
            store.confirm()
            store.confirmation_changed.set()

        await supervised(
            lambda: take_back_unconfirmed(store, reconciler),  # type: ignore[arg-type]
            HOUR_SECONDS,
            change,
        )
        assert dict(store.services) == holding(A)

    simulate(story())
    assert reconciler.wakes == 0
