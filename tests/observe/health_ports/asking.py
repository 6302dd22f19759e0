"""HTTP towards a TCP place, as a load balancer's health check asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from tests.lab.held_ports import hold
from vipd.observe.listeners import ListenAddress, Listeners

PATIENCE_SECONDS = 60.0
_HELD = contextlib.ExitStack()


class Reply(NamedTuple):
    """Status, headers in lower case, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        """The decoded body."""
        value: dict[str, object] = json.loads(self.body)
        return value


async def ask(place: ListenAddress, path: str = "/", method: str = "GET") -> Reply:
    """One request over a connection of its own, read to its end. Raises OSError when nobody listens."""
    reader, writer = await asyncio.open_connection(*place)
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)).partition(b"\r\n\r\n")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Reply(int(first.split()[1]), headers, body)


async def refused(place: ListenAddress) -> bool:
    """Whether nobody listens there."""
    try:
        await ask(place)
    except ConnectionRefusedError:
        return True
    return False


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


def free_port() -> int:
    """A TCP port where nobody listens but who is told of it; held until this process ends."""
    return hold(_HELD)


def taken(place: ListenAddress) -> socket.socket:
    """A socket that listens there; close it after use."""
    sock = socket.socket(socket.AF_INET6 if ":" in place.address else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if ":" in place.address:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind(place)
    sock.listen(1)
    return sock
