"""Background loops: run again after a failure, logged once, counted and named until they work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from itertools import count, pairwise
from random import Random

import pytest

from tests.lab.simulated_time import simulate
from vipd.host.supervisor import (
    MAX_BACKOFF_SECONDS,
    MAX_LOGGED_REASONS,
    Backoff,
    Loop,
    LoopState,
    Supervisor,
    Work,
)

DAY_SECONDS = 86_400.0


class UnexpectedError(Exception):
    """What nobody expects."""


def after(seconds: float, work: Callable[[Supervisor], Work]) -> Supervisor:
    """A supervisor that has run a loop for so long, in simulated time."""
    supervisor = Supervisor()

    async def story() -> None:
        running = asyncio.create_task(supervisor.run("counting flows", work(supervisor)))
        await asyncio.sleep(seconds)
        assert not running.done()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    simulate(story())
    return supervisor


def failing(error: Exception, moments: list[float] | None = None) -> Callable[[Supervisor], Work]:
    """A loop that always fails, and when it was run."""

    async def work() -> None:
        if moments is not None:
            moments.append(asyncio.get_running_loop().time())
        raise error

    return lambda _: work


def test_a_day_of_failures_is_one_line_in_the_log_and_one_in_status(caplog: pytest.LogCaptureFixture) -> None:
    moments: list[float] = []
    supervisor = after(DAY_SECONDS, failing(OSError(5, "the disk is gone"), moments))
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert pauses[:9] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert max(pauses) == MAX_BACKOFF_SECONDS
    assert supervisor.loops["counting flows"].failures == len(moments) > 1024, "no overflow of the exponent"
    assert len(caplog.records) == 1
    assert "Traceback" not in caplog.text, "an expected error says by itself what is wrong"
    (warning,) = supervisor.warnings
    assert "counting flows" in warning
    assert "the disk is gone" in warning
    assert "tried again every 60 s" in warning


def test_an_unexpected_exception_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = after(3600.0, failing(UnexpectedError("odd")))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "Traceback" in caplog.text
    (warning,) = supervisor.warnings
    assert "internal error while counting flows: UnexpectedError: odd; please report it" in warning


@pytest.mark.parametrize("returns", [True, False], ids=["round", "endless"])
def test_a_loop_that_works_again_is_said_to(returns: bool, caplog: pytest.LogCaptureFixture) -> None:
    def work(_: Supervisor) -> Work:
        errors = [OSError("first"), OSError("second")]

        async def run() -> None:
            if errors:
                raise errors.pop(0)
            await asyncio.sleep(1.0 if returns else DAY_SECONDS)

        return run

    with caplog.at_level(logging.INFO):
        supervisor = after(30.0, work)
    assert supervisor.warnings == ()
    assert supervisor.loops["counting flows"].failures == 2
    assert "counting flows works again" in caplog.text


def test_a_loop_that_waits_before_it_fails_has_not_recovered(caplog: pytest.LogCaptureFixture) -> None:
    async def round_of_a_loop() -> None:
        await asyncio.sleep(5.0)
        raise OSError("the disk is gone")

    supervisor = after(3600.0, lambda _: round_of_a_loop)
    assert len(caplog.records) == 1
    assert supervisor.loops["counting flows"].consecutive_failures > 10
    assert supervisor.warnings


@pytest.mark.parametrize("raises", [True, False])
def test_work_that_fails_while_it_is_cancelled_ends(raises: bool) -> None:
    """Else a stop of the daemon would wait for it for ever."""

    async def work() -> None:
        try:
            await asyncio.sleep(DAY_SECONDS)
        except asyncio.CancelledError:
            if raises:
                raise UnexpectedError("while it lets go of what it holds") from None

    async def story() -> int:
        running = asyncio.create_task(Supervisor().run("watching rules", work))
        await asyncio.sleep(1)
        running.cancel()
        done, _ = await asyncio.wait((running,), timeout=100)
        return len(done)

    assert simulate(story()) == 1


def test_pauses_grow_to_a_limit_and_differ() -> None:
    pace, random = Backoff(initial=1.0, maximum=30.0, jitter=0.5), Random(1)
    for in_row, longest in ((1, 1), (2, 2), (5, 16), (6, 30), (100_000, 30)):
        pauses = [pace.delay(in_row, random) for _ in range(100)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest


def test_a_loop_may_have_a_pace_of_its_own_and_be_named_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    task, moments = LoopState(Backoff(10.0, 10.0), reported_elsewhere=True), list[float]()
    supervisor = after(3600.0, lambda _: Loop(failing(OSError("etcd is away"), moments)(_), task))
    assert {later - earlier for earlier, later in pairwise(moments)} == {10.0}
    assert (task.fault, supervisor.warnings, len(caplog.records)) == ("etcd is away", (), 1)
    assert supervisor.loops["counting flows"] is task


def test_a_loop_that_works_for_a_moment_each_time_is_neither_hurried_nor_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task, moments, faults = LoopState(reported_elsewhere=True), list[float](), set[str]()

    async def connected_for_a_moment() -> None:
        moments.append(asyncio.get_running_loop().time())
        task.clear_fault()
        faults.add(task.fault)
        await asyncio.sleep(0.01)
        raise OSError("the answer makes no sense")

    with caplog.at_level(logging.INFO):
        after(DAY_SECONDS, lambda _: Loop(connected_for_a_moment, task))
    assert faults == {""}
    assert len(moments) < 1600
    assert len(caplog.records) == 1


def test_reasons_that_are_never_the_same_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    numbers = count()

    async def always_another() -> None:
        raise OSError(f"request {next(numbers)} failed")

    supervisor = after(DAY_SECONDS, lambda _: always_another)
    assert len(caplog.records) <= MAX_LOGGED_REASONS + 24
    assert f"request {next(numbers) - 1} failed" in supervisor.warnings[0], "status has the newest"
