"""A body in chunks (RFC 9112, 7.1), decoded incrementally, however it is split. Pure."""

from __future__ import annotations

from http.client import HTTPException

MOST_LINE = 4096
"""Longest line between chunks, in bytes: a size with its extensions, or a trailer."""

MOST_TRAILERS = 100
_MOST_DIGITS = 16
_MOST_OVERHEAD = 8
"""Maximum ratio of received bytes, including everything between chunks, to the wanted body."""

_HEX = frozenset(b"0123456789abcdefABCDEF")


class ChunkedBody:
    """Decodes received data; `done` once the body is complete, or `most` bytes of it are decoded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._body = bytearray()
        self._rest = bytearray()
        """Received data that cannot be decoded yet: part of a line."""
        self._came = 0
        self._left = 0
        """Bytes of this chunk that are missing, including the line's end after them."""
        self._trailers: int | None = None
        self.done = most <= 0

    @property
    def body(self) -> bytes:
        """The decoded part."""
        return bytes(self._body)

    def feed(self, data: bytes) -> None:
        """Add received data. Raises HTTPException for an invalid chunk."""
        self._rest += data
        self._came += len(data)
        place = 0
        while not self.done:
            following = self._data(place) if self._left else self._line(place)
            if following == place:
                break
            place = following
        del self._rest[:place]
        if not self.done and self._came > _MOST_OVERHEAD * self._most + MOST_LINE:
            raise HTTPException(f"{self._came} bytes have come for {len(self._body)} bytes of body")

    def _data(self, place: int) -> int:
        """Reads the available part of a chunk; returns where the next part begins."""
        taken = min(self._left, len(self._rest) - place)
        own = max(0, min(taken, self._left - 2))
        self._body += self._rest[place : place + min(own, self._most - len(self._body))]
        if self._left - own == 2 and self._rest[place + own : place + own + 1] == b"\n":
            taken, self._left = own + 1, own + 1  # LF alone ends a line, too
        for at in range(place + own, place + taken):
            wanted = b"\r\n"[-(self._left - (at - place)) :][:1]
            if self._rest[at : at + 1] != wanted:
                raise HTTPException("a chunk is longer than it says")
        self._left -= taken
        self.done = len(self._body) >= self._most
        return place + taken

    def _line(self, place: int) -> int:
        """Reads one line if it is complete; returns where the next part begins."""
        end = self._rest.find(b"\n", place, place + MOST_LINE)
        if end < 0:
            if len(self._rest) - place >= MOST_LINE:
                raise HTTPException(f"a line between chunks is longer than {MOST_LINE} bytes")
            return place
        line = bytes(self._rest[place:end]).rstrip(b"\r")
        if self._trailers is None:
            self._begin(line)
        else:
            self._trailers += 1
            if self._trailers > MOST_TRAILERS:
                raise HTTPException(f"more than {MOST_TRAILERS} trailers")
            self.done = not line
        return end + 1

    def _begin(self, line: bytes) -> None:
        """Begins a chunk, or the trailers after the last one, which is empty."""
        digits = line.partition(b";")[0].strip()
        if not 0 < len(digits) <= _MOST_DIGITS or not _HEX.issuperset(digits):
            raise HTTPException(f"a chunk begins with {line[:20]!r}")
        size = int(digits, 16)
        if size:
            self._left = size + 2
        else:
            self._trailers = 0
