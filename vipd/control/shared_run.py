"""Runs a long task once for all concurrent callers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedRun(Generic[T]):
    """Runs it at most once at a time. Callers that arrive during a run share the next one, so that a result
    is never older than its request."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Returns or raises the outcome of a run that begins after this call. Cancelling this call ends no
        run."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running), name="shared run")
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[T] | None) -> T:
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._work()
