"""Real servers on loopback that behave in many ways, and one check of a backend there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

from tests.lab.inside import Verdict, declare, probed
from vipd.model.service import Service

PATIENCE = 120.0
"""Seconds after which a test gives up on a noisy machine."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def checked(
    type_: str, port: int = 80, address: str = "127.0.0.1", author: str = "a", **keys: Any
) -> Service:
    """An author's service of one backend with this check, which has a minute for its answer unless `keys`
    says less."""
    check = {"type": type_, "interval": "120s", "timeout": "60s", **keys}
    service = {
        "name": "checked",
        "address": "10.96.0.1",
        "ports": [{"port": 80, "protocol": "udp" if type_ in ("udp", "dns") else "tcp"}],
        "backends": [f"192.0.2.1:{port}"],
        "check": check,
    }
    text = json.dumps({"apiVersion": "vipd/v1", "services": [service]})
    declared = declare(text, f"/etc/vipd/services.d/{author}.yaml")
    assert not declared.problems, declared.problems
    (service_,) = declared.services
    (backend,) = service_.backends
    # None can be declared on loopback.
    return replace(service_, backends=(replace(backend, address=address),))


def verdict(type_: str, port: int = 80, address: str = "127.0.0.1", **keys: Any) -> Verdict:
    """What one check with these keys finds."""
    return probed(checked(type_, port, address, **keys))[0]


def healthy_and_reason(
    type_: str, port: int = 80, address: str = "127.0.0.1", **keys: Any
) -> tuple[bool | None, str]:
    return verdict(type_, port, address, **keys)[:2]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of a thread in which servers run beside the test."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="servers").start()
    return loop


@contextlib.contextmanager
def beside(server: contextlib.AbstractAsyncContextManager[int]) -> Iterator[int]:
    """The port of a server that runs in a thread of its own."""
    port = asyncio.run_coroutine_threadsafe(server.__aenter__(), _loop()).result(PATIENCE)
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), _loop()).result(PATIENCE)


def answers(*pieces: bytes, close: bool = False) -> Handler:
    """Reads a request, and answers with these bytes, some time between them; it stays connected unless it
    shall close."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for number, piece in enumerate(pieces):
            await asyncio.sleep(0.02 if number else 0)
            writer.write(piece)
            await writer.drain()
        if close:
            writer.close()
            await writer.wait_closed()
        else:
            await asyncio.sleep(300)

    return handle


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts a connection, and says nothing."""
    await asyncio.sleep(300)


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


class Case(NamedTuple):
    """A server, a check of it, and what a user sees."""

    handler: Handler
    seen: str
    """`good`, or `bad: ` or `not asked: ` and the reason, of which `…` at the end leaves the rest open."""
    keys: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    tls: ssl.SSLContext | None = None


def differing(cases: Mapping[str, Case], *, worker: bool = False, **keys: Any) -> dict[str, str]:
    """What is seen of the cases in which it is another than it should be, all asked at the same time; by
    TCP, or by HTTP with `keys`."""
    with contextlib.ExitStack() as stack:
        services = []
        for case in cases.values():
            port = stack.enter_context(beside(tcp_server(case.handler, case.tls)))
            services.append(checked(port=port, **{"type_": "http", **keys, **case.keys}))
        verdicts = probed(*services, worker=worker)
    shown = {name: seen(verdict) for name, verdict in zip(cases, verdicts, strict=True)}
    return {name: text for name, text in shown.items() if not as_wanted(text, cases[name].seen)}


def seen(verdict: Verdict) -> str:
    """A verdict in the words of a `Case`."""
    if verdict.healthy:
        return "good"
    return f"{'bad' if verdict.healthy is False else 'not asked'}: {verdict.reason}"


def as_wanted(text: str, wanted: str) -> bool:
    return text.startswith(wanted[:-1]) if wanted.endswith("…") else text == wanted
