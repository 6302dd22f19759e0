"""What the reconciler does when a step fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import pairwise

import pytest

from tests.control.reconciling import DNS, World, run_story_simulated
from tests.dataplane.fake_dataplane import FakeDataplane, broken_tool

ENDLESS = 1000
"""So many failures that no retry comes through before a test lets it."""


def test_settled_is_false_after_a_failure_and_after_the_time_is_up() -> None:
    async def story(world: World) -> None:
        clock = asyncio.get_running_loop().time
        world.dataplane.gate = asyncio.Event()
        wish, began = world.reconciler.request_sync(), clock()
        assert not await world.reconciler.wait_synced(wish, 0.1)
        assert clock() - began == pytest.approx(0.1)
        world.dataplane.failures = [broken_tool() for _ in range(ENDLESS)]
        world.dataplane.gate.set()
        assert not await world.settled(wish)
        assert world.reconciler.progress.state == "failed"
        assert "it said no" in world.reconciler.progress.fault
        assert "look at its words" in world.reconciler.progress.fault

    run_story_simulated(story, DNS)


def test_failures_are_tried_again_and_the_recovery_is_told() -> None:
    async def story(world: World) -> None:
        world.dataplane.failures = [broken_tool() for _ in range(4)]
        wish = world.reconciler.request_sync()
        await world.fulfilled(wish)
        assert world.names() == {"dns"}
        assert world.reconciler.progress.state == "in-sync"
        assert world.reconciler.progress.failures == 4
        assert world.reconciler.progress.fault == ""

    run_story_simulated(story, DNS)


def test_the_pauses_between_tries_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []
    applied = FakeDataplane.apply

    async def timed(self: FakeDataplane, plan: object) -> None:
        moments.append(asyncio.get_running_loop().time())
        await applied(self, plan)  # type: ignore[arg-type]  # as it came

    monkeypatch.setattr(FakeDataplane, "apply", timed)

    async def story(world: World) -> None:
        world.dataplane.failures = [broken_tool() for _ in range(8)]
        world.reconciler.request_sync()
        while len(moments) < 9:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(1)
        assert world.names() == {"dns"}

    run_story_simulated(story, DNS)
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])


def test_a_crash_in_a_step_is_a_failure_and_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        world.dataplane.plan_failures = [ZeroDivisionError("oops") for _ in range(ENDLESS)]
        wish = world.reconciler.request_sync()
        assert not await world.settled(wish)
        assert "ZeroDivisionError: oops" in world.reconciler.progress.fault
        world.dataplane.plan_failures.clear()
        await world.fulfilled(wish)
        assert world.names() == {"dns"}

    with caplog.at_level(logging.ERROR):
        run_story_simulated(story, DNS)
    assert "Traceback" in caplog.text


def test_a_crash_before_the_plan_loses_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        taken = FakeDataplane.update
        crashes = [RuntimeError("oops")]

        def crashing(self: FakeDataplane, changes: Mapping[object, object]) -> None:
            if crashes:
                raise crashes.pop()
            taken(self, changes)  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(FakeDataplane, "update", crashing)
        wish = world.reconciler.request_sync()
        await world.fulfilled(wish)
        assert world.names() == {"dns"}, "in sync is told, but the service is not in the kernel"

    run_story_simulated(story, DNS)


def test_a_host_that_cannot_be_read_is_a_failure_that_is_tried_again() -> None:
    async def story(world: World) -> None:
        world.host.failures = [OSError(105, "No buffer space available") for _ in range(ENDLESS)]
        wish = world.reconciler.request_sync()
        assert not await world.settled(wish)
        assert "No buffer space" in world.reconciler.progress.fault
        world.host.failures.clear()
        await world.fulfilled(wish)
        assert world.names() == {"dns"}

    run_story_simulated(story, DNS)
