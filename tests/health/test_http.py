"""HTTP probes against real servers, well behaved and not."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import pytest

from tests.health.servers import PATIENCE, ask_once, closed_port, good_and_reason, run, target, tcp_server
from vipd.health.probes.http import probe_http, request
from vipd.health.result import ProbeResult, ReportedWeight
from vipd.model.check import HttpProbe

PLAIN = HttpProbe()
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


def probe(raw: bytes, check: HttpProbe = PLAIN, *, close: bool = False, timeout: float = 60.0) -> ProbeResult:
    """What a server finds that answers with these bytes, and stays connected unless it shall close."""

    async def ask() -> ProbeResult:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(raw)
            await writer.drain()
            if close:
                writer.close()
                await writer.wait_closed()
            else:
                await asyncio.sleep(300)

        async with tcp_server(handler) as port:
            return await ask_once(probe_http, target(port, check, timeout))

    return run(ask())


def test_a_good_status_is_good() -> None:
    assert probe(OK).good
    assert probe(b"HTTP/1.0 204 No Content\r\n\r\n").good
    assert probe(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n").good


def test_no_redirection_is_followed() -> None:
    """It would have every host ask wherever a backend likes."""
    asked: list[bytes] = []
    codes = (300, 301, 302, 303, 305, 307, 308)

    async def ask() -> list[bool | None]:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            to = b"http://127.0.0.1:%d/elsewhere" % port
            code = codes[len(asked) - 1]
            head = b"HTTP/1.1 %d Moved\r\nLocation: %s\r\nRefresh: 0; url=%s\r\n" % (code, to, to)
            writer.write(head + b"Content-Length: 0\r\n\r\n")
            writer.close()

        async with tcp_server(handler) as port:
            check = target(port, HttpProbe(body="x"))
            return [(await ask_once(probe_http, check)).good for _ in codes]

    assert run(ask()) == [False] * 7, "the body is that of the redirection itself"
    assert len(asked) == 7
    assert all(b"elsewhere" not in each for each in asked)


def test_another_status_is_bad() -> None:
    assert good_and_reason(probe(b"HTTP/1.1 500 Oops\r\n\r\n")) == (False, "status 500")
    only = HttpProbe(status=((204, 204), (250, 299)))
    assert good_and_reason(probe(OK, only)) == (False, "status 200")
    assert probe(b"HTTP/1.1 299 Odd\r\n\r\n", only).good


def test_interim_answers_are_passed_over() -> None:
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    assert probe(hints + OK).good
    assert good_and_reason(probe(hints + b"HTTP/1.1 503 No\r\n\r\n")) == (False, "status 503")


@pytest.mark.parametrize(
    ("raw", "close"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
        (CHUNKED, False),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", True),
    ],
)
def test_the_body_must_match(raw: bytes, close: bool) -> None:
    assert probe(raw, HttpProbe(body="^hel+o$"), close=close).good
    mismatch = "status 200, but the body does not match"
    assert good_and_reason(probe(raw, HttpProbe(body="goodbye"), close=close)) == (False, mismatch)


def test_only_the_beginning_of_a_body_counts() -> None:
    long = b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 70_000 + b"end"
    assert probe(long, HttpProbe(body="^xxx")).good
    assert not probe(long, HttpProbe(body="end")).good
    chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20000\r\n" + b"x" * 0x20000 + b"\r\n"
    assert probe(chunk, HttpProbe(body="^xxx")).good


@pytest.mark.parametrize(
    ("said", "weight"),
    [("50%", ReportedWeight(50, True)), ("7", ReportedWeight(7)), ("0", ReportedWeight(0)), ("much", None)],
)
def test_a_backend_may_say_its_weight(said: str, weight: ReportedWeight | None) -> None:
    result = probe(f"HTTP/1.1 200 OK\r\nx-vipd-weight: {said}\r\n\r\n".encode())
    assert result.good
    assert result.weight == weight
    assert ("is no weight" in result.reason) == (weight is None)


def test_garbage_is_bad_and_shown_safely() -> None:
    result = probe(b"\x1b[31mSSH-2.0-x\r\n\r\n")
    assert result.good is False
    assert result.reason.startswith("no HTTP: the answer begins with")
    assert result.reason.isprintable()
    assert not probe(b"HTTP/1.1 abc\r\n\r\n").good
    assert not probe(b"HTTP/9.9 200 OK\r\n\r\n").good
    assert good_and_reason(probe(b"", close=True)) == (False, "no HTTP: connection closed after nothing")
    assert "closed after b'HTTP/1.1 200" in probe(b"HTTP/1.1 200 OK\r\n", close=True).reason


def test_an_endless_head_is_bad() -> None:
    assert probe(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000).reason.startswith(
        "no HTTP: the answer's head"
    )
    many = b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n"
    assert probe(many).reason.startswith("no HTTP: ")


def test_a_silent_server_times_out() -> None:
    result = probe(b"", timeout=1.0)
    assert good_and_reason(result) == (False, "timeout after 1 s while waiting for the answer")


def test_one_that_drips_for_ever_does_so_in_vain() -> None:
    async def ask() -> tuple[ProbeResult, float]:
        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"a: b\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)

        async with tcp_server(drip) as port:
            began = time.monotonic()
            result = await ask_once(probe_http, target(port, HttpProbe(), 0.4))
            return result, time.monotonic() - began

    result, seconds = run(ask())
    assert result.reason.startswith("timeout after 0.4 s")
    assert 0.4 <= seconds < PATIENCE / 2


def test_resets_and_refusals_are_bad() -> None:
    async def ask() -> ProbeResult:
        async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()

        async with tcp_server(reset) as port:
            return await ask_once(probe_http, target(port, HttpProbe()))

    assert good_and_reason(run(ask())) == (False, "connection reset")
    with closed_port() as port:
        assert good_and_reason(run(ask_once(probe_http, target(port, HttpProbe())))) == (
            False,
            "connection refused",
        )


def test_what_is_sent() -> None:
    sent = request(
        target(8080, HttpProbe(path="/healthz", host="shop.example"), address="fd00::1"), HttpProbe()
    )
    assert sent.startswith(b"GET / HTTP/1.1\r\nHost: [fd00::1]:8080\r\n")
    named = HttpProbe(method="POST", path="/healthz", host="shop.example")
    sent = request(target(8080, named), named)
    assert sent.startswith(b"POST /healthz HTTP/1.1\r\nHost: shop.example\r\n")
    assert b"\r\nContent-Length: 0\r\n" in sent
    assert sent.endswith(b"\r\nConnection: close\r\n\r\n")


def test_head_has_no_body_to_wait_for() -> None:
    assert probe(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", HttpProbe(method="HEAD")).good


def test_a_pattern_that_is_none_blames_no_backend() -> None:
    assert probe(OK, HttpProbe(body="(")).good is None


def test_a_chunk_that_looks_like_the_end_is_none() -> None:
    """The body is read to its end, also where a read ends in the middle of it like this."""

    async def ask() -> ProbeResult:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            for piece in (head, b"6\r\nhe\r\n\r\n", b"\r\n3\r\nllo\r\n", b"0\r\nEtag: x\r\n", b"\r\n"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.05)
            await asyncio.sleep(300)

        async with tcp_server(handler) as port:
            return await ask_once(probe_http, target(port, HttpProbe(body="llo$")))

    assert run(ask()).good


def test_a_body_in_odd_chunks_is_no_http() -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n"
    assert good_and_reason(probe(raw, HttpProbe(body="x"))) == (False, r"no HTTP: a chunk begins with b'zz'")


def test_interim_answers_without_end_are_bad() -> None:
    raw = b"HTTP/1.1 102 Processing\r\n\r\n" * 5000
    assert good_and_reason(probe(raw)) == (False, "no HTTP: more than 10 interim answers")


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\n\r\nhello",
        b"HTTP/1.1 103 Early Hints\nLink: x\n\nHTTP/1.1 200 OK\n\nhello",
        b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n3\nhel\n2\nlo\n0\n\n",
    ],
)
def test_a_line_may_end_with_a_bare_lf(raw: bytes) -> None:
    """RFC 9112, 2.2."""
    assert probe(raw, close=True).good
    assert probe(raw, HttpProbe(body="^hello$"), close=True).good


def test_a_head_of_many_lines_is_bad() -> None:
    """Each of them costs its time: 64 KiB of two bytes each would hold up the loop."""
    assert good_and_reason(probe(b"HTTP/1.1 200 OK\n" + b"a\n" * 10_000)) == (
        False,
        "no HTTP: the answer's head has more than 100 fields",
    )
    most = b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 99 + b"\r\n"
    assert probe(most).good
