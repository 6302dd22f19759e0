"""Clients that keep to no manners, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence

from aiohttp import web

from tests.observe.health_ports.asking import free_port, running, until
from vipd.host.connections.limits import ConnectionLimits
from vipd.observe.listeners import ListenAddress, Listeners

PATIENCE_SECONDS = 60.0
AN_HOUR = 3600.0
GENEROUS = ConnectionLimits(
    connections=1000,
    per_client=1000,
    head_seconds=AN_HOUR,
    body_seconds=AN_HOUR,
    send_seconds=AN_HOUR,
    life_seconds=AN_HOUR,
)
"""Nothing ends by itself: a test shortens what it is about."""
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = b"x" * (8 * 1024 * 1024)
"""More than a socket's buffers hold."""


async def answer(request: web.BaseRequest) -> web.Response:
    """`hello`, a large body at /large, the same for all at /shared; /echo reads the request first."""
    if request.path == "/large":
        return web.Response(body=bytes(bytearray(LARGE)))
    if request.path == "/shared":
        return web.Response(body=LARGE)
    if request.path == "/echo":
        return web.Response(body=await request.read())
    return web.Response(text="hello")


Story = Callable[[ListenAddress, Listeners], Awaitable[None]]


def served(story: Story, limits: ConnectionLimits, address: str = "127.0.0.1") -> None:
    """Run a story beside listeners with these limits."""

    async def run() -> None:
        place = ListenAddress(address, free_port())
        listeners = Listeners(answer, limits)
        async with running(listeners):
            listeners.set_addresses({place: "x"})
            await until(lambda: listeners.open, "open")
            await story(place, listeners)

    asyncio.run(asyncio.wait_for(run(), 3 * PATIENCE_SECONDS))


class Client:
    """A socket, to be used as a context manager."""

    def __init__(self, place: ListenAddress, source: str = "", room: int = 0) -> None:
        self._place = place
        self.socket = socket.socket(socket.AF_INET6 if ":" in place.address else socket.AF_INET)
        self.socket.setblocking(False)
        if room:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        if source:
            self.socket.bind((source, 0))

    async def connect(self, *sent: bytes) -> Client:
        """Connect, and send."""
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.sock_connect(self.socket, self._place), PATIENCE_SECONDS)
        for data in sent:
            await self.send(data)
        return self

    async def send(self, data: bytes) -> None:
        """Send all of it. Raises OSError."""
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self.socket, data), PATIENCE_SECONDS)

    async def rest(self) -> bytes:
        """What comes until the connection ends, or is reset."""
        pieces, loop = [], asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.wait_for(loop.sock_recv(self.socket, 1 << 20), PATIENCE_SECONDS):
                pieces.append(piece)
        return b"".join(pieces)

    def ended(self) -> bool:
        """Whether the other side has ended it; what has come is lost."""
        return has_ended(self.socket)


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has ended a connection; what has come is lost."""
    try:
        while connection.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@contextlib.contextmanager
def closing() -> Iterator[list[Client]]:
    """A list of clients, all of which are closed in the end."""
    clients: list[Client] = []
    try:
        yield clients
    finally:
        for client in clients:
            client.socket.close()


async def crowd(
    clients: list[Client], place: ListenAddress, count: int, *sent: bytes, source: str = ""
) -> None:
    """So many more clients, connected one after the other, that send this and no more."""
    for _ in range(count):
        client = Client(place, source, room=1)
        clients.append(client)
        await client.connect(*sent)
        await asyncio.sleep(0.002)  # the order in which they wait


async def status(place: ListenAddress, source: str = "", path: str = "/") -> int:
    """Of one good request over a connection of its own; 0: there was no answer."""
    client = Client(place, source)
    try:
        await client.connect(REQUEST.replace(b"/ ", f"{path} ".encode(), 1))
        head = (await client.rest()).partition(b"\r\n")[0].split()
    except OSError:
        return 0
    finally:
        client.socket.close()
    return int(head[1]) if len(head) > 1 else 0


def ended(clients: Sequence[Client]) -> int:
    """How many of them the server has ended."""
    return sum(client.ended() for client in clients)
