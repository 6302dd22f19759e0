"""Lines of any length from a body that comes in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp

Translate = Callable[[BaseException], Coroutine[Any, Any, Exception]]

NETWORK_ERRORS = (aiohttp.ClientError, OSError)
"""What aiohttp raises when the network fails; timeouts and TLS errors are kinds of OSError."""


class Lines:
    """Iterates over the lines of a body; network errors are raised as `translate` says.

    aiohttp's own `readline` refuses lines that are longer than its buffer.
    """

    def __init__(self, body: aiohttp.StreamReader, translate: Translate) -> None:
        self._body, self._translate = body, translate
        self._pieces: list[bytes] = []
        self._ready: list[bytes] = []

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._ready:
            piece = await self._read()
            *ended, rest = piece.split(b"\n")
            if ended:
                ended[0] = b"".join((*self._pieces, ended[0]))
                self._pieces = []
                self._ready = [line for line in reversed(ended) if line.strip()]
            self._pieces.append(rest)
        return self._ready.pop()

    async def _read(self) -> bytes:
        try:
            piece = await self._body.readany()
        except NETWORK_ERRORS as error:
            raise await self._translate(error) from None
        if not piece:
            raise StopAsyncIteration
        return piece
