"""Clients over TCP that never send, never end, never read, or are too many: what each may cost."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Self

import pytest
from aiohttp import web

from tests.lab.held_ports import hold
from vipd.api.socket_server import LIMITS as API
from vipd.host.connections.limits import WANTED_CONNECTIONS, ClientSource, ConnectionLimits, tcp_client
from vipd.host.descriptors import RESERVED, WANTED_DESCRIPTORS, divide_limit
from vipd.observe.listeners import HEALTH_LIMITS, ListenAddress, Listeners
from vipd.observe.metrics.scrape import LIMITS as METRICS
from vipd.observe.page.server import LIMITS as PAGE

PATIENCE_SECONDS = 60.0
_HELD = contextlib.ExitStack()
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


async def until(question: Callable[[], object], what: str) -> None:
    """Return once the question is answered by something true; AssertionError after a while."""
    end = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while not question():
        assert asyncio.get_running_loop().time() < end, f"not within {PATIENCE_SECONDS:.0f} s: {what}"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(listeners: Listeners) -> AsyncIterator[None]:
    """The listeners at work, which must not have ended by themselves."""
    task = asyncio.create_task(listeners.run())
    try:
        yield
        assert not task.done(), "the listeners have ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


Story = Callable[[ListenAddress, Listeners], Awaitable[None]]


def served(story: Story, limits: ConnectionLimits, address: str = "127.0.0.1") -> None:

    async def run() -> None:
        place = ListenAddress(address, hold(_HELD))
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def connect(self, *sent: bytes) -> Client:
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
        try:
            while self.socket.recv(1 << 20):
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
    head: list[bytes] = []
    with Client(place, source) as client, contextlib.suppress(OSError):
        await client.connect(REQUEST.replace(b"/ ", f"{path} ".encode(), 1))
        head = (await client.rest()).partition(b"\r\n")[0].split()
    return int(head[1]) if len(head) > 1 else 0


def ended(clients: Sequence[Client]) -> int:
    """How many of them the server has ended."""
    return sum(client.ended() for client in clients)


SOON = 0.3
HEAD, CHUNKED = b"GET /echo HTTP/1.1\r\nHost: x\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
TO_LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"


HEADS = {
    "nothing": b"",
    "a word": b"GET ",
    "no end": REQUEST[:-2],
    "a long line": REQUEST[:-2] + b"X: " + b"y" * 5000,
}
TRICKLES = {
    "a head": (b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
    "a body": (HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
    "trailers": (HEAD + CHUNKED + b"0\r\n" + b"a: b\r\n" * 1000, b"a: b\r\n" * 10),
    "chunks": (HEAD + CHUNKED + b"1;" + b"x" * 5000, b"a: b\r\n" * 10),
}


def test_what_does_not_end_is_not_waited_for() -> None:
    """Whether nothing more comes, or something now and then."""

    async def story(place: ListenAddress, listeners: Listeners) -> None:
        with closing() as clients:
            for sent in HEADS.values():
                await crowd(clients, place, 3, sent)
            trickling = [await Client(place).connect(begin) for begin, _ in TRICKLES.values()]
            clients += trickling
            more = [more for _, more in TRICKLES.values()]
            await asyncio.gather(*map(trickle, trickling, more))
            await until(lambda: ended(clients) == len(clients), "all ended")
            await until(lambda: not len(listeners.connections), "none counted")

    served(story, GENEROUS._replace(head_seconds=SOON, body_seconds=SOON))


async def trickle(client: Client, data: bytes) -> None:
    """Send it again and again, until the connection is ended by the other side."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not client.ended():
                await client.send(data)
                await asyncio.sleep(SOON / 10)


def test_a_head_without_end_is_refused_before_it_takes_much_memory() -> None:
    async def story(place: ListenAddress, listeners: Listeners) -> None:
        with Client(place) as client:
            await client.connect(b"GET / HTTP/1.1\r\n")
            sent = 0
            with contextlib.suppress(ConnectionError):
                for number in range(100):
                    await client.send(b"a%d: " % number + b"y" * 7000 + b"\r\n")
                    sent += 7000
                    await asyncio.sleep(0.001)
            answer = await client.rest()
            assert b" 431 " in answer or sent < 300_000
            assert b" 200 " not in answer
            await until(lambda: not len(listeners.connections), "none counted")

    served(story, GENEROUS._replace(send_seconds=SOON))


def test_a_slow_reader_gets_its_answer() -> None:
    async def story(place: ListenAddress, _: Listeners) -> None:
        loop, got = asyncio.get_running_loop(), 0
        with Client(place) as client:
            await client.connect(TO_LARGE)
            while piece := await loop.sock_recv(client.socket, 1 << 18):
                got += len(piece)
                await asyncio.sleep(0.002)
        assert got > len(LARGE)

    served(story, GENEROUS._replace(send_seconds=5.0))


def test_the_one_that_waits_longest_gives_way_to_a_new_one() -> None:
    async def story(place: ListenAddress, listeners: Listeners) -> None:
        with closing() as clients:
            await crowd(clients, place, 8)
            await until(lambda: len(listeners.connections) == 8, "all taken")
            assert await status(place) == 200
            await until(clients[0].ended, "the oldest ended")
            assert ended(clients[1:]) == 0

    served(story, GENEROUS._replace(connections=8))


