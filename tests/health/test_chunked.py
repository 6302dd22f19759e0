"""Bodies in chunks, however what comes is split, and what is none."""

from __future__ import annotations

from http.client import HTTPException
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipd.health.probes.chunked import MOST_LINE, ChunkedBody


def decoded(pieces: list[bytes], most: int = 1000) -> ChunkedBody:
    body = ChunkedBody(most)
    for piece in pieces:
        body.feed(piece)
    return body


def encoded(chunks: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    parts = [b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks]
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


def split(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


# What looks like an end, or like the head of a chunk, is data within a chunk.
CHUNKS = st.lists(
    st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", b"\n", b"\r"]) | st.binary(min_size=1, max_size=40)
)


@given(CHUNKS, st.lists(st.integers(0, 10_000), max_size=12), st.sampled_from([b"", b";x=y", b" "]))
def test_however_it_is_split_the_body_is_the_same(
    chunks: list[bytes], places: list[int], extension: bytes
) -> None:
    data = encoded(chunks, extension, b"Etag: x\r\n")
    whole = decoded(split(data, places), 10_000)
    assert whole.body == b"".join(chunks)
    assert whole.done


def test_every_split_into_two_and_single_bytes() -> None:
    data = encoded([b"\r\n\r\n", b"0\r\n\r\n", b"hello"])
    ways = [[data[:place], data[place:]] for place in range(len(data))]
    for pieces in (*ways, [data[n : n + 1] for n in range(len(data))]):
        whole = decoded(pieces)
        assert (whole.body, whole.done) == (b"\r\n\r\n0\r\n\r\nhello", True)


def test_lines_that_end_with_lf_alone() -> None:
    data = encoded([b"ab", b"c"]).replace(b"\r\n", b"\n")
    ways = [[data[:place], data[place:]] for place in range(len(data))]
    for pieces in (*ways, [data[n : n + 1] for n in range(len(data))]):
        whole = decoded(pieces)
        assert (whole.body, whole.done) == (b"abc", True)


def test_it_ends_with_its_last_line_and_no_earlier() -> None:
    data = encoded([b"x\r\n\r\n"], trailers=b"a: b\r\n")
    for length in range(len(data)):
        assert not decoded([data[:length]]).done
    assert decoded([data, b"what comes after"]).body == b"x\r\n\r\n"


@given(st.integers(0, 30), st.lists(st.integers(0, 100), max_size=5))
def test_no_more_is_kept_than_is_wanted(most: int, places: list[int]) -> None:
    body = ChunkedBody(most)
    for piece in split(encoded([b"0123456789"] * 3), places):
        if not body.done:
            body.feed(piece)
            assert len(body.body) <= most


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"hello\r\n",
        b"-1\r\n",
        b"+1\r\nx\r\n",
        b"0x1\r\nx\r\n",
        b"1_0\r\n" + bytes(16),
        b"1" * 17 + b"\r\n",
        "１\r\n".encode(),
        b"1\r\nxyz",
        b"1\r\nx\ry",
        b"f" * (MOST_LINE + 1),
        b"0\r\n" + b"a: b\r\n" * 101,
        b"1;" + b"x" * 90 + b"\r\nx\r\n" + (b"1;" + b"x" * 90 + b"\r\nx\r\n") * 200,
    ],
)
def test_what_is_no_chunk_is_refused(data: bytes) -> None:
    for pieces in ([data], [data[n : n + 1] for n in range(len(data))]):
        with pytest.raises(HTTPException):
            decoded(pieces)


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_bytes_do_worse_than_being_refused(pieces: list[bytes]) -> None:
    body = ChunkedBody(100)
    try:
        for piece in pieces:
            body.feed(piece)
    except HTTPException:
        pass
    assert len(body.body) <= 100
