"""Accepts connections within limits, and closes those that wait longest if there are too many."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from aiohttp import web

from vipd.host.connections.connection import Connection
from vipd.host.connections.http import long_body, send_in_chunks
from vipd.host.connections.limits import ClientOf, ClientSource, ConnectionLimits, tcp_client

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that wait to be taken. They cost no descriptors, and beyond it the kernel drops those of every
client, who tries again after a second."""
WARN_SECONDS = 60.0
"""A refusal is logged no more often."""

_AT_ONCE = 16
_MOST_ENDING = 32
"""Closed connections whose descriptors are not free yet: they will be in the loop's next turn."""
_RETRY_SECONDS = 1.0
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Handler = Callable[[], Awaitable[web.StreamResponse]]
NewHandler = Callable[[], web.RequestHandler]
RejectResponse = Callable[[ClientSource, ConnectionLimits, bool], bytes]
"""The answer to a source whose connection is refused; True: because of its own connections."""


def no_response(source: ClientSource, limits: ConnectionLimits, own: bool) -> bytes:
    """The connection is closed without a word."""
    return b""


class Connections:
    """The connections of aiohttp servers, whose handlers must pass each request through `answer`.

    asyncio's own servers accept a connection, and so use a descriptor, before a limit can be checked.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        source_of: ClientOf = tcp_client,
        refusal: RejectResponse = no_response,
    ) -> None:
        self._limits, self._source_of, self._refusal = limits, source_of, refusal
        self._open: dict[web.RequestHandler, Connection] = {}
        self._listening: dict[socket.socket, NewHandler] = {}
        self._taking_turns: dict[ClientSource, deque[asyncio.Future[None]]] = {}
        """Those that wait for a turn, for each source that has had the present one."""
        self._ending = 0
        self._starting: set[asyncio.Task[object]] = set()
        self._warned = float("-inf")

    def __len__(self) -> int:
        return len(self._open)

    def listen(self, listener: socket.socket, new_handler: NewHandler) -> None:
        """Take the connections of a listening socket from now on."""
        self._listening[listener] = new_handler
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def stop_listening(self, listener: socket.socket) -> None:
        """Close a listening socket; its connections continue."""
        del self._listening[listener]
        asyncio.get_running_loop().remove_reader(listener.fileno())
        listener.close()

    def stop_listening_all(self) -> None:
        """Close every listening socket."""
        for listener in list(self._listening):
            self.stop_listening(listener)

    def end_all(self) -> None:
        """End every connection at once."""
        for connection in list(self._open.values()):
            connection.end()

    async def answer(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """The handler's answer; a long one is already sent."""
        connection = self._open.get(request.protocol)
        if connection is None:  # it has ended already
            return await handler()
        connection.begin(request)
        try:
            await self._next_turn(connection.client)
            response = await handler()
            body = long_body(response)
            if body is None:
                return response
            self._hold(request, body)
            with contextlib.suppress(ConnectionError):  # aiohttp detects this itself, and logs nothing
                return await send_in_chunks(
                    request, response, body, partial(self._next_turn, connection.client)
                )
            return response
        finally:
            connection.finish(request)

    async def _next_turn(self, source: ClientSource) -> None:
        """Of each source, with each turn of the event loop one request is begun, or some pieces are sent:
        many connections hold up others no more than one does."""
        waiting = self._taking_turns.get(source)
        if waiting is None:  # nobody of this source has had the present turn
            self._taking_turns[source] = deque()
            asyncio.get_running_loop().call_soon(self._pass_turn, source)
            return
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        await turn

    def _pass_turn(self, source: ClientSource) -> None:
        waiting = self._taking_turns[source]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # else its connection has ended
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_turn, source)
                return
        del self._taking_turns[source]

    def _hold(self, request: web.BaseRequest, body: bytes) -> None:
        """A long body is about to be sent to the connection of a request. Closes others that read nothing of
        theirs while all of them are too large together; one that many get is in memory once."""
        newest = self._open.get(request.protocol)
        if newest is None:
            return
        newest.unsent = body
        while self._unsent() > self._limits.unsent:
            if not _end_one(c for c in self._open.values() if c.unsent and c is not newest):
                break

    def _unsent(self) -> int:
        bodies = {id(connection.unsent): connection.unsent for connection in self._open.values()}
        return sum(map(len, bodies.values()))

    def ended(self, connection: Connection) -> None:
        """Called by a connection: it no longer counts."""
        del self._open[connection.handler]
        self._ending += 1

    def closed(self) -> None:
        """Called by a connection that has ended: its descriptor is free."""
        self._ending -= 1

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if self._ending >= _MOST_ENDING:
                return  # it is called again in the next turn
            try:
                taken, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._pause(listener, error)
                return  # otherwise it has already disconnected
            self._take(listener, taken, address)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """Takes nothing for a moment: the socket would be ready all the time."""
        loop = asyncio.get_running_loop()

        def resume() -> None:
            if listener in self._listening:
                loop.add_reader(listener.fileno(), self._accept, listener)

        loop.remove_reader(listener.fileno())
        loop.call_later(_RETRY_SECONDS, resume)
        self._warn("no connection can be taken: %s", error.strerror)

    def _take(self, listener: socket.socket, taken: socket.socket, address: object) -> None:
        try:
            taken.setblocking(False)
            source = self._source_of(taken, address)
        except OSError:
            taken.close()
            return
        if not self._has_room(source):
            self._refuse(taken, source)
            return
        handler = self._listening[listener]()
        made = self._open[handler] = Connection(self, self._limits, handler, source)
        task = asyncio.get_running_loop().create_task(_start(made, taken), name="take a connection")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def _has_room(self, source: ClientSource) -> bool:
        """Whether there is room for one more connection; makes room if necessary, at the cost of the source
        that has most of them."""
        everybody, limits = self._open.values(), self._limits
        mine = [c for c in everybody if c.client == source]
        alike = [c for c in everybody if c.client.privileged == source.privileged]
        if not source.privileged and len(mine) >= limits.per_client:
            return _end_one(mine)
        most = limits.privileged if source.privileged else limits.connections
        if len(alike) < most:
            return True
        counts = Counter(connection.client for connection in alike)
        largest = max(counts, key=lambda client: counts[client])
        return _end_one(c for c in alike if c.client == largest) or _end_one(alike)

    def _refuse(self, taken: socket.socket, source: ClientSource) -> None:
        own = sum(c.client == source for c in self._open.values()) >= self._limits.per_client
        self._warn("too many connections: further ones are refused, as one of %s is now", source)
        with taken, contextlib.suppress(OSError):
            if words := self._refusal(source, self._limits, own):
                taken.send(words, socket.MSG_NOSIGNAL)

    def _warn(self, text: str, *values: object) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            log.warning(text, *values)


async def _start(connection: Connection, taken: socket.socket) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, taken)
    except OSError as error:
        taken.close()
        connection.connection_lost(error)


def _end_one(connections: Iterable[Connection]) -> bool:
    """Closes the one that waits longest; False: none waits, as vipd works for all of them."""
    waiting = [(since, c) for c in connections if (since := c.waiting_since) is not None]
    if not waiting:
        return False
    min(waiting, key=lambda pair: pair[0])[1].end()
    return True
