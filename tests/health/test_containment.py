"""What goes wrong within vipd with one target is that target's trouble, and no garbage goes wrong at all."""

from __future__ import annotations

import asyncio
import getpass
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.health.servers import answer, ask_once, run, target, tcp_server, udp_server, until
from tests.health.test_checker import FAST, Backend, backend, becomes, running
from tests.lab.recording_observer import RecordingObserver
from vipd.health import checker as door
from vipd.health.checker import HealthChecker
from vipd.health.probes import dns, http, tcp, udp
from vipd.health.probes.base import Attempt, ProbeCallback, ProbeContext, Prober
from vipd.health.probes.exec import ExecProber
from vipd.health.result import ProbeResult
from vipd.health.state import HealthRecord, HealthState, apply_result
from vipd.health.verdict_log import HealthLog
from vipd.host import containment
from vipd.host.accounts import CheckUsers
from vipd.host.observer import Observer, Observers
from vipd.host.unprivileged import ProgramOutcome, ProgramRun
from vipd.model.check import DnsProbe, ExecProbe, HttpProbe, Probe, TcpProbe, Timing, UdpProbe
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

__all__ = ["backend"]

BAD = "203.0.113.1"
PROGRAM = ExecProbe(command=("/bin/true",))
ALL: tuple[Probe, ...] = (TcpProbe(), HttpProbe(), UdpProbe(send=b"x"), DnsProbe(), PROGRAM)


@pytest.fixture(autouse=True)
def _nothing_logged_yet() -> None:
    containment._logged.clear()


class AtStart:
    """Raises for one address."""

    def __init__(self, inner: Prober) -> None:
        self.inner = inner

    def start(self, asked: CheckTarget, done: ProbeCallback) -> Attempt:
        if asked.address == BAD:
            raise ZeroDivisionError("at start")
        return self.inner.start(asked, done)


class Garrulous:
    """Gives two answers to one question, and then fails."""

    def __init__(self, inner: Prober) -> None:
        self.inner = inner

    def start(self, asked: CheckTarget, done: ProbeCallback) -> Attempt:
        if asked.address != BAD:
            return self.inner.start(asked, done)
        done(ProbeResult.failure("at once"))
        done(ProbeResult.success(1.0))
        raise ZeroDivisionError("after all was told")


async def coroutine(asking: ProbeContext) -> ProbeResult:
    raise ZeroDivisionError("in a coroutine")


def wrapped(monkeypatch: pytest.MonkeyPatch, way: Callable[[Prober], Prober]) -> None:
    made = door._probers
    monkeypatch.setattr(door, "_probers", lambda *a: {kind: way(prober) for kind, prober in made(*a).items()})


