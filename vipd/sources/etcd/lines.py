"""Lines of any length from a body that arrives in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import aiohttp

from vipd.sources.etcd.errors import TooLargeError
from vipd.sources.etcd.fields import MAX_BYTES

_WITHOUT_PAUSE = 100
"""Lines that are given in one turn of the event loop."""

Translate = Callable[[BaseException], Coroutine[Any, Any, Exception]]

NETWORK_ERRORS = (aiohttp.ClientError, OSError)
"""Exceptions of aiohttp for network failures; timeouts and TLS errors are kinds of OSError."""

THREAD_MIN_CHARS = 2**17
"""Characters above which an answer is parsed in a thread: it takes some milliseconds."""

T = TypeVar("T")


async def in_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """The result of some work on this many characters, done in a thread if they are many."""
    return await asyncio.to_thread(work) if size > THREAD_MIN_CHARS else work()


async def read_body(body: aiohttp.StreamReader) -> str:
    """A whole body as text; invalid UTF-8 is replaced. Raises TooLargeError, and NETWORK_ERRORS."""
    pieces, size = [], 0
    while piece := await body.readany():
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BYTES:
            raise too_large()
    return b"".join(pieces).decode(errors="replace")


def too_large() -> TooLargeError:
    """The error for a body larger than `MOST_BYTES`, which is not read."""
    return TooLargeError(f"it is larger than {MAX_BYTES >> 20} MiB")


class Lines:
    """Iterates over the lines of a body; converts network errors by `translate`, and raises TooLargeError for
    a line above `MOST_BYTES`.

    aiohttp's own `readline` rejects lines that are longer than its buffer.
    """

    def __init__(self, body: aiohttp.StreamReader, translate: Translate) -> None:
        self._body, self._translate = body, translate
        self._pieces: list[bytes] = []
        self._ready: list[bytes] = []
        self._pending = 0
        """Bytes of the pieces."""
        self._given = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._ready:
            piece = await self._read()
            *ended, rest = piece.split(b"\n")
            if ended:
                ended[0] = b"".join((*self._pieces, ended[0]))
                self._pieces, self._pending = [], 0
                self._ready = [line for line in reversed(ended) if line.strip()]
            self._pieces.append(rest)
            self._pending += len(rest)
            if self._pending > MAX_BYTES:
                raise too_large()
        self._given += 1
        if self._given % _WITHOUT_PAUSE == 0:
            await asyncio.sleep(0)  # reading does not wait while there is something to read
        return self._ready.pop()

    @property
    def at_hand(self) -> bool:
        """Whether the next line has arrived."""
        return bool(self._ready)

    async def _read(self) -> bytes:
        try:
            piece = await self._body.readany()
        except NETWORK_ERRORS as error:
            raise await self._translate(error) from None
        if not piece:
            raise StopAsyncIteration
        return piece
