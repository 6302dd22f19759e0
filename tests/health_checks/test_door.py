"""The whole room: targets come and go, backends die and return, and vipd itself restarts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.health_checks.servers import PATIENCE, full_backlog, run
from tests.held_ports import held_ports
from vipd.checks import ExecProbe, HttpProbe, Start, TcpProbe, Timing
from vipd.health import scheduler
from vipd.health.door import Health
from vipd.health.state import State
from vipd.health.targets import Target
from vipd.model import Protocol

LATEST = 1.5 + 0.25
"""Seconds: three intervals of half a second, and what it takes to hear of it."""
FAST = Timing(interval=0.2, timeout=0.1, rise=2, fall=3)


class Backend:
    """A listener that can die and come back on its port, which is held for it."""

    def __init__(self, port: int) -> None:
        self.address, self.port = "127.0.0.1", port
        self.listener: socket.socket | None = None
        self.revive()

    def target(self, timing: Timing = FAST, **probe: str) -> Target:
        checked = HttpProbe(**probe) if probe else TcpProbe()  # type: ignore[arg-type]
        return Target(self.address, self.port, Protocol.TCP, checked, timing)

    def die(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def revive(self, address: str = "127.0.0.1") -> None:
        self.listener = socket.create_server((address, self.port), backlog=256)


@pytest.fixture
def backend() -> Iterator[Backend]:
    with held_ports(1) as (port,):
        made = Backend(port)
        yield made
        made.die()


@contextlib.asynccontextmanager
async def running(health: Health) -> AsyncIterator[Health]:
    task = asyncio.create_task(health.run())
    try:
        yield health
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.01)


async def becomes(health: Health, target: Target, state: State) -> None:
    await until(lambda: health.verdict(target).state is state)


def test_a_backend_dies_and_comes_back(backend: Backend) -> None:
    async def story() -> None:
        told: list[frozenset[Target]] = []
        health, target = Health(), backend.target()
        health.listeners.append(told.append)
        health.follow("web", [target])
        assert health.verdict(target).state is State.UNKNOWN
        assert health.verdict(target).fit
        async with running(health):
            await becomes(health, target, State.HEALTHY)
            backend.die()
            await becomes(health, target, State.UNHEALTHY)
            verdict = health.verdict(target)
            assert verdict.reason == "connection refused, 3 of 3"
            assert not verdict.fit
            assert verdict.serves_since is None
            assert abs(verdict.since.timestamp() - time.time()) < PATIENCE
            backend.revive()
            await becomes(health, target, State.HEALTHY)
            await asyncio.sleep(0)
        verdict = health.verdict(target)
        assert verdict.changes == 2
        assert verdict.serves_since is not None
        assert told == [frozenset((target,))] * 3

    run(story())


def test_death_is_noticed_within_fall_intervals(backend: Backend) -> None:
    """Plus what a busy machine takes, for which the tests have to allow."""
    slow = Timing(interval=0.5, timeout=0.3, rise=1, fall=3)

    async def story() -> float:
        health, target = Health(), backend.target(slow)
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, State.HEALTHY)
            backend.die()
            began = time.monotonic()
            await becomes(health, target, State.UNHEALTHY)
            return time.monotonic() - began

    noticed = []
    for _ in range(12):  # the best counts: a busy machine makes some of them late, a fault every one
        backend.die()
        backend.revive()
        noticed.append(run(story()))
        if noticed[-1] < LATEST:
            break
    print(f"noticed after {noticed} s; fall x interval is 1.5 s")
    assert 0.5 < min(noticed) < LATEST


def test_until_the_first_verdict_start_says_what_counts(backend: Backend) -> None:
    health, target = Health(), backend.target(replace(FAST, start=Start.UNHEALTHY))
    health.follow("web", [target])
    assert not health.verdict(target).fit


def test_one_slow_probe_delays_no_other(backend: Backend) -> None:
    """More hang than could be waited for one after the other."""

    async def story(silent: int) -> None:
        health, target = Health(), backend.target()
        patient = Timing(interval=PATIENCE, timeout=PATIENCE)
        hanging = [
            Target("127.0.0.1", silent, Protocol.TCP, TcpProbe(), replace(patient, fall=n + 1))
            for n in range(50)
        ]
        health.follow("hanging", hanging)
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, State.HEALTHY)
            assert {health.verdict(h).state for h in hanging} == {State.UNKNOWN}

    with full_backlog() as silent:
        run(story(silent))


def test_services_share_a_probe_and_it_lasts_as_long_as_one_needs_it(backend: Backend) -> None:
    async def story() -> None:
        health, target = Health(), backend.target()
        health.follow("one", [target])
        health.follow("other", [target])
        async with running(health):
            await becomes(health, target, State.HEALTHY)
            health.follow("one", [])
            assert health.verdict(target).state is State.HEALTHY
            assert len(list(health.verdicts())) == 1
            health.follow("other", [])
            assert list(health.verdicts()) == []
            # Who comes back is as it was.
            health.follow("other", [target])
            assert health.verdict(target).state is State.HEALTHY

    run(story())


def test_a_target_that_is_gone_is_asked_no_more_and_not_told_of(backend: Backend) -> None:
    async def story() -> None:
        told: list[frozenset[Target]] = []
        health, target = Health(), backend.target()
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, State.HEALTHY)
            health.listeners.append(told.append)
            health.follow("web", [])
            backend.die()
            await asyncio.sleep(4 * FAST.interval)
        assert told == []

    run(story())


def test_a_changed_check_keeps_the_verdict_and_counts_anew(backend: Backend) -> None:
    async def story() -> None:
        health, old = Health(), backend.target()
        backend.die()
        health.follow("web", [old])
        async with running(health):
            await becomes(health, old, State.UNHEALTHY)
            slower = backend.target(replace(FAST, interval=9.0))
            health.follow("web", [slower])
            verdict = health.verdict(slower)
            assert verdict.state is State.UNHEALTHY
            assert verdict.reason == "as before: connection refused, 3 of 3"
            backend.revive()
            other = replace(slower, probe=TcpProbe(), timing=replace(FAST, rise=3))
            health.follow("web", [other])
            assert health.verdict(other).state is State.UNHEALTHY
            await becomes(health, other, State.HEALTHY)

    run(story())


def test_verdicts_outlive_a_restart(backend: Backend, tmp_path: Path) -> None:
    """Also one with another check: a dead backend does not go back to work because vipd was updated."""
    file = tmp_path / "health.json"

    async def first() -> None:
        health = Health(file)
        health.follow("web", [backend.target()])
        async with running(health):
            await becomes(health, backend.target(), State.UNHEALTHY)

    backend.die()
    run(first())
    later, target = Health(file), backend.target(replace(FAST, interval=1.0))
    later.follow("web", [target])
    assert later.verdict(target).state is State.UNHEALTHY
    assert not later.verdict(target).fit
    long_after = Health(file, wall=lambda: time.time() + 3600)
    long_after.follow("web", [target])
    assert long_after.verdict(target).state is State.UNKNOWN


def test_verdicts_are_saved_while_it_runs(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a crash costs no more than a few seconds of them."""
    monkeypatch.setattr("vipd.health.door.SAVE_SECONDS", 0.1)
    file = tmp_path / "health.json"

    async def story() -> None:
        health = Health(file)
        health.follow("web", [backend.target()])
        async with running(health):
            await until(file.exists)
            await becomes(health, backend.target(), State.HEALTHY)
            await until(lambda: b'"healthy"' in file.read_bytes())

    run(story())