def test_where_all_is_taken_the_source_with_most_connections_gives_way() -> None:
    """Who has few keeps them, though they wait longest: another host's checks are not ended by a flood."""
    other = ListenAddress("::1", hold(_HELD))

    async def story(place: ListenAddress, listeners: Listeners) -> None:
        listeners.set_addresses({place: "x", other: "y"})
        await until(lambda: len(listeners.open) == 2, "both open")
        with closing() as few, closing() as many:
            await crowd(few, other, 2, b"GET / HTTP/1.1\r\n")
            await crowd(many, place, 20, b"GET / HTTP/1.1\r\n")
            await until(lambda: ended(many) == 14, "no more than there is room for")
            assert ended(few) == 0

    served(story, GENEROUS._replace(connections=8, per_client=8))


def test_who_is_answered_is_never_given_up_for_another() -> None:
    async def story(place: ListenAddress, listeners: Listeners) -> None:
        loop = asyncio.get_running_loop()
        with Client(place) as client:
            await client.connect(TO_LARGE)
            got = len(await loop.sock_recv(client.socket, 1 << 16))
            for _ in range(20):
                await status(place)
                got += len(await asyncio.wait_for(loop.sock_recv(client.socket, 1 << 16), 60))
            assert got > 1 << 16

    served(story, GENEROUS._replace(connections=2))


@pytest.mark.parametrize(("path", "unsent", "kept"), [("large", 3, 3), ("shared", 2, 10)])
def test_answers_that_nobody_takes_are_bounded_in_memory(path: str, unsent: int, kept: int) -> None:
    """One that many share counts once."""

    async def story(place: ListenAddress, listeners: Listeners) -> None:
        with closing() as clients:
            await crowd(clients, place, 10, TO_LARGE.replace(b"large", path.encode()))
            await until(lambda: len(listeners.connections) == kept, "as many as the memory is for")
            assert await status(place, path="/large") == 200

    served(story, GENEROUS._replace(unsent=unsent * len(LARGE)))


def test_no_version_is_told() -> None:
    async def story(place: ListenAddress, _: Listeners) -> None:
        for sent in (
            REQUEST,
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
        ):
            with Client(place) as client:
                await client.connect(sent)
                answer = (await client.rest()).lower()
            assert b"\r\nserver: vipd\r\n" in answer
            assert b"aiohttp" not in answer
            assert b"python" not in answer

    served(story, GENEROUS)


def test_what_is_no_request_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def story(place: ListenAddress, _: Listeners) -> None:
        for sent in (
            b"GET / HTTP/1.1\r\na b\r\n\r\n",
            b"\x16\x03\x01\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"GET / HTTP/1.1.1\r\n\r\n",
            b"GET / HTTP/a.b\r\n\r\n",
            b"GET / HTTPS/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            with Client(place) as client:
                await client.connect(sent)
                assert b" 400 " in await client.rest()

    served(story, GENEROUS)
    assert not [r for r in caplog.records if r.name.startswith(("aiohttp", "vipd.http"))]


@pytest.mark.parametrize(
    ("address", "key"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("127.0.0.1", 1), "127.0.0.0/8"),
        (("127.8.9.1", 1), "127.0.0.0/8"),
        (("2001:db8::1", 1, 0, 0), "2001:db8::/64"),
        (("2001:db8::2:0:0:9", 1, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (("::1", 1, 0, 0), "::1"),
    ],
)
def test_who_counts_as_one_source(address: tuple[object, ...], key: str) -> None:
    with socket.socket() as unused:
        assert tcp_client(unused, address) == ClientSource(key)


def test_all_listeners_together_want_what_is_shared_out_for_them() -> None:
    every = (HEALTH_LIMITS, HEALTH_LIMITS, METRICS, PAGE, API)
    assert (
        sum(each.connections + each.privileged for each in every)
        <= WANTED_CONNECTIONS
        <= divide_limit(WANTED_DESCRIPTORS).clients
    )
    for limit in (64, 256, 1024):
        room = divide_limit(limit)
        less = [each.within(room.clients) for each in every]
        assert all(1 < each.per_client <= each.connections for each in less)
        assert sum(each.connections + each.privileged for each in less) <= room.clients + 3 * len(every)


def test_limits_stay_where_there_is_room() -> None:
    limits = ConnectionLimits(512, 256, 1.0, 1.0, 1.0)
    assert limits.within(WANTED_CONNECTIONS) == limits
    assert limits.within(WANTED_CONNECTIONS // 2)[:2] == (256, 128)


def test_clients_and_probes_together_leave_enough_for_what_vipd_does_itself() -> None:
    for limit in (64, 256, 1024, 4096, WANTED_DESCRIPTORS, 65536, resource.RLIM_INFINITY):
        whole = WANTED_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, WANTED_DESCRIPTORS)
        assert min(divide_limit(limit)) >= 1
        assert sum(divide_limit(limit)) <= whole - min(RESERVED, whole // 4)
    assert divide_limit(WANTED_DESCRIPTORS) == (2048, 2048, WANTED_DESCRIPTORS - 256 - 4096)
    assert divide_limit(1024).probes == 512, "most are for health checks"
