"""The whole room: targets come and go, backends die and return, and vipd itself restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.health.servers import PATIENCE, full_backlog, run, tcp_server, until
from tests.lab.held_ports import held_ports
from tests.lab.recording_observer import RecordingObserver
from tests.lab.simulated_time import simulate
from vipd.health import scheduler
from vipd.health.checker import SAVE_SECONDS, HealthChecker
from vipd.health.lag import LoopLag
from vipd.health.probes.base import ProbeCallback
from vipd.health.record_cache import SavedRecord
from vipd.health.record_file import encode
from vipd.health.result import ProbeResult
from vipd.health.scheduler import Scheduler
from vipd.health.state import HealthRecord, HealthState
from vipd.model.check import ExecProbe, HttpProbe, InitialHealth, TcpProbe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.fair_queue import FairQueue
from vipd.model.service import Protocol

LATEST = 1.5 + 0.02
"""Seconds: three intervals of half a second, and two looks of the test's."""
FAST = Timing(interval=0.2, timeout=0.1, rise=2, fall=3)


class Backend:
    """A listener that can die and come back on its port, which is held for it."""

    def __init__(self, port: int) -> None:
        self.address, self.port = "127.0.0.1", port
        self.listener: socket.socket | None = None
        self.revive()

    def target(self, timing: Timing = FAST, **probe: str) -> CheckTarget:
        checked = HttpProbe(**probe) if probe else TcpProbe()  # type: ignore[arg-type]
        return CheckTarget(self.address, self.port, Protocol.TCP, checked, timing)

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
async def running(health: HealthChecker) -> AsyncIterator[HealthChecker]:
    task = asyncio.create_task(health.run())
    try:
        yield health
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def becomes(health: HealthChecker, target: CheckTarget, state: HealthState) -> None:
    await until(lambda: health.status(target).state is state)


def test_a_backend_dies_and_comes_back(backend: Backend) -> None:
    async def story() -> None:
        observer, target = RecordingObserver(), backend.target()
        health = HealthChecker(observer=observer)
        health.follow("web", [target])
        assert health.status(target).state is HealthState.UNKNOWN
        assert health.status(target).counts_healthy
        async with running(health):
            await becomes(health, target, HealthState.HEALTHY)
            backend.die()
            await becomes(health, target, HealthState.UNHEALTHY)
            verdict = health.status(target)
            assert verdict.reason == "connection refused, 3 of 3"
            assert not verdict.counts_healthy
            assert verdict.serves_since is None
            assert abs(verdict.since.timestamp() - time.time()) < PATIENCE
            backend.revive()
            await becomes(health, target, HealthState.HEALTHY)
            await asyncio.sleep(0)
        verdict = health.status(target)
        assert verdict.changes == 2
        assert verdict.serves_since is not None
        assert observer.verdicts == [frozenset((target,))] * 3

    run(story())


def test_death_is_noticed_within_fall_intervals() -> None:
    """On a clock of its own, so that no busy machine makes it late."""
    slow = Timing(interval=0.5, timeout=0.3, rise=1, fall=3)
    asked = CheckTarget("10.0.0.1", 80, Protocol.TCP, TcpProbe(), slow)

    async def story(part: float) -> float:
        dead = False
        health = HealthChecker(clock=asyncio.get_running_loop().time, random=lambda: part)
        health.follow("web", [asked])

        def ask(_: CheckTarget, done: ProbeCallback) -> Answered:
            done(ProbeResult.failure("connection refused") if dead else ProbeResult.success(0.001))
            return Answered()

        loop = asyncio.get_running_loop()
        health._scheduler = Scheduler(
            loop, ask, health._on_result, health._random, {"": FairQueue("checks", 10)}
        )
        health._schedule_all()
        await until(lambda: health.status(asked).state is HealthState.HEALTHY)
        await asyncio.sleep(0.02)
        dead, began = True, loop.time()
        await until(lambda: health.status(asked).state is HealthState.UNHEALTHY)
        health._stop()
        return loop.time() - began

    noticed = [simulate(story(part)) for part in (0.0, 0.3, 0.999)]
    assert 1.0 < min(noticed) <= max(noticed) <= LATEST, noticed


