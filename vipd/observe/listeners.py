"""HTTP on TCP ports that are opened and closed while vipd runs. A port that fails is a warning, and retried.

Made for health checks by unknown clients: a connection gets one answer and does not live long.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from aiohttp import web

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.connections.connections import BACKLOG, Connections
from vipd.host.connections.http import SERVER_OPTIONS
from vipd.host.connections.limits import ConnectionLimits
from vipd.host.containment import Containment
from vipd.host.descriptors import raise_limit
from vipd.model.service import Family, socket_text

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
HEALTH_LIMITS = ConnectionLimits(
    connections=512, per_client=256, head_seconds=5.0, body_seconds=5.0, send_seconds=5.0, life_seconds=10.0
)
"""A client of health ports times out long before. A load balancer may query all health ports at once."""

_HINTS = {
    errno.EADDRINUSE: "ss -ltnp shows who does, and ",
    errno.EACCES: "the drop-in low-ports.conf of the package gives ports below 1024; ",
    errno.EMFILE: "fewer health ports or a higher LimitNOFILE, and ",
}

SHARE = 2
"""An author of services listens at most on one of so many places that the others leave, as of checks."""
_BATCH = 50
"""Places that are opened before others have the event loop."""

RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ListenAddress(NamedTuple):
    """A TCP address to listen on. `0.0.0.0` means all of IPv4, `::` all of IPv6 and no IPv4."""

    address: str
    port: int

    def __str__(self) -> str:
        return socket_text(self.address, self.port)


class Listeners:
    """Keeps the wanted places open while `run` runs; one function answers all."""

    def __init__(self, answer: RequestHandler, limits: ConnectionLimits = HEALTH_LIMITS) -> None:
        self._answer, room = answer, raise_limit()
        self._max_open = room.ports
        self.connections = Connections(limits.within(room.clients))
        self._wanted: Mapping[ListenAddress, str] = {}
        self._authors: Mapping[ListenAddress, str] = {}
        self._open: dict[ListenAddress, socket.socket] = {}
        self._faults: dict[ListenAddress, str] = {}
        self._woken = asyncio.Event()
        self._containment = Containment()

    @property
    def open(self) -> frozenset[ListenAddress]:
        """The places where it listens now."""
        return frozenset(self._open)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One for each wanted place that could not be opened, and why requests cannot be answered."""
        return (*self._faults.values(), *self._containment.warnings)

    def set_addresses(
        self,
        addresses: Mapping[ListenAddress, str],
        authors: Mapping[ListenAddress, str] = MappingProxyType({}),
    ) -> None:
        """Set the places to keep open, each with its purpose for warnings. `authors` are those in whose share
        they are opened; the first ones, where there are more than it has."""
        if (addresses, authors) != (self._wanted, self._authors):
            self._wanted, self._authors = dict(addresses), dict(authors)
            self._woken.set()

    async def run(self) -> None:
        """Open and close as wanted, for ever; cancellation closes all."""
        server = web.Server(self._answer_once, **SERVER_OPTIONS)
        try:
            while True:
                self._woken.clear()
                await self._reconcile(server)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS if self._faults else None):
                        await self._woken.wait()
        finally:
            self.connections.stop_listening_all()
            self._open.clear()
            await server.shutdown(timeout=1.0)
            self.connections.end_all()

    async def _reconcile(self, server: web.Server) -> None:
        """Open and close. A port that cannot be had is contained here: the others stay open."""
        wanted, authors, faults = self._wanted, self._authors, dict[ListenAddress, str]()
        for place in self._open.keys() - wanted.keys():
            self.connections.stop_listening(self._open.pop(place))
        opened = Counter(authors.get(place, "") for place in self._open)
        beyond: dict[str, list[ListenAddress]] = {}
        for number, place in enumerate([place for place in wanted if place not in self._open]):
            if number % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
            author = authors.get(place, "")
            if author and opened[author] >= (self._max_open - len(self._open) + opened[author]) // SHARE:
                beyond.setdefault(author, []).append(place)
            elif fault := self._try(place, wanted[place], server):
                faults[place] = fault
            else:
                opened[author] += 1
        for author, (place, *others) in beyond.items():
            what = f"{wanted[place]} cannot listen on {place}, nor can {len(others)} others of {author}"
            faults[place] = f"{what}: it has {opened[author]} places, its share; hint: use fewer health ports"
            if place not in self._faults:
                log.warning("%s", faults[place])
        self._faults = faults

    def _try(self, place: ListenAddress, purpose: str, server: web.Server) -> str:
        """Open a place; why it cannot be, or nothing."""
        try:
            self._open[place] = self._listen(place, server)
        except OSError as error:
            what = f"{purpose} cannot listen on {place}: {os.strerror(error.errno or 0)}"
            hint = f"{_HINTS.get(error.errno or 0, '')}vipd tries again every {RETRY_SECONDS:.0f} s"
            fault = f"{what}; hint: {hint}"
            if place not in self._faults:
                log.warning("%s", fault)
        except Exception as error:
            why = f"{internal_error(error, 'opening it')}; {PLEASE_REPORT}"
            fault = f"{purpose} cannot listen on {place}: {why}"
            if self._faults.get(place) != fault:
                log.warning("%s", fault, exc_info=error)
        else:
            return ""
        return fault

    async def _answer_once(self, request: web.BaseRequest) -> web.StreamResponse:
        async def once() -> web.StreamResponse:
            response: web.StreamResponse = web.Response(status=500, text="internal error; see vipd's log\n")
            with self._containment.contain("TCP", "answering"):
                try:
                    response = await self._answer(request)
                except web.HTTPException as refused:
                    return refused
                except ConnectionError:  # the client has disconnected
                    return response
            response.force_close()  # a kept connection would outlive its port
            return response

        return await self.connections.answer(request, once)

    def _listen(self, address: ListenAddress, server: web.Server) -> socket.socket:
        if len(self._open) >= self._max_open:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        listener = _bind(address)
        self.connections.listen(listener, server)
        return listener


def is_family_supported(family: Family) -> bool:
    """Whether this kernel supports the family at all."""
    try:
        socket.socket(_NUMBERS[family], socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


_NUMBERS = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


def _bind(address: ListenAddress) -> socket.socket:
    family = Family.IPV6 if ":" in address.address else Family.IPV4
    listener = socket.socket(_NUMBERS[family], socket.SOCK_STREAM)
    try:
        # Otherwise a port that had connections a moment ago, as when vipd restarts, is unavailable for a
        # minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is Family.IPV6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
