"""TCP probes against real listeners."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.health.servers import answer, closed_port, full_backlog, run, target, tcp_server
from vipd.health.lag import LoopLag
from vipd.health.probes.base import error_result
from vipd.health.probes.tcp import TcpProber
from vipd.health.result import ProbeResult
from vipd.model.check import TcpProbe

PROBE = TcpProbe()


@contextlib.contextmanager
def prober() -> Iterator[TcpProber]:
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop)
    with TcpProber(loop, lag) as made:
        lag.start()
        yield made
        lag.stop()


def probe(port: int, timeout: float = 60.0, address: str = "127.0.0.1") -> ProbeResult:
    async def ask() -> ProbeResult:
        with prober() as made:
            return await answer(made, target(port, PROBE, timeout, address))

    return run(ask())


def test_a_listener_is_good() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = probe(listener.getsockname()[1])
    assert result.good
    assert result.reason.startswith("answered in ")
    assert 0 < result.seconds < 60


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_so_is_one_with_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        assert probe(listener.getsockname()[1], address="::1").good


def test_a_closed_port_refuses() -> None:
    with closed_port() as port:
        result = probe(port)
    assert (result.good, result.reason) == (False, "connection refused")


def test_a_listener_that_accepts_nothing_any_more_times_out() -> None:
    with full_backlog() as port:
        began = time.monotonic()
        result = probe(port, timeout=0.3)
    assert (result.good, result.reason) == (False, "timeout after 0.3 s")
    assert time.monotonic() - began >= 0.3


def test_a_silent_server_is_good_for_a_connection() -> None:
    async def ask() -> ProbeResult:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(300)

        async with tcp_server(silent) as port:
            with prober() as made:
                return await answer(made, target(port, PROBE))

    assert run(ask()).good


def test_probes_disturb_no_server_and_leave_nothing_behind() -> None:
    """The handshake is not completed: the program sees no connection, the kernel keeps no TIME_WAIT."""

    async def ask(port: int) -> None:
        with prober() as made:
            for _ in range(50):
                assert (await answer(made, target(port, PROBE))).good

    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        port = listener.getsockname()[1]
        earlier = time_waits(port)  # of others that had this port before
        run(ask(port))
        listener.setblocking(False)
        accepted = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                accepted += 1
        # A busy machine may take longer than the kernel holds the last packet back, but hardly each time.
        assert accepted < 45
        assert time_waits(port) <= earlier


TIME_WAIT = "06"


def time_waits(port: int) -> set[tuple[str, str]]:
    """Both ends of the connections in TIME_WAIT that have this loopback port on either side."""
    here = f"0100007F:{port:04X}"
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    ends = {(fields[1], fields[2]) for fields in map(str.split, lines) if fields[3] == TIME_WAIT}
    return {pair for pair in ends if here in pair}


def test_what_is_cancelled_is_not_told_and_closes_its_socket() -> None:
    async def ask(port: int) -> list[ProbeResult]:
        told: list[ProbeResult] = []
        with prober() as made:
            attempt = made.start(target(port, PROBE, 0.1), told.append)
            attempt.cancel()
            attempt.cancel()
            await asyncio.sleep(0.3)
        return told

    with full_backlog() as port:
        assert run(ask(port)) == []


def test_silence_while_the_loop_stood_still_is_no_timeout() -> None:
    """vipd hears nothing while it is busy; the time that a probe has is that in which it listens."""

    async def ask(port: int) -> tuple[ProbeResult, float]:
        with prober() as made:
            asked = asyncio.create_task(answer(made, target(port, PROBE, 0.5)))
            began = time.monotonic()
            await asyncio.sleep(0.15)
            time.sleep(1.0)  # noqa: ASYNC251 (the stall is the point)
            return await asked, time.monotonic() - began

    with full_backlog() as port:
        result, seconds = run(ask(port))
    assert result.good is False
    assert seconds >= 1.3


def test_an_answer_that_came_while_the_loop_stood_still_is_heard() -> None:
    async def ask(port: int) -> ProbeResult:
        with prober() as made:
            asked = asyncio.create_task(answer(made, target(port, PROBE, 0.1)))
            await asyncio.sleep(0)
            time.sleep(0.4)  # noqa: ASYNC251 (the stall is the point)
            return await asked

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert run(ask(listener.getsockname()[1])).good


def test_what_this_host_lacks_is_no_backends_fault() -> None:
    assert error_result(24).good is None
    assert error_result(24).reason == "cannot be asked: too many open files"
    assert error_result(113).reason == "no route to host"


def test_an_unreachable_address_is_bad() -> None:
    """TCP has no broadcast: the kernel says so at once, no packet leaves the host."""
    result = probe(80, address="255.255.255.255")
    assert result.good is False
    assert result.reason == "network unreachable"
