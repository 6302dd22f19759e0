"""What the reconciler does when a step fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from itertools import pairwise

import pytest

from tests.fake_dataplane import FakeDataplane, broken_tool
from tests.reconciling import DNS, World, lived
from vipd import reconciler as room


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between tries."""
    monkeypatch.setattr(room, "FIRST_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(room, "LONGEST_RETRY_SECONDS", 0.08)


def test_settled_is_false_after_a_failure_and_after_the_time_is_up(quick: None) -> None:
    async def story(world: World) -> None:
        world.dataplane.gate = asyncio.Event()
        wish = world.reconciler.wake()
        began = time.monotonic()
        assert not await world.reconciler.settled(wish, 0.1)
        assert 0.09 < time.monotonic() - began < 1
        world.dataplane.failures = [broken_tool()]
        world.dataplane.gate.set()
        assert not await world.reconciler.settled(wish, 5)
        assert world.reconciler.progress.state == "failed"
        assert "it said no" in world.reconciler.progress.fault
        assert "look at its words" in world.reconciler.progress.fault

    lived(story, DNS)


def test_failures_are_tried_again_and_the_recovery_is_told(quick: None) -> None:
    async def story(world: World) -> None:
        world.dataplane.failures = [broken_tool() for _ in range(4)]
        wish = world.reconciler.wake()
        await world.fulfilled(wish)
        assert world.names() == {"dns"}
        assert world.reconciler.progress.state == "in-sync"
        assert world.reconciler.progress.failures == 4
        assert world.reconciler.progress.fault == ""

    lived(story, DNS)


def test_the_pauses_between_tries_grow_to_a_limit(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []

    async def story(world: World) -> None:
        world.dataplane.failures = [broken_tool() for _ in range(6)]
        applied = FakeDataplane.apply

        async def timed(self: FakeDataplane, plan: object) -> None:
            moments.append(time.monotonic())
            await applied(self, plan)  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(FakeDataplane, "apply", timed)
        wish = world.reconciler.wake()
        await world.fulfilled(wish)

    lived(story, DNS)
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert pauses[0] < pauses[1]
    assert pauses[0] < 0.06, "the first pause is the shortest"
    assert all(0.07 < pause < 0.5 for pause in pauses[3:]), pauses


def test_the_first_retry_comes_after_the_first_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FIRST_RETRY_SECONDS", 0.3)
    moments: list[float] = []

    async def story(world: World) -> None:
        world.dataplane.failures = [broken_tool()]
        wish = world.reconciler.wake()
        await world.reconciler.settled(wish, 5)
        moments.append(time.monotonic())
        await world.fulfilled(wish)
        moments.append(time.monotonic())

    lived(story, DNS)
    assert 0.25 < moments[1] - moments[0] < 0.55


def test_a_crash_in_a_step_is_a_failure_and_does_not_end_the_loop(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        world.dataplane.plan_failures = [ZeroDivisionError("oops")]
        wish = world.reconciler.wake()
        assert not await world.reconciler.settled(wish, 5)
        assert "ZeroDivisionError: oops" in world.reconciler.progress.fault
        await world.fulfilled(wish)
        assert world.names() == {"dns"}

    with caplog.at_level(logging.ERROR):
        lived(story, DNS)
    assert "Traceback" in caplog.text


def test_a_crash_before_the_plan_loses_no_change(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        taken = FakeDataplane.update
        crashes = [RuntimeError("oops")]

        def crashing(self: FakeDataplane, changes: Mapping[object, object]) -> None:
            if crashes:
                raise crashes.pop()
            taken(self, changes)  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(FakeDataplane, "update", crashing)
        wish = world.reconciler.wake()
        await world.fulfilled(wish)
        assert world.names() == {"dns"}, "in sync is told, but the service is not in the kernel"

    lived(story, DNS)


def test_a_host_that_cannot_be_read_is_a_failure_that_is_tried_again(quick: None) -> None:
    async def story(world: World) -> None:
        world.host.failures = [OSError(105, "No buffer space available")]
        wish = world.reconciler.wake()
        assert not await world.reconciler.settled(wish, 5)
        assert "No buffer space" in world.reconciler.progress.fault
        await world.fulfilled(wish)
        assert world.names() == {"dns"}

    lived(story, DNS)
