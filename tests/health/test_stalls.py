"""While vipd's own event loop stands still nobody is condemned."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.health.servers import PATIENCE, full_backlog
from vipd.health.checker import HealthChecker
from vipd.health.lag import LoopLag
from vipd.health.probes.tcp import TcpProber
from vipd.health.result import ProbeResult
from vipd.health.state import HealthState
from vipd.host.observer import Observer
from vipd.model.check import TcpProbe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

PROBE = TcpProbe()
FAST = Timing(interval=0.2, timeout=0.1, rise=2, fall=3)


async def answer(port: int, timeout: float) -> ProbeResult:
    """Of one check."""
    loop = asyncio.get_running_loop()
    lag, future = LoopLag(loop), loop.create_future()
    timing = Timing(interval=PATIENCE, timeout=timeout)
    with TcpProber(loop, lag) as prober:
        lag.start()
        prober.start(CheckTarget("127.0.0.1", port, Protocol.TCP, PROBE, timing), future.set_result)
        result: ProbeResult = await future
        lag.stop()
    return result


def test_silence_while_the_loop_stood_still_is_no_timeout() -> None:
    """vipd hears nothing while it is busy; the time that a probe has is that in which it listens."""

    async def ask(port: int) -> tuple[ProbeResult, float]:
        asked = asyncio.create_task(answer(port, 0.5))
        began = time.monotonic()
        await asyncio.sleep(0.15)
        time.sleep(1.0)  # noqa: ASYNC251 (the stall is the point)
        return await asked, time.monotonic() - began

    with full_backlog() as port:
        result, seconds = asyncio.run(ask(port))
    assert result.good is False
    assert seconds >= 1.3


def test_an_answer_that_came_while_the_loop_stood_still_is_heard() -> None:
    async def ask(port: int) -> ProbeResult:
        asked = asyncio.create_task(answer(port, 0.1))
        await asyncio.sleep(0)
        time.sleep(0.4)  # noqa: ASYNC251 (the stall is the point)
        return await asked

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert asyncio.run(ask(listener.getsockname()[1])).good


@contextlib.asynccontextmanager
async def running(health: HealthChecker) -> AsyncIterator[HealthChecker]:
    task = asyncio.create_task(health.run())
    try:
        yield health
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def backend() -> Iterator[CheckTarget]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        yield CheckTarget("127.0.0.1", listener.getsockname()[1], Protocol.TCP, PROBE, FAST)


class Recording(Observer):
    def __init__(self) -> None:
        self.verdicts: list[frozenset[CheckTarget]] = []

    def health_changed(self, targets: frozenset[CheckTarget]) -> None:
        self.verdicts.append(targets)


def test_a_stalled_loop_condemns_nobody(backend: CheckTarget) -> None:
    """vipd is busy for longer than the whole row of answers would take."""

    async def story() -> None:
        observer = Recording()
        health = HealthChecker(observer=observer)
        health.follow("web", [backend])
        async with running(health):
            while health.status(backend).state is not HealthState.HEALTHY:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            observer.verdicts.clear()
            for _ in range(3):
                time.sleep(1.0)  # noqa: ASYNC251 (the stall is the point)
                await asyncio.sleep(0.05)
            assert health.status(backend).state is HealthState.HEALTHY
            assert observer.verdicts == []

    asyncio.run(story())
