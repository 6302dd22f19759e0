"""Backends whose answers have no end: a check ends all the same, and leaves the event loop free meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.health.servers import PATIENCE, ask_once, run, target, tcp_server
from vipd.health.probes.base import ProbeFunction
from vipd.health.probes.dns import probe_dns
from vipd.health.probes.http import probe_http
from vipd.health.probes.udp import probe_udp
from vipd.health.result import ProbeResult
from vipd.model.check import DnsProbe, HttpProbe, Probe, UdpProbe

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "interim answers with headers": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
    "headers": (OK, b"A: b\r\n"),
    "a status line": (b"HTTP/1.1 200 ", b"OK"),
    "tiny chunks": (CHUNKED, b"1\r\nx\r\n"),
    "extensions": (CHUNKED + b"5;", b"a=b;"),
    "trailers": (CHUNKED + b"0\r\n", b"A: b\r\n"),
}


def asked(
    begin: bytes, more: bytes, check: HttpProbe, pause: float = 0.0, timeout: float = 60.0
) -> ProbeResult:
    """What is found where a server goes on until it is hung up on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if not pause:
                await reader.readuntil(b"\r\n\r\n")
            writer.write(begin)
            while True:
                writer.write(more if pause else more * 1000)
                await writer.drain()
                await asyncio.sleep(pause)

    async def ask() -> ProbeResult:
        async with tcp_server(serve) as port:
            return await ask_once(probe_http, target(port, check, timeout))

    return run(ask())


@pytest.mark.parametrize(("begin", "more"), ENDLESS.values(), ids=list(ENDLESS))
def test_an_answer_without_end_is_bad_long_before_the_time_is_up(begin: bytes, more: bytes) -> None:
    result = asked(begin, more, HttpProbe(body="never there"))
    assert result.good is False
    assert "timeout" not in result.reason


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 ", OK + b"A: ", CHUNKED + b"ffff\r\n"])
def test_a_byte_now_and_then_does_not_prolong_a_check(begin: bytes) -> None:
    result = asked(begin, b"x", HttpProbe(body="never there"), pause=0.02, timeout=0.5)
    assert (result.good, result.reason) == (False, "timeout after 0.5 s while waiting for the answer")


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"", b"\x16"),  # the head of a handshake's record
        (b"\x16\x03\x03\x40\x00\x02\xff\xff\xff", b"\x00"),  # a ServerHello of 16 MB
        (b"", b"\x14\x03\x03\x00\x01\x01"),  # change cipher spec, again and again
    ],
)
def test_a_handshake_without_end_is_not_waited_for(begin: bytes, more: bytes) -> None:
    result = asked(begin, more, HttpProbe(tls=True, verify=False), pause=0.02, timeout=0.5)
    assert result.good is False


@contextlib.contextmanager
def flooding() -> Iterator[int]:
    """A UDP port that answers whatever asks it with wrong datagrams for ever, faster than they are read."""
    stop = threading.Event()

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            query, client = server.recvfrom(1000)
            wrong = bytes((query[0] ^ 1, *query[1:]))
            while not stop.is_set():
                with contextlib.suppress(ConnectionError):
                    server.sendto(wrong, client)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(PATIENCE)
        threads = [threading.Thread(target=serve, args=(server,))]
        for thread in threads:
            thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize(
    ("ask", "check"),
    [(probe_dns, DnsProbe()), (probe_udp, UdpProbe(send=b"ping", expect=b"pong"))],
    ids=["dns", "udp"],
)
def test_datagrams_without_end_are_bad_and_leave_the_loop_its_turns(ask: ProbeFunction, check: Probe) -> None:
    async def story(port: int) -> ProbeResult:
        return await ask_once(ask, target(port, check))

    with flooding() as port:
        result = run(story(port))
    assert result.good is False
    assert "timeout" not in result.reason


def test_other_datagrams_than_the_answer_never_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the flood was always faster: receiving never waits. The time limit counts all the same."""
    monkeypatch.setattr("vipd.health.probes.dns.MOST_OTHERS", 10**9)

    async def story(port: int) -> ProbeResult:
        loop = asyncio.get_running_loop()

        async def receive(_: socket.socket, __: int) -> bytes:
            return b"\x00" * 12

        monkeypatch.setattr(loop, "sock_recv", receive)
        return await ask_once(probe_dns, target(port, DnsProbe(), timeout=0.3))

    with flooding() as port, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as once:
        once.sendto(b"ab", ("127.0.0.1", port))
        result = run(story(port))
    assert (result.good, result.reason) == (False, "timeout after 0.3 s with answers to other queries only")
