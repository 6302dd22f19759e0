"""No garbage of a server goes wrong: it is bad, for a reason that can be printed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.health.servers import beside, checked, tcp_server, udp_server
from tests.lab.inside import Verdict, probed

NUMBER = 100


def asked(type_: str, port: int, **keys: Any) -> list[Verdict]:
    """What so many checks find; equal ones are asked once."""
    limit = 20_000 if type_ == "http" else 200
    return probed(
        *(checked(type_, port, timeout=f"{limit + n}ms", **keys) for n in range(NUMBER)), worker=True
    )


def garbage(seed: int) -> Iterator[bytes]:
    source = random.Random(seed)
    good = b"HTTP/1.1 200 OK\r\n"
    heads = (b"", good, good + b"Transfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 100 ")
    tails = (b"", b"\r\n\r\n", b"\r\n\r\n0\r\n\r\n")
    while True:
        body = source.randbytes(source.choice((0, 1, 12, 40, 600)))
        yield source.choice(heads) + body + source.choice(tails)


@pytest.mark.parametrize("body", ["", "x", "x+"])
def test_of_an_http_server(body: str) -> None:
    answers = garbage(len(body))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(next(answers))
        await writer.drain()
        writer.close()

    with beside(tcp_server(answer)) as port:
        verdicts = asked("http", port, **({"body": body} if body else {}))
    assert all(found.healthy is not None and found.reason.isprintable() for found in verdicts)
    assert not all(found.healthy for found in verdicts)


@pytest.mark.parametrize(
    ("type_", "keys"), [("dns", {"query": "example.com"}), ("udp", {"send": "x", "expect": "y"})]
)
def test_of_a_udp_server(type_: str, keys: dict[str, Any]) -> None:
    """For DNS behind the head that makes it an answer to the query, with as many records as it says."""
    source = random.Random(1)

    def reply(query: bytes) -> list[bytes]:
        counts = source.choice((b"\0\1\0\1", b"\0\1\xff\xff", b"\0\0\0\0"))
        head = query[:2] + bytes([0x80 | source.randrange(128), source.randrange(256)]) + counts + query[8:]
        records = b"\xc0\x0c" + source.choice((b"\0\1", b"\0\5", b"\0\6")) + b"\0\1\0\0\0\0"
        return [head + records + source.randbytes(source.choice((0, 2, 6, 30, 400))), b"y"]

    with beside(udp_server(reply)) as port:
        verdicts = asked(type_, port, **keys)
    assert all(found.healthy is not None and found.reason.isprintable() for found in verdicts)
    assert not all(found.healthy for found in verdicts)
