"""Backends whose answers have no end: a check ends all the same, and leaves the event loop free meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from tests.health.servers import PATIENCE, Case, Handler, checked, differing, healthy_and_reason
from tests.lab.inside import probed

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
NEVER: dict[str, Any] = {"body": "never there"}


def endless(begin: bytes, more: bytes, pause: float = 0.0) -> Handler:
    """Goes on until it is hung up on, as fast as it can or with pauses."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if not pause:
                await reader.readuntil(b"\r\n\r\n")
            writer.write(begin)
            while True:
                writer.write(more if pause else more * 1000)
                await writer.drain()
                await asyncio.sleep(pause)

    return serve


def test_an_answer_without_end_is_bad_long_before_the_time_is_up() -> None:
    cases = {name: Case(endless(*both), "bad: no HTTP: …", NEVER) for name, both in ENDLESS.items()}
    mismatch = "bad: status 200, but the body does not match"
    cases["tiny chunks"] = cases["tiny chunks"]._replace(seen=mismatch)
    assert differing(cases, worker=True) == {}


def test_a_byte_now_and_then_does_not_prolong_a_check() -> None:
    late = "bad: timeout after 0.5 s while waiting for the answer"
    keys: dict[str, Any] = {**NEVER, "timeout": "500ms"}
    beginnings = {
        "in the status": b"HTTP/1.1 200 ",
        "in a field": OK + b"A: ",
        "in a chunk": CHUNKED + b"ffff\r\n",
    }
    cases = {name: Case(endless(begin, b"x", 0.02), late, keys) for name, begin in beginnings.items()}
    assert differing(cases) == {}


def test_a_handshake_without_end_is_not_waited_for() -> None:
    keys: dict[str, Any] = {"type_": "https", "verify": False, "timeout": "500ms"}
    handshakes = {
        "the head of a record": (b"", b"\x16"),
        "a ServerHello of 16 MB": (b"\x16\x03\x03\x40\x00\x02\xff\xff\xff", b"\x00"),
        "change cipher spec, again and again": (b"", b"\x14\x03\x03\x00\x01\x01"),
    }
    cases = {name: Case(endless(*both, 0.02), "bad: …", keys) for name, both in handshakes.items()}
    assert differing(cases) == {}


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
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            thread.join()


def test_wrong_datagrams_without_end_are_bad() -> None:
    with flooding() as port:
        healthy, reason = healthy_and_reason("udp", port, send="ping", expect="pong")
        assert (healthy, reason.partition(" with ")[0]) == (False, "the answer begins")


def test_other_datagrams_than_the_answer_hold_up_no_other_check() -> None:
    with flooding() as port, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.0.0.1", 0))
        silent = checked("dns", mute.getsockname()[1], timeout="300ms")
        both = probed(checked("dns", port), silent, watched=True)
    late = "timeout after 0.3 s while waiting for the answer"
    assert [found[:2] for found in both] == [(False, "more than 100 answers to other queries"), (False, late)]
    assert max(found.longest_turn for found in both) < 0.05
