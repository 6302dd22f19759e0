"""One connection, between its transport and aiohttp: which side must act, and its time limit."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Protocol, cast

from aiohttp import web

from vipd.host.connections.limits import ClientSource, ConnectionLimits

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request's head."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: otherwise the kernel would keep unread data for minutes."""
_END_OF_HEAD = b"\r\n\r\n"
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Owner(Protocol):
    """Counts connections."""

    def ended(self, connection: Connection) -> None:
        """It counts no more; its descriptor is not free yet."""

    def closed(self) -> None:
        """The descriptor of one that has ended is free."""


class Connection(asyncio.Protocol):
    """One connection. It *waits* while its client must act: send a request, the rest of one, or
    read what was written. Each wait has a time limit."""

    def __init__(
        self, owner: Owner, limits: ConnectionLimits, handler: web.RequestHandler, source: ClientSource
    ) -> None:
        self._owner, self._limits, self.handler, self.client = owner, limits, handler, source
        self._transport: asyncio.Transport | None = None
        self._over = False
        self._request: web.BaseRequest | None = None
        self._head = b""
        """The end of the received part of a head."""
        self._head_bytes: int | None = 0
        """Size of the head that is being read; None: none is."""
        self._asks, self._takes, self._life = _Wait(self.end), _Wait(self.end), _Wait(self.end)
        self.unsent = b""
        """The long answer that is being sent. Others may be sent the same one."""
        self._asks.begin(limits.head_seconds)
        if limits.life_seconds is not None:
            self._life.begin(limits.life_seconds)

    @property
    def waiting_since(self) -> float | None:
        """Since when the client must act, by the loop's clock; None: vipd must."""
        return min((w.since for w in (self._asks, self._takes) if w.since is not None), default=None)

    def end(self) -> None:
        """End at once: unread data is lost. Closing would wait for the client."""
        if not self._over:
            self._count_no_more()
            if self._transport is not None:
                with contextlib.suppress(OSError):
                    end = self._transport.get_extra_info("socket")
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self._transport.abort()

    def begin(self, request: web.BaseRequest) -> None:
        """The head of a request has arrived."""
        if self._over:
            return
        self._request, self._head_bytes = request, None
        self._asks.begin(self._limits.body_seconds)
        request.content.on_eof(lambda: self._whole(request))

    def _whole(self, request: web.BaseRequest) -> None:
        if self._request is request:
            self._asks.end()

    def finish(self, request: web.BaseRequest) -> None:
        """A request has its answer."""
        self._request, self.unsent = None, b""
        if self._over:
            return
        if request.content.is_eof():
            self._head, self._head_bytes = b"", 0
        self._asks.begin(self._limits.head_seconds)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.Transport", transport)
        if self._over:  # closed before it began
            self._transport.abort()
        else:
            self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._head_bytes is None or self._fits(data):
            self.handler.data_received(data)
        elif self._transport is not None:
            self._asks.begin(self._limits.send_seconds)
            self._transport.pause_reading()
            self._transport.write(_TOO_LONG)
            self._transport.close()

    def _fits(self, data: bytes) -> bool:
        """Notes more of a head; False: it is too long."""
        known = self._head + data
        if _END_OF_HEAD in known:
            self._head_bytes = None
            return True
        self._head = known[1 - len(_END_OF_HEAD) :]
        self._head_bytes = (self._head_bytes or 0) + len(data)
        return self._head_bytes <= MAX_HEAD_BYTES

    def eof_received(self) -> None:
        """Called by the event loop, which then closes the connection."""
        self.handler.eof_received()

    def pause_writing(self) -> None:
        """Called by the event loop: the client reads more slowly than vipd writes."""
        if not self._over:
            self._takes.begin(self._limits.send_seconds)
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        """Called by the event loop: the client has read most of it."""
        self._takes.end()
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop, or if it never began."""
        if not self._over:
            self._count_no_more()
        self._owner.closed()
        self.handler.connection_lost(exc)

    def _count_no_more(self) -> None:
        self._over = True
        for wait in (self._asks, self._takes, self._life):
            wait.end()
        self._owner.ended(self)


class _Wait:
    """A time limit that can be started and ended."""

    __slots__ = ("_late", "_timer", "since")

    def __init__(self, late: Callable[[], None]) -> None:
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self.since: float | None = None
        """By the loop's clock; None: it is not running."""

    def begin(self, seconds: float) -> None:
        """Call `late` after this time, unless it ends or is restarted before."""
        self.end()
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        self._timer = loop.call_later(seconds, self._late)

    def end(self) -> None:
        """Call nothing."""
        self.since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
