"""Runs something that takes long once for all callers that ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedRun(Generic[T]):
    """Runs it at most once at a time. Whoever asks while it runs shares the next run with all others who do,
    so that its answer is never older than the question."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """What a run returns or raises that begins after this was called. To cancel this ends no run."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running), name="shared run")
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[T] | None) -> T:
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._work()
