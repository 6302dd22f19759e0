"""Processes a file's text as UTF-8 in pieces. Pure.

A single call over tens of MiB blocks every other thread until it ends: 50 ms to copy 64 MiB,
and a second for a regular expression over all of them. Here a call takes a millisecond or two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Utf8 = bytes | bytearray
"""A bytearray must not be modified: it is one because it can grow without a copy."""

CHUNK_BYTES = 2**18
"""Bytes that are worked on at once."""


def chunks(data: Utf8) -> Iterator[tuple[int, Utf8]]:
    """All of a text, each part with its offset. No character is split."""
    start = 0
    while start < len(data):
        end = start + CHUNK_BYTES
        # Continuation bytes are 10xxxxxx, three at most; invalid UTF-8 may be split anywhere.
        while end < len(data) and data[end] & 0xC0 == 0x80 and end > start + CHUNK_BYTES - 3:
            end -= 1
        yield start, data[start:end]
        start = end


def concatenated(*parts: Utf8) -> bytearray:
    """Texts as one."""
    found = bytearray()
    for part in parts:
        for _, piece in chunks(part):
            found += piece
    return found


def first_invalid_utf8(data: Utf8) -> int | None:
    """Offset of the first byte of invalid UTF-8."""
    for start, piece in chunks(data):
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            return start + error.start
    return None


def lines_before(data: Utf8, end: int, start: int = 0) -> int:
    """Number of line ends between two offsets."""
    return sum(data.count(b"\n", at, min(at + CHUNK_BYTES, end)) for at in range(start, end, CHUNK_BYTES))


def find(data: Utf8, mark: bytes, start: int = 0) -> int:
    """Like `bytes.find`."""
    for at in range(start, len(data), CHUNK_BYTES):
        found = data.find(mark, at, at + CHUNK_BYTES + len(mark) - 1)
        if found >= 0:
            return found
    return -1


def find_last(data: Utf8, mark: bytes, start: int, end: int) -> int:
    """As `bytes.rfind`."""
    while end - start >= len(mark):
        at = max(start, end - CHUNK_BYTES)
        found = data.rfind(mark, at, end)
        if found >= 0:
            return found
        end = at + len(mark) - 1 if at > start else start
    return -1


def search(data: Utf8, pattern: re.Pattern[bytes], start: int = 0, longest: int = 8) -> bool:
    """Whether a pattern matches that reads at most `longest` bytes, not counting the one before a
    match."""
    for at in range(start, len(data), CHUNK_BYTES):
        found = pattern.search(data, at, at + CHUNK_BYTES + longest)
        # A match that begins after the piece may be truncated; the next piece has it completely.
        if found and found.start() < at + CHUNK_BYTES:
            return True
    return False


def common_prefix(one: Utf8, other: Utf8) -> int:
    """Number of equal bytes at the beginning."""
    end = min(len(one), len(other))
    low = next(
        (
            at
            for at in range(0, end, CHUNK_BYTES)
            if one[at : at + CHUNK_BYTES] != other[at : at + CHUNK_BYTES]
        ),
        end,
    )
    high = min(low + CHUNK_BYTES, end)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(one: Utf8, other: Utf8, most: int) -> int:
    """Number of equal bytes at the end, at most `most`."""

    def same(low: int, high: int) -> bool:
        return one[len(one) - high : len(one) - low] == other[len(other) - high : len(other) - low]

    low = next((at for at in range(0, most, CHUNK_BYTES) if not same(at, min(at + CHUNK_BYTES, most))), most)
    high = min(low + CHUNK_BYTES, most)
    while low < high:
        middle = (low + high + 1) // 2
        if same(low, middle):
            low = middle
        else:
            high = middle - 1
    return low
