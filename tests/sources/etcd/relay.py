"""A TCP relay before a server, which can be cut, or let watches fall silent without ending them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from tests.lab.held_ports import held_ports

T = TypeVar("T")


class Relay:
    """Listens on a loopback port, which is held for it, and passes bytes on to another one."""

    def __init__(self, port: int, to: int) -> None:
        self.to = to
        """Where connections lead; may be changed while it is cut."""
        self._port = port
        self._server: asyncio.Server | None = None
        self._passing: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._silent: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def cut(self) -> None:
        """End every connection, take no new one."""
        if self._server is not None:
            # A server that closes while it accepts leaves that connection open: it stops accepting first.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(3):
                await asyncio.sleep(0)
            self._server.close()
        for task in list(self._passing):
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def silence(self) -> None:
        """The watches that are open stay open and carry nothing more; everything else works."""
        self._silent.update(self._watches)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function: a coroutine cancelled before its first step would leave the connection open.
        task = asyncio.create_task(self._pass(reader, writer))
        self._passing[task] = [writer]
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        for writer in self._passing.pop(task):
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.to)
            self._passing[task].append(far_writer)
            await asyncio.gather(self._pump(task, reader, far_writer), self._pump(task, far_reader, writer))

    async def _pump(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            if data.startswith(b"POST /v3/watch"):
                self._watches.add(task)
            if task not in self._silent:
                writer.write(data)
                await writer.drain()
        raise ConnectionResetError


class Cable:
    """A relay in a thread of its own, for tests whose event loop is vipd's."""

    def __init__(self, made: Relay, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.url, self._relay, self._run = made.url, made, run

    def cut(self) -> None:
        """End every connection, take no new one."""
        self._run(self._relay.cut())

    def open(self, to: str = "") -> None:
        """Take connections again; they lead to the server of another URL, if one is named."""
        if to:
            self._relay.to = _port(to)
        self._run(self._relay.open())

    def silence(self) -> None:
        """The watches that are open stay open and carry nothing more; everything else works."""
        self._relay.silence()


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextmanager
def beside() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """An event loop in another thread; yields what runs a coroutine there to its end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_all() -> None:
    """End what still runs in this loop."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A connection that was being accepted meanwhile has a task of its own now.
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # what was aborted closes


@contextmanager
def relay(url: str) -> Iterator[Cable]:
    """A relay before the server of a URL."""
    with held_ports(1) as (port,), beside() as run:
        made = Relay(port, _port(url))
        run(made.open())
        try:
            yield Cable(made, run)
        finally:
            run(made.cut())
