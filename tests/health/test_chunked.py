"""Bodies in chunks, however what comes is split, and what is none."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.health.servers import Case, answers, differing

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LATE = "bad: timeout after 0.5 s while waiting for the answer"


def encoded(chunks: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    parts = [b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks]
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


def ways(data: bytes) -> list[list[bytes]]:
    """All splits into two parts, and one into single bytes."""
    halves = [[data[:at], data[at:]] for at in range(1, len(data))]
    return [*halves, [data[n : n + 1] for n in range(len(data))]]


def whole(body: bytes) -> dict[str, Any]:
    """A check that wants exactly this body, and closes nothing itself."""
    return {"body": rf"\A{re.escape(body.decode())}\z"}


# What looks like an end, or like the head of a chunk, is data within a chunk.
CHUNKS = st.lists(st.sampled_from(["\r\n\r\n", "0\r\n\r\n", "\n", "\r"]) | st.text("ab \r\n", min_size=1))


@settings(max_examples=10)
@given(CHUNKS, st.lists(st.integers(0, 10_000), max_size=12), st.sampled_from([b"", b";x=y", b" "]))
def test_however_it_is_split_the_body_is_the_same(
    chunks: list[str], cuts: list[int], extension: bytes
) -> None:
    data = HEAD + encoded([chunk.encode() for chunk in chunks], extension, b"Etag: x\r\n")
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert differing({"split": Case(answers(*pieces), "good", whole("".join(chunks).encode()))}) == {}


def test_every_split_into_two_and_single_bytes() -> None:
    data = encoded([b"\r\n\r\n", b"0\r\n\r\n", b"hello"])
    cases = {
        f"{pieces}": Case(answers(HEAD, *pieces), "good", whole(b"\r\n\r\n0\r\n\r\nhello"))
        for pieces in ways(data)
    }
    lines = encoded([b"ab", b"c"]).replace(b"\r\n", b"\n")
    with_lf = {f"{pieces}": Case(answers(HEAD, *pieces), "good", whole(b"abc")) for pieces in ways(lines)}
    assert differing(cases | with_lf) == {}


def test_it_ends_with_its_last_line_and_no_earlier() -> None:
    data = encoded([b"x\r\n\r\n"], trailers=b"a: b\r\n")
    keys = {"timeout": "500ms", **whole(b"x\r\n\r\n")}
    early = {f"{data[:n]!r}": Case(answers(HEAD + data[:n]), LATE, keys) for n in range(len(data))}
    ended = {"more after it": Case(answers(HEAD + data + b"what comes after"), "good", keys)}
    assert differing(early | ended) == {}


def test_what_is_no_chunk_is_refused() -> None:
    refused = {
        "no size": b"\r\n",
        "a word": b"hello\r\n",
        "less than nothing": b"-1\r\n",
        "a plus": b"+1\r\nx\r\n",
        "0x": b"0x1\r\nx\r\n",
        "an underscore": b"1_0\r\n" + bytes(16),
        "17 digits": b"1" * 17 + b"\r\n",
        "a digit of another script": "１\r\n".encode(),
        "a chunk longer than it says": b"1\r\nxyz",
        "CR alone": b"1\r\nx\ry",
        "a line without end": b"f" * 4097,
        "101 trailers": b"0\r\n" + b"a: b\r\n" * 101,
        "more around a body than body": (b"1;" + b"x" * 4000 + b"\r\nx\r\n") * 150,
    }
    cases = {
        name: Case(answers(HEAD + data), "bad: no HTTP: …", {"body": "y"}) for name, data in refused.items()
    }
    by_bytes = {
        f"{name}, byte by byte": Case(answers(HEAD, *way), "bad: no HTTP: …", {"body": "y"})
        for name, data in refused.items()
        if len(data) < 40
        for way in ways(data)[-1:]
    }
    assert differing(cases | by_bytes) == {}