def test_a_stalled_loop_condemns_nobody(backend: Backend) -> None:
    """vipd is busy for longer than the whole row of answers would take."""

    async def story() -> None:
        told: list[frozenset[Target]] = []
        health, target = Health(), backend.target()
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, State.HEALTHY)
            await asyncio.sleep(0)
            health.listeners.append(told.append)
            for _ in range(3):
                time.sleep(1.0)  # noqa: ASYNC251 (the stall is the point)
                await asyncio.sleep(0.05)
            assert health.verdict(target).state is State.HEALTHY
            assert told == []

    run(story())


def test_what_cannot_be_asked_is_a_warning_and_no_verdict() -> None:
    async def story() -> None:
        probe = ExecProbe(command=("/nonexistent/check",), user="nobody")
        target = Target("127.0.0.1", 80, Protocol.TCP, probe, FAST)
        health = Health()
        health.follow("web", [target])
        async with running(health):
            await until(lambda: bool(health.warnings()))
            assert health.verdict(target).state is State.UNKNOWN
        trouble = "cannot be asked: /nonexistent/check: no such file or directory"
        assert health.warnings() == (f"exec 127.0.0.1:80 {trouble}",)
        assert health.verdict(target).reason.startswith(trouble)

    run(story())


def test_a_flapping_backend_is_held_down(backend: Backend) -> None:
    timing = Timing(interval=0.1, timeout=0.1, rise=1, fall=1)

    async def story() -> str:
        health, target = Health(), backend.target(timing)
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, State.HEALTHY)
            for _ in range(20):
                backend.die()
                await becomes(health, target, State.UNHEALTHY)
                backend.revive()
                await until(lambda: bool(held_down(health, target)) or health.verdict(target).fit)
                if reason := held_down(health, target):
                    return reason
        return "it came back each time"

    reason = run(story())
    assert reason.startswith("flapping: ")
    assert "held down for" in reason
    assert "answered in " in reason


def held_down(health: Health, target: Target) -> str:
    """Why a target that answers well is not healthy."""
    verdict = health.verdict(target)
    waits = "answered in " in verdict.reason and "held down for" in verdict.reason
    return verdict.reason if verdict.state is State.UNHEALTHY and waits else ""


def test_new_targets_are_spread_and_asked_soon(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is asked at once; thousands are not all asked at once. Here over more time than in earnest."""
    monkeypatch.setattr(scheduler, "FIRST_SECONDS_EACH", 0.01)

    async def story() -> list[float]:
        asked: list[float] = []
        slow = Timing(interval=9.0, timeout=PATIENCE, rise=1)
        health = Health()
        targets = [replace(backend.target(slow), address=f"127.0.1.{n}") for n in range(1, 201)]
        for number, target in enumerate(targets):
            health.follow(f"s{number}", [target])
        began = time.monotonic()
        health.listeners.append(lambda changed: asked.extend([time.monotonic() - began] * len(changed)))
        async with running(health):
            await until(lambda: len(asked) == 200)
        return asked

    for _ in range(6):  # the best counts: a machine that stands still makes some of them late
        backend.die()
        backend.revive("0.0.0.0")
        asked = run(story())
        if asked[0] < 1.0 and len(set(asked)) > 20:
            break
    assert len(set(asked)) > 20
    assert asked[0] < 1.0
