"""HTTP on TCP ports that come and go while vipd runs. One that cannot be had is a warning, and tried again.

Made for health checks by strangers: a connection gets one answer and does not live long, and there are never
so many that vipd has no descriptor left for its own work.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from aiohttp import web

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.model import Family, socket_text

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
CONNECTION_SECONDS = 10.0
"""Whoever asks after health has given up long before."""
MOST_CONNECTIONS = 256
BACKLOG = 64

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Limits(NamedTuple):
    """What others can take of vipd."""

    connections: int
    """So many at a time; further ones are closed at once."""
    seconds: float
    """Longest life of a connection, unless it is prolonged."""


class Place(NamedTuple):
    """A TCP address to listen on. `0.0.0.0` means all of IPv4, `::` all of IPv6 and no IPv4."""

    address: str
    port: int

    def __str__(self) -> str:
        return socket_text(self.address, self.port)


class Listeners:
    """Keeps the wanted places open while `run` runs, all answered by one function."""

    def __init__(self, answer: Answer, limits: Limits | None = None) -> None:
        self._answer, self._limits = answer, limits or Limits(MOST_CONNECTIONS, CONNECTION_SECONDS)
        self._ends: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._wanted: Mapping[Place, str] = {}
        self._open: dict[Place, asyncio.Server] = {}
        self._faults: dict[Place, str] = {}
        self._woken = asyncio.Event()

    @property
    def open(self) -> frozenset[Place]:
        """The places where it listens now."""
        return frozenset(self._open)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One for each wanted place that could not be opened."""
        return tuple(self._faults.values())

    def want(self, places: Mapping[Place, str]) -> None:
        """The places to have open from now on, each with what it is for, as a warning says it."""
        if places != self._wanted:
            self._wanted = dict(places)
            self._woken.set()

    def prolong(self, request: web.BaseRequest, seconds: float) -> None:
        """Let the connection of a request that is being answered live so long from now on."""
        connection = request.protocol
        if connection in self._ends:  # else it ends already
            self._ends[connection].cancel()
            self._end_after(connection, seconds)

    async def run(self) -> None:
        """Open and close as wanted, for ever; whatever is open is closed when this is cancelled."""
        server = web.Server(self._answer_once, access_log=None)
        try:
            while True:
                self._woken.clear()
                await self._match(server)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS if self._faults else None):
                        await self._woken.wait()
        finally:
            for place in list(self._open):
                self._open.pop(place).close()
            await server.shutdown(timeout=1.0)

    async def _match(self, server: web.Server) -> None:
        wanted, faults = self._wanted, dict[Place, str]()
        for place in self._open.keys() - wanted.keys():
            self._open.pop(place).close()
        for place in wanted.keys() - self._open.keys():
            try:
                self._open[place] = await self._listen(place, server)
            except OSError as error:
                what = f"{wanted[place]} cannot listen on {place}: {os.strerror(error.errno or 0)}"
                hint = _HINTS.get(error.errno or 0, "")
                faults[place] = f"{what}; hint: {hint}vipd tries again every {RETRY_SECONDS:.0f} s"
                if place not in self._faults:
                    log.warning("%s", faults[place])
            except Exception as error:
                why = f"{internal_error(error, 'opening it')}; {PLEASE_REPORT}"
                faults[place] = f"{wanted[place]} cannot listen on {place}: {why}"
                if self._faults.get(place) != faults[place]:
                    log.warning("%s", faults[place], exc_info=error)
        self._faults = faults

    async def _answer_once(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._answer(request)
        response.force_close()  # a kept connection would outlive its port
        return response

    async def _listen(self, place: Place, server: web.Server) -> asyncio.Server:
        def accept() -> asyncio.BaseProtocol:
            if len(server.connections) >= self._limits.connections:
                return _Refused()
            connection = server()
            self._end_after(connection, self._limits.seconds)
            return connection

        listener = _bind(place)
        try:
            return await asyncio.get_running_loop().create_server(accept, sock=listener, backlog=BACKLOG)
        except BaseException:
            listener.close()
            raise

    def _end_after(self, connection: web.RequestHandler, seconds: float) -> None:
        def end() -> None:
            del self._ends[connection]
            connection.force_close()

        self._ends[connection] = asyncio.get_running_loop().call_later(seconds, end)


def supported(family: Family) -> bool:
    """Whether this kernel has the family at all."""
    try:
        socket.socket(_NUMBERS[family], socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


_HINTS = {
    errno.EADDRINUSE: "ss -ltnp shows who does, and ",
    errno.EACCES: "the drop-in low-ports.conf of the package gives ports below 1024; ",
}

_NUMBERS = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _bind(place: Place) -> socket.socket:
    family = Family.IPV6 if ":" in place.address else Family.IPV4
    listener = socket.socket(_NUMBERS[family], socket.SOCK_STREAM)
    try:
        # Else a port that had connections a moment ago, as when vipd restarts, counts as taken for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is Family.IPV6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(place)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