def both_are_asked(backend: Backend, probe: Probe, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    """The sound target comes up and goes down, the other is in trouble, and the log has one traceback."""
    bad = CheckTarget(BAD, 80, Protocol.TCP, probe, FAST)

    async def story() -> None:
        health = HealthChecker()
        good = backend.target()
        async with running(health):
            health.follow("bad", [bad])
            health.follow("good", [good])
            await becomes(health, good, HealthState.HEALTHY)
            await until(lambda: trouble in health.status(bad).reason)
            assert any("internal error" in warning for warning in health.warnings())
            assert health.status(bad).state is HealthState.UNKNOWN
            backend.die()
            await becomes(health, good, HealthState.UNHEALTHY)

    run(story())
    traced = [record for record in caplog.records if record.exc_info]
    assert len(traced) == 1
    assert "please report it" in traced[0].message


@pytest.mark.parametrize("probe", ALL)
def test_a_prober_that_cannot_even_start(
    probe: Probe, backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped(monkeypatch, AtStart)
    wanted = "internal error while checking"
    both_are_asked(backend, probe, wanted, caplog)


def test_a_coroutine_that_fails(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "probe_http", coroutine)
    both_are_asked(backend, HttpProbe(), "ZeroDivisionError: in a coroutine; please report it", caplog)


def test_a_thread_that_fails(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: ProgramRun) -> ProgramOutcome:
        raise ZeroDivisionError("in a thread")

    monkeypatch.setattr(ProgramRun, "to_end", fails)
    probe = ExecProbe(command=("/bin/true",))
    both_are_asked(backend, probe, "ZeroDivisionError: in a thread; please report it", caplog)


def test_a_connection_that_fails(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the callback of the event loop, where others' answers wait behind it."""
    finish = tcp._Connecting.finish

    def fails(self: tcp._Connecting, now: float) -> None:
        if self._target.address == "127.0.0.2":
            raise ZeroDivisionError("in the loop")
        finish(self, now)

    monkeypatch.setattr(tcp._Connecting, "finish", fails)
    bad = CheckTarget("127.0.0.2", backend.port, Protocol.TCP, TcpProbe(), FAST)

    async def story() -> None:
        health = HealthChecker()
        good = backend.target()
        async with running(health):
            health.follow("bad", [bad])
            health.follow("good", [good])
            await becomes(health, good, HealthState.HEALTHY)
            await until(lambda: "ZeroDivisionError: in the loop" in health.status(bad).reason)

    run(story())
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_an_answer_counts_once_and_only_for_its_own_question(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped(monkeypatch, Garrulous)
    bad = CheckTarget(BAD, 80, Protocol.TCP, TcpProbe(), FAST)

    async def story() -> None:
        health = HealthChecker()
        good = backend.target()
        async with running(health):
            health.follow("bad", [bad])
            health.follow("good", [good])
            await becomes(health, bad, HealthState.UNHEALTHY)
            await becomes(health, good, HealthState.HEALTHY)

    run(story())


def fails(*_: object) -> None:
    raise ZeroDivisionError("here")


def test_an_answer_that_cannot_be_judged_is_trouble(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd = replace(FAST, rise=7)

    def odd_fails(record: HealthRecord, result: ProbeResult, timing: Timing, now: float) -> HealthRecord:
        if timing == odd:
            fails()
        return apply_result(record, result, timing, now)

    monkeypatch.setattr(door, "apply_result", odd_fails)
    bad = backend.target(odd)

    async def story() -> None:
        health = HealthChecker()
        good = backend.target()
        async with running(health):
            health.follow("bad", [bad])
            health.follow("good", [good])
            await becomes(health, good, HealthState.HEALTHY)
            await until(lambda: "ZeroDivisionError: here; please report it" in health.status(bad).reason)
            backend.die()
            await becomes(health, good, HealthState.UNHEALTHY)

    run(story())
    assert len([record for record in caplog.records if record.exc_info]) == 1


@pytest.mark.parametrize("where", ["observer", "log"])
def test_an_observer_that_fails_keeps_no_other_from_hearing(
    where: str, backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Observer):
        def health_changed(self, targets: frozenset[CheckTarget]) -> None:
            fails()

    recorded, observers = RecordingObserver(), Observers()

    async def story() -> None:
        health = HealthChecker(observer=observers)
        if where == "log":
            monkeypatch.setattr(HealthLog, "write", fails)
        else:
            observers.add(Failing())
        observers.add(recorded)
        good = backend.target()
        async with running(health):
            health.follow("good", [good])
            await until(lambda: len(recorded.verdicts) == 1)
            backend.die()
            await until(lambda: len(recorded.verdicts) == 2)

    run(story())
    assert len([record for record in caplog.records if record.exc_info]) == 1


def garbage(seed: int) -> Iterator[bytes]:
    source = random.Random(seed)
    good = b"HTTP/1.1 200 OK\r\n"
    heads = (b"", good, good + b"Transfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 100 ")
    tails = (b"", b"\r\n\r\n", b"\r\n\r\n0\r\n\r\n")
    while True:
        body = source.randbytes(source.choice((0, 1, 12, 40, 600)))
        yield source.choice(heads) + body + source.choice(tails)


@pytest.mark.parametrize("body", ["", "x", "x+"])
def test_no_garbage_of_an_http_server_goes_wrong(body: str) -> None:
    answers = garbage(len(body))

    async def ask() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(next(answers))
            await writer.drain()
            writer.close()

        async with tcp_server(handler) as port:
            for _ in range(300):
                result = await ask_once(http.probe_http, target(port, HttpProbe(body=body)))
                assert result.good is not None, result.reason
                assert result.reason.isprintable()

    run(ask())


@pytest.mark.parametrize("probe", [DnsProbe(query="example.com"), UdpProbe(send=b"x", expect=b"y")])
def test_no_garbage_of_a_udp_server_goes_wrong(probe: Probe) -> None:
    """For DNS behind the head that makes it an answer to the query, with as many records as it says."""
    source = random.Random(1)

    def reply(query: bytes) -> list[bytes]:
        counts = source.choice((b"\0\1\0\1", b"\0\1\xff\xff", b"\0\0\0\0"))
        head = query[:2] + bytes([0x80 | source.randrange(128), source.randrange(256)]) + counts + query[8:]
        records = b"\xc0\x0c" + source.choice((b"\0\1", b"\0\5", b"\0\6")) + b"\0\1\0\0\0\0"
        return [head + records + source.randbytes(source.choice((0, 2, 6, 30, 400))), b"y"]

    async def ask() -> None:
        async with udp_server(reply) as port:
            way = dns.probe_dns if isinstance(probe, DnsProbe) else udp.probe_udp
            for _ in range(300):
                result = await ask_once(way, target(port, probe, timeout=0.2))
                assert result.good is not None, result.reason
                assert result.reason.isprintable()

    run(ask())


@pytest.mark.parametrize("number", [9, 31, 34, 40, 64])
def test_a_program_that_any_signal_kills(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckUsers, "_privileged", lambda *_: "")

    async def ask() -> ProbeResult:
        with ExecProber(asyncio.get_running_loop(), CheckUsers()) as prober:
            command = ("/bin/sh", "-c", f"kill -{number} $$")
            asked = target(1, ExecProbe(command=command, user=getpass.getuser()))
            return await answer(prober, asked)

    result = run(ask())
    assert result.good is False
    assert result.reason.startswith("killed by ")
