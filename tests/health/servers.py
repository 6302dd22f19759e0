"""Real servers on loopback that behave in many ways, and one question to a target."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import TypeVar, cast

from vipd.health.lag import LoopLag
from vipd.health.probes.base import CoroutineProber, ProbeFunction, Prober
from vipd.health.result import ProbeResult
from vipd.model.check import Probe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

RESET = struct.pack("ii", 1, 0)
PATIENCE = 120.0
"""Seconds after which a test gives up on a noisy machine."""

T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def good_and_reason(result: ProbeResult) -> tuple[bool | None, str]:
    """What a test of a probe compares."""
    return result.good, result.reason


def run(coroutine: Coroutine[object, object, T]) -> T:
    """The coroutine's result, in time."""

    async def limited() -> T:
        async with asyncio.timeout(PATIENCE):
            return await coroutine

    return asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what has no event of its own."""
    while not condition():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.01)


def target(port: int, probe: Probe, timeout: float = 60.0, address: str = "127.0.0.1") -> CheckTarget:
    """Something to ask once."""
    return CheckTarget(address, port, Protocol.TCP, probe, Timing(interval=PATIENCE, timeout=timeout))


async def answer(prober: Prober, asked: CheckTarget) -> ProbeResult:
    """What one question finds."""
    future: asyncio.Future[ProbeResult] = asyncio.get_running_loop().create_future()
    prober.start(asked, future.set_result)
    return await future


async def ask_once(ask: ProbeFunction, asked: CheckTarget) -> ProbeResult:
    """What a probing coroutine finds."""
    return await answer(CoroutineProber(ask, LoopLag(asyncio.get_running_loop())), asked)


@contextlib.asynccontextmanager
async def tcp_server(
    handler: Handler, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """Its port. What the handler does not close is cut at the end."""
    tasks: set[asyncio.Task[object]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(handle, address, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.sleep(0.01)
        for _ in range(20):  # each end of a connection, TLS's too, has its turns to hear of the other's
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def udp_server(reply: Callable[[bytes], list[bytes]]) -> AsyncIterator[int]:
    """Its port. Each datagram is answered by these."""

    class Server(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast("asyncio.DatagramTransport", transport)

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            for datagram in reply(data):
                self.transport.sendto(datagram, addr)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Server, local_addr=("127.0.0.1", 0))
    try:
        yield transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


@contextlib.contextmanager
def closed_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[int]:
    """A port that nobody listens on, and that nobody else gets meanwhile."""
    with socket.socket(socket.AF_INET, kind) as held:
        held.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_DGRAM:  # else it would take datagrams of others than this one
            held.connect(("127.0.0.1", 1))
        yield held.getsockname()[1]


@contextlib.contextmanager
def full_backlog() -> Iterator[int]:
    """The port of a program that accepts nothing any more: the kernel answers no further SYN."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        yield port