class Answered:
    """An attempt that is over."""

    def cancel(self) -> None:
        pass


def test_until_the_first_verdict_start_says_what_counts(backend: Backend) -> None:
    health, target = HealthChecker(), backend.target(replace(FAST, start=InitialHealth.UNHEALTHY))
    health.follow("web", [target])
    assert not health.status(target).counts_healthy


def test_one_slow_probe_delays_no_other(backend: Backend) -> None:
    """More hang than could be waited for one after the other."""

    async def story(silent: int) -> None:
        health, target = HealthChecker(), backend.target()
        patient = Timing(interval=PATIENCE, timeout=PATIENCE)
        hanging = [
            CheckTarget("127.0.0.1", silent, Protocol.TCP, TcpProbe(), replace(patient, fall=n + 1))
            for n in range(50)
        ]
        health.follow("hanging", hanging)
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, HealthState.HEALTHY)
            assert {health.status(h).state for h in hanging} == {HealthState.UNKNOWN}

    with full_backlog() as silent:
        run(story(silent))


def test_services_share_a_probe_and_it_lasts_as_long_as_one_needs_it(backend: Backend) -> None:
    async def story() -> None:
        health, target = HealthChecker(), backend.target()
        health.follow("one", [target])
        health.follow("other", [target])
        async with running(health):
            await becomes(health, target, HealthState.HEALTHY)
            health.follow("one", [])
            assert health.status(target).state is HealthState.HEALTHY
            assert len(list(health.statuses())) == 1
            health.follow("other", [])
            assert list(health.statuses()) == []
            # Who comes back is as it was.
            health.follow("other", [target])
            assert health.status(target).state is HealthState.HEALTHY

    run(story())


def test_a_target_that_is_gone_is_asked_no_more_and_not_told_of(backend: Backend) -> None:
    async def story() -> None:
        observer, target = RecordingObserver(), backend.target()
        health = HealthChecker(observer=observer)
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, HealthState.HEALTHY)
            observer.verdicts.clear()
            health.follow("web", [])
            backend.die()
            await asyncio.sleep(4 * FAST.interval)
        assert observer.verdicts == []

    run(story())


def test_a_changed_check_keeps_the_verdict_and_counts_anew(backend: Backend) -> None:
    async def story() -> None:
        health, old = HealthChecker(), backend.target()
        backend.die()
        health.follow("web", [old])
        async with running(health):
            await becomes(health, old, HealthState.UNHEALTHY)
            slower = backend.target(replace(FAST, interval=9.0))
            health.follow("web", [slower])
            verdict = health.status(slower)
            assert verdict.state is HealthState.UNHEALTHY
            assert verdict.reason == "as before: connection refused, 3 of 3"
            backend.revive()
            other = replace(slower, probe=TcpProbe(), timing=replace(FAST, rise=3))
            health.follow("web", [other])
            assert health.status(other).state is HealthState.UNHEALTHY
            await becomes(health, other, HealthState.HEALTHY)

    run(story())


def test_verdicts_outlive_a_restart(backend: Backend, tmp_path: Path) -> None:
    """Also one with another check: a dead backend does not go back to work because vipd was updated."""
    file = tmp_path / "health.json"

    async def first() -> None:
        health = HealthChecker(file)
        health.follow("web", [backend.target()])
        async with running(health):
            await becomes(health, backend.target(), HealthState.UNHEALTHY)

    backend.die()
    run(first())
    later, target = HealthChecker(file), backend.target(replace(FAST, interval=1.0))
    later.follow("web", [target])
    assert later.status(target).state is HealthState.UNHEALTHY
    assert not later.status(target).counts_healthy
    long_after = HealthChecker(file, wall=lambda: time.time() + 3600)
    long_after.follow("web", [target])
    assert long_after.status(target).state is HealthState.UNKNOWN


