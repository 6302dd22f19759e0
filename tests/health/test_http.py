"""HTTP checks of real servers, well behaved and not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

from tests.health.servers import (
    Case,
    answers,
    beside,
    checked,
    closed_port,
    differing,
    healthy_and_reason,
    tcp_server,
    verdict,
)
from tests.lab.inside import probed

OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MISMATCH = "bad: status 200, but the body does not match"
HINTS = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
LONG = OK + b"Content-Length: 10000000\r\n\r\n" + b"x" * 70_000 + b"end"
FIELDS = b"a: b\r\n"
ONLY: dict[str, Any] = {"status": [204, "250-299"]}
GREETING: dict[str, Any] = {"body": "^hel+o$"}


def only_bare_lf(raw: bytes) -> Case:
    """RFC 9112, 2.2: a line may end with LF alone."""
    return Case(answers(raw, close=True), "good", GREETING)


def test_an_answer_is_good_or_bad_for_a_reason() -> None:
    cases = {
        "200": Case(answers(HELLO), "good"),
        "HTTP/1.0": Case(answers(b"HTTP/1.0 204 No Content\r\n\r\n"), "good"),
        "a redirection": Case(answers(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n"), "good"),
        "500": Case(answers(b"HTTP/1.1 500 Oops\r\n\r\n"), "bad: status 500"),
        "400": Case(answers(b"HTTP/1.1 400 Oops\r\n\r\n"), "bad: status 400"),
        "200 where others are wanted": Case(answers(HELLO), "bad: status 200", ONLY),
        "the last of a range": Case(answers(b"HTTP/1.1 299 Odd\r\n\r\n"), "good", ONLY),
        "the first of a range": Case(answers(b"HTTP/1.1 250 Odd\r\n\r\n"), "good", ONLY),
        "interim answers": Case(answers(HINTS + HELLO), "good"),
        "interim answers, then bad": Case(answers(HINTS + b"HTTP/1.1 503 No\r\n\r\n"), "bad: status 503"),
        "too many interim answers": Case(
            answers(b"HTTP/1.1 102 Processing\r\n\r\n" * 5000), "bad: no HTTP: more than 10 interim answers"
        ),
        "HEAD has no body": Case(answers(OK + b"Content-Length: 3\r\n\r\n"), "good", {"method": "HEAD"}),
        "as many fields as may be": Case(answers(OK + FIELDS * 99 + b"\r\n"), "good"),
        "more fields": Case(answers(OK + FIELDS * 200 + b"\r\n"), "bad: no HTTP: …"),
        # Each of them costs its time: 64 KiB of two bytes each would hold up the loop.
        "many short lines": Case(
            answers(b"HTTP/1.1 200 OK\n" + b"a\n" * 10_000),
            "bad: no HTTP: the answer's head has more than 100 fields",
        ),
        "a head without end": Case(answers(OK + FIELDS * 20_000), "bad: no HTTP: the answer's head…"),
        "a field of 70 KiB": Case(
            answers(OK + b"a: " + b"b" * 70_000 + b"\r\n\r\n"),
            "bad: no HTTP: the answer's head is longer than 64 KiB",
        ),
        "no number": Case(answers(b"HTTP/1.1 abc\r\n\r\n"), "bad: no HTTP: …"),
        "another version": Case(answers(b"HTTP/9.9 200 OK\r\n\r\n"), "bad: no HTTP: …"),
        "another protocol, shown safely": Case(
            answers(b"\x1b[31mSSH-2.0-x\r\n\r\n"),
            r"bad: no HTTP: the answer begins with b'\x1b[31mSSH-2.0-x\r\n\r\n'",
        ),
        "nothing": Case(answers(b"", close=True), "bad: no HTTP: connection closed after nothing"),
        "a part": Case(answers(OK, close=True), "bad: no HTTP: connection closed after b'HTTP/1.1 200…"),
        "an end with LF": only_bare_lf(b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello"),
        "an end with both": only_bare_lf(b"HTTP/1.1 200 OK\r\nContent-Length: 5\n\r\nhello"),
        "hints with LF": only_bare_lf(b"HTTP/1.1 103 Early Hints\nLink: x\n\nHTTP/1.1 200 OK\n\nhello"),
        "chunks with LF": only_bare_lf(
            b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n3\nhel\n2\nlo\n0\n\n"
        ),
        "a reset": Case(reset, "bad: connection reset"),
    }
    assert differing(cases) == {}
    assert differing(cases, worker=True) == {}, "in the process that reads answers for a daemon"


def test_the_body_must_match() -> None:
    chunks = CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    bodies = {
        "by length": answers(HELLO),
        "in chunks": answers(chunks),
        "to the end": answers(OK + b"\r\nhello", close=True),
        "shorter than its length": answers(OK + b"Content-Length: 50\r\n\r\nhello", close=True),
    }
    matching = {name: Case(handler, "good", GREETING) for name, handler in bodies.items()}
    others = {f"{name}, not": Case(handler, MISMATCH, {"body": "bye"}) for name, handler in bodies.items()}
    pieces = (CHUNKED, b"6\r\nhe\r\n\r\n", b"\r\n3\r\nllo\r\n", b"0\r\nEtag: x\r\n", b"\r\n")
    special = {
        "of 64 KiB the beginning": Case(answers(LONG), "good", {"body": "^xxx"}),
        "of 64 KiB not the end": Case(answers(LONG), MISMATCH, {"body": "end"}),
        "one large chunk": Case(
            answers(CHUNKED + b"20000\r\n" + b"x" * 0x20000 + b"\r\n"), "good", {"body": "^xxx"}
        ),
        "a chunk that looks like the end": Case(answers(*pieces), "good", {"body": "llo$"}),
        "no chunks": Case(
            answers(CHUNKED + b"zz\r\nhello\r\n"), "bad: no HTTP: a chunk begins with b'zz'", {"body": "x"}
        ),
    }
    assert differing(matching | others | special, worker=True) == {}


def test_a_backend_may_say_its_weight() -> None:
    texts = {
        "0": "0",
        " 65535 ": "65535",
        "50%": "50%",
        "100%": "100%",
        "00004": "4",
        "000000000004": "4",
        "007%": "7%",
        "0" * 100: "0",
        "\t5 ": "5",
        **dict.fromkeys(("65536", "101%", "-1", "1.5", "", "²", "0065536", "\xa05", "+5", "1_0", "much"), ""),
    }
    with contextlib.ExitStack() as stack:
        heads = [OK + f"x-vipd-weight: {text}\r\n\r\n".encode("latin-1") for text in texts]
        ports = [stack.enter_context(beside(tcp_server(answers(head)))) for head in heads]
        verdicts = probed(*(checked("http", port) for port in ports), worker=True)
    assert {text: found.weight for text, found in zip(texts, verdicts, strict=True)} == texts
    assert all(found.healthy for found in verdicts)
    assert all(("is no weight" in found.reason) == (not found.weight) for found in verdicts)


def test_no_redirection_is_followed() -> None:
    """It would have every host ask wherever a backend likes."""
    asked: list[bytes] = []
    codes = (300, 301, 302, 303, 305, 307, 308)

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        to = b"http://127.0.0.1:%d/elsewhere" % writer.get_extra_info("sockname")[1]
        head = b"HTTP/1.1 %d Moved\r\nLocation: %s\r\nRefresh: 0; url=%s\r\n" % (
            codes[len(asked) - 1],
            to,
            to,
        )
        writer.write(head + b"Content-Length: 0\r\n\r\n")
        writer.close()

    with beside(tcp_server(redirect)) as port:
        found = [verdict("http", port, body="x").healthy for _ in codes]
    assert found == [False] * 7, "the body is that of the redirection itself"
    assert len(asked) == 7
    assert all(b"elsewhere" not in request for request in asked)


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def test_a_closed_port_refuses() -> None:
    with closed_port() as port:
        assert healthy_and_reason("http", port) == (False, "connection refused")


def test_a_request_says_what_is_declared() -> None:
    asked: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    with beside(tcp_server(note)) as port, beside(tcp_server(note, address="::1")) as sixth:
        assert verdict("http", port).healthy
        assert verdict("http", sixth, "::1").healthy
        assert verdict("http", port, method="POST", path="/healthz", host="shop.example").healthy
    plain, by_ipv6, named = asked
    assert plain.startswith(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % port)
    assert b"Content-Length" not in plain
    assert by_ipv6.startswith(b"GET / HTTP/1.1\r\nHost: [::1]:%d\r\n" % sixth)
    assert named.startswith(b"POST /healthz HTTP/1.1\r\nHost: shop.example\r\n")
    assert b"\r\nContent-Length: 0\r\n" in named
    assert all(request.endswith(b"\r\nConnection: close\r\n\r\n") for request in asked)
