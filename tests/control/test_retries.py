"""What the reconciler does when a step fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import pairwise

import pytest

from tests.control.reconciling import DNS, WEB, IsolatedReconciler, run_story_simulated
from tests.dataplane.fake_dataplane import FakeDataplane, broken_tool
from tests.model.samples import declared, service
from vipd.model.service import Family

ENDLESS = 1000
"""So many failures that no retry comes through before a test lets it."""


def test_settled_is_false_after_a_failure_and_after_the_time_is_up() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        clock = asyncio.get_running_loop().time
        isolated.dataplane.gate = asyncio.Event()
        wish, began = isolated.reconciler.request_sync(), clock()
        assert not await isolated.reconciler.wait_synced(wish, 0.1)
        assert clock() - began == pytest.approx(0.1)
        isolated.dataplane.failures = [broken_tool() for _ in range(ENDLESS)]
        isolated.dataplane.gate.set()
        assert not await isolated.settled(wish)
        assert isolated.reconciler.progress.state == "failed"
        assert "it said no" in isolated.reconciler.progress.fault
        assert "look at its words" in isolated.reconciler.progress.fault

    run_story_simulated(story, DNS)


def test_failures_are_tried_again_and_the_recovery_is_told() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        isolated.dataplane.failures = [broken_tool() for _ in range(4)]
        wish = isolated.reconciler.request_sync()
        await isolated.fulfilled(wish)
        assert isolated.names() == {"dns"}
        assert isolated.reconciler.progress.state == "in-sync"
        assert isolated.reconciler.progress.failures == 4
        assert isolated.reconciler.progress.fault == ""

    run_story_simulated(story, DNS)


def test_the_pauses_between_tries_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []
    applied = FakeDataplane.apply

    async def timed(self: FakeDataplane, plan: object) -> None:
        moments.append(asyncio.get_running_loop().time())
        await applied(self, plan)  # type: ignore[arg-type]  # as it came

    monkeypatch.setattr(FakeDataplane, "apply", timed)

    async def story(isolated: IsolatedReconciler) -> None:
        isolated.dataplane.failures = [broken_tool() for _ in range(8)]
        isolated.reconciler.request_sync()
        while len(moments) < 9:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(1)
        assert isolated.names() == {"dns"}

    run_story_simulated(story, DNS)
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])


def test_a_crash_in_a_step_is_a_failure_and_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        isolated.dataplane.plan_failures = [ZeroDivisionError("oops") for _ in range(ENDLESS)]
        wish = isolated.reconciler.request_sync()
        assert not await isolated.settled(wish)
        assert "ZeroDivisionError: oops" in isolated.reconciler.progress.fault
        isolated.dataplane.plan_failures.clear()
        await isolated.fulfilled(wish)
        assert isolated.names() == {"dns"}

    with caplog.at_level(logging.ERROR):
        run_story_simulated(story, DNS)
    assert "Traceback" in caplog.text


def test_a_crash_before_the_plan_loses_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        taken = FakeDataplane.update
        crashes = [RuntimeError("oops")]

        def crashing(self: FakeDataplane, changes: Mapping[object, object]) -> None:
            if crashes:
                raise crashes.pop()
            taken(self, changes)  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(FakeDataplane, "update", crashing)
        wish = isolated.reconciler.request_sync()
        await isolated.fulfilled(wish)
        assert isolated.names() == {"dns"}, "in sync is told, but the service is not in the kernel"

    run_story_simulated(story, DNS)


def test_a_host_that_cannot_be_read_is_a_failure_that_is_tried_again() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        isolated.host.failures = [OSError(105, "No buffer space available") for _ in range(ENDLESS)]
        wish = isolated.reconciler.request_sync()
        assert not await isolated.settled(wish)
        assert "No buffer space" in isolated.reconciler.progress.fault
        isolated.host.failures.clear()
        await isolated.fulfilled(wish)
        assert isolated.names() == {"dns"}

    run_story_simulated(story, DNS)


def test_a_quarantine_ends_by_itself_when_its_reason_has_ended() -> None:
    """Tried with growing pauses, up to a minute; nobody has to change or reload anything."""

    async def story(isolated: IsolatedReconciler) -> None:
        dataplane = isolated.dataplane
        dataplane.refuses = lambda forwarding: "no" if forwarding.key.service == "dns" else ""
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.names() == {"web"}
        await asyncio.sleep(20)
        assert 4 <= dataplane.events.count("apply") <= 8, "with growing pauses"
        assert set(isolated.reconciler.progress.quarantined) == {"dns"}
        dataplane.refuses = lambda forwarding: ""
        await asyncio.sleep(32)
        assert not isolated.reconciler.progress.quarantined
        assert isolated.names() == {"dns", "web"}
        applied = dataplane.events.count("apply")
        await asyncio.sleep(60)
        assert dataplane.events.count("apply") == applied

    run_story_simulated(story, DNS, WEB)


def test_a_change_of_the_family_that_is_written_is_there_though_the_step_failed() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        six = service("six", "fd00:96::10")
        isolated.source.candidate = declared(DNS, six)
        failures = [broken_tool() for _ in range(3)]
        for failure in failures:
            failure.families = frozenset({Family.IPV6})
        isolated.dataplane.failures = list(failures)
        wish, reconciler = isolated.reconciler.request_sync(), isolated.reconciler
        assert await reconciler.wait_synced(wish, 60.0, ["dns"])
        assert reconciler.progress.state == "failed"
        assert reconciler.progress.is_pending("six", [Family.IPV6])
        assert not reconciler.progress.is_pending("dns", [Family.IPV4])
        assert not await reconciler.wait_synced(wish, 0.0, ["six"])
        await isolated.fulfilled(wish)
        assert reconciler.progress.state == "in-sync"

    run_story_simulated(story)