def test_verdicts_are_saved_while_it_runs(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a crash costs no more than a few seconds of them."""
    monkeypatch.setattr("vipd.health.checker.SAVE_SECONDS", 0.1)
    file = tmp_path / "health.json"

    async def story() -> None:
        health = HealthChecker(file)
        health.follow("web", [backend.target()])
        async with running(health):
            await until(file.exists)
            await becomes(health, backend.target(), HealthState.HEALTHY)
            await until(lambda: b'"healthy"' in file.read_bytes())

    run(story())


def test_a_stalled_loop_condemns_nobody(backend: Backend) -> None:
    """vipd is busy for longer than the whole row of answers would take."""

    async def story() -> None:
        observer, target = RecordingObserver(), backend.target()
        health = HealthChecker(observer=observer)
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, HealthState.HEALTHY)
            await asyncio.sleep(0)
            observer.verdicts.clear()
            for _ in range(3):
                time.sleep(1.0)  # noqa: ASYNC251 (the stall is the point)
                await asyncio.sleep(0.05)
            assert health.status(target).state is HealthState.HEALTHY
            assert observer.verdicts == []

    run(story())


def test_without_checks_it_hardly_wakes_the_loop(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    beats, next_beat = [], LoopLag._next

    def beat(lag: LoopLag) -> None:
        beats.append(lag)
        next_beat(lag)

    monkeypatch.setattr(LoopLag, "_next", beat)

    async def during(seconds: float) -> int:
        before = len(beats)
        await asyncio.sleep(seconds)
        return len(beats) - before

    async def story() -> list[int]:
        health = HealthChecker(clock=asyncio.get_running_loop().time)
        async with running(health):
            counts = [await during(60)]
            health.follow("web", [backend.target()])
            counts.append(await during(60))
            health.follow("web", [])
            await asyncio.sleep(2 * SAVE_SECONDS)
            counts.append(await during(60))
            return counts

    before, meanwhile, after = simulate(story())
    assert (before, after) == (0, 0)
    assert meanwhile >= 590


def test_what_cannot_be_asked_is_a_warning_and_no_verdict() -> None:
    async def story() -> None:
        probe = ExecProbe(command=("/nonexistent/check",), user="nobody")
        target = CheckTarget("127.0.0.1", 80, Protocol.TCP, probe, FAST)
        health = HealthChecker()
        health.follow("web", [target])
        async with running(health):
            await until(lambda: bool(health.warnings()))
            assert health.status(target).state is HealthState.UNKNOWN
        trouble = "cannot be asked: /nonexistent/check: no such file or directory"
        assert health.warnings() == (f"exec 127.0.0.1:80 {trouble}",)
        assert health.status(target).reason.startswith(trouble)

    run(story())


def test_a_flapping_backend_is_held_down(backend: Backend) -> None:
    timing = Timing(interval=0.1, timeout=0.1, rise=1, fall=1)

    async def story() -> str:
        health, target = HealthChecker(), backend.target(timing)
        health.follow("web", [target])
        async with running(health):
            await becomes(health, target, HealthState.HEALTHY)
            for _ in range(20):
                backend.die()
                await becomes(health, target, HealthState.UNHEALTHY)
                backend.revive()
                await until(lambda: bool(held_down(health, target)) or health.status(target).counts_healthy)
                if reason := held_down(health, target):
                    return reason
        return "it came back each time"

    reason = run(story())
    assert reason.startswith("flapping: ")
    assert "held down for" in reason
    assert "answered in " in reason


def held_down(health: HealthChecker, target: CheckTarget) -> str:
    """Why a target that answers well is not healthy."""
    verdict = health.status(target)
    waits = "answered in " in verdict.reason and "held down for" in verdict.reason
    return verdict.reason if verdict.state is HealthState.UNHEALTHY and waits else ""


def test_new_targets_are_spread_and_asked_soon() -> None:
    """One is asked at once; thousands are not all asked at once. On a clock of its own."""
    slow = Timing(interval=9.0, timeout=1.0, rise=1)
    targets = [
        CheckTarget(f"10.0.{n // 250}.{n % 250}", 80, Protocol.TCP, TcpProbe(), slow) for n in range(2000)
    ]

    async def story() -> list[float]:
        loop, asked = asyncio.get_running_loop(), list[float]()

        def ask(_: CheckTarget, done: ProbeCallback) -> Answered:
            asked.append(loop.time())
            return Answered()

        health = HealthChecker(clock=loop.time, random=Random(1).random)
        health._scheduler = Scheduler(
            loop, ask, health._on_result, health._random, {"": FairQueue("checks", 10_000)}
        )
        for number, target in enumerate(targets):
            health.follow(f"s{number}", [target])
        await until(lambda: len(asked) == len(targets))
        health._stop()
        return asked

    asked = simulate(story())
    most = max(sum(1 for at in asked if begin <= at < begin + 0.1) for begin in asked[::50])
    assert asked[0] < 0.1
    assert 3.5 < asked[-1] <= 2000 * scheduler.FIRST_SECONDS_EACH + 0.1
    assert most < 100, "in a tenth of a second"


def test_a_restart_knows_which_check_of_a_backend_said_what(tmp_path: Path) -> None:
    """Two services ask one backend, each something else."""
    file = tmp_path / "health.json"

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        status = b"200 OK" if b" /ok " in asked else b"404 Not Found"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def story() -> None:
        async with tcp_server(reply) as port:
            ok, nope = (
                CheckTarget("127.0.0.1", port, Protocol.TCP, HttpProbe(path=path), replace(FAST, timeout=0.2))
                for path in ("/ok", "/nope")
            )
            for services in ({"a": ok, "z": nope}, {"z": nope, "a": ok}):
                health = HealthChecker(file)
                for name, target in services.items():
                    health.follow(name, [target])
                async with running(health):
                    await becomes(health, ok, HealthState.HEALTHY)
                    await becomes(health, nope, HealthState.UNHEALTHY)
                for order in (services, dict(reversed(services.items()))):
                    later = HealthChecker(file)
                    for name, target in order.items():
                        later.follow(name, [target])
                    assert later.status(ok).state is HealthState.HEALTHY
                    assert later.status(nope).state is HealthState.UNHEALTHY

    run(story())


def test_crashes_in_a_row_bring_no_dead_backend_back(backend: Backend, tmp_path: Path) -> None:
    """Each of them minutes after the one before, but too soon for another verdict."""
    file, passed = tmp_path / "health.json", 0.0
    target = backend.target(replace(FAST, interval=60.0))

    async def first() -> None:
        health = HealthChecker(file, wall=lambda: time.time() + passed)
        health.follow("web", [backend.target()])
        async with running(health):
            await becomes(health, backend.target(), HealthState.UNHEALTHY)

    async def crash() -> None:
        health, before = HealthChecker(file, wall=lambda: time.time() + passed), file.read_bytes()
        health.follow("web", [target])
        assert health.status(target).state is HealthState.UNHEALTHY
        health._stop = lambda: None  # type: ignore[method-assign]  # kill -9
        async with running(health):
            await until(lambda: file.read_bytes() != before)

    backend.die()
    run(first())
    for _ in range(4):
        passed += 300.0
        run(crash())


def test_a_check_that_may_be_another_one_than_an_older_version_knew_is_taken_back(tmp_path: Path) -> None:
    file = tmp_path / "health.json"
    nope, ok = (
        CheckTarget("10.0.0.1", 80, Protocol.TCP, HttpProbe(path=path), FAST) for path in ("/nope", "/ok")
    )
    now = time.monotonic()
    bad = SavedRecord.of(nope, ["z"], now, HealthRecord(now, HealthState.UNHEALTHY, last_reason="status 404"))
    whole = json.loads(encode([bad], now, time.time()))
    file.write_text(json.dumps({key: whole[key] for key in ("format", "verdicts")}))
    alone = HealthChecker(file)
    alone.follow("z", [nope])
    assert alone.status(nope).state is HealthState.UNHEALTHY
    both = HealthChecker(file)
    both.follow("z", [nope])
    both.follow("a", [ok])
    assert {both.status(each).state for each in (nope, ok)} == {HealthState.UNKNOWN}


def test_another_check_of_a_large_service_is_followed_at_once() -> None:
    """Ten thousand backends: looking through all that are left for each new one would take a minute."""
    before, after = (
        [
            CheckTarget(f"10.1.{n // 250}.{n % 250}", 80, Protocol.TCP, HttpProbe(path=path), FAST)
            for n in range(10_000)
        ]
        for path in ("/a", "/b")
    )
    health = HealthChecker()
    health.follow("web", before)
    began = time.process_time()
    health.follow("web", after)
    assert time.process_time() - began < PATIENCE / 12
