"""A stream of disturbances from one or several watchers, each a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self

from vipd.dataplane.iptables.watch.disturbance import Disturbance


class Watcher(Protocol):
    """Reports what it sees until it is cancelled."""

    def close(self) -> None:
        """Give back what it holds."""

    async def run(self, report: Callable[[Disturbance], None]) -> None:
        """Ends only by a fault."""


class Disturbances:
    """Watches from entry to exit: `async with ... as watch: async for disturbance in watch`.

    Disturbances that nobody has taken yet are kept. Whoever iterates gets the fault of a watcher, too.
    """

    def __init__(self) -> None:
        self._found: asyncio.Queue[Disturbance | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    def _begin(self) -> None:
        """Start the watchers. May raise OSError."""
        raise AssertionError("each kind of watch has its own")

    def _start(self, watcher: Watcher, name: str) -> None:
        self._stack.callback(watcher.close)
        task = asyncio.create_task(watcher.run(self._found.put_nowait), name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A watcher ends only by a fault; whoever iterates learns of it, also of one that just stopped."""
        error = None if task.cancelled() else task.exception()
        self._found.put_nowait(error or OSError(f"{task.get_name()}: it has ended"))

    async def __aenter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Disturbance:
        found = await self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found
