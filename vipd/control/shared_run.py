"""Does long work once for all that ask for its result at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from vipd.host.gc_control import return_freed_memory

T = TypeVar("T")

KEPT_SECONDS = 1.0
"""How long an answer is kept for others."""


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


class _Answer(NamedTuple):
    body: bytes
    revision: Hashable
    number: int
    until: float


class SharedAnswers:
    """Long answers about a state, made one at a time and shared: however many ask, and however slowly they
    read, there is one copy of each.

    An answer is of the state at the request or of a later one, as far as `revision` distinguishes states. All
    else in it is up to `KEPT_SECONDS` older than the request.
    """

    def __init__(self, revision: Callable[[], Hashable]) -> None:
        self._revision = revision
        self._answers: dict[Hashable, _Answer] = {}
        self._begun = 0
        """Answers whose making has begun."""
        self._making = asyncio.Lock()

    async def body(self, key: Hashable, make: Callable[[], Awaitable[bytes]], *, kept: bool = True) -> bytes:
        """The answer of this kind, of which there are few; `make` makes it. Without `kept` nothing in it is
        older than the request. Raises what `make` raises."""
        asked = self._begun
        if body := self._usable(key, asked, kept):
            return body
        async with self._making:
            return self._usable(key, asked, kept) or await self._made(key, make)

    def _usable(self, key: Hashable, asked: int, kept: bool) -> bytes:
        known = self._answers.get(key)
        if known is None:
            return b""
        now = asyncio.get_running_loop().time()
        current = kept and now < known.until and known.revision == self._revision()
        # What was begun after the request is as good as new, however long the making took.
        return known.body if current or known.number > asked else b""

    async def _made(self, key: Hashable, make: Callable[[], Awaitable[bytes]]) -> bytes:
        loop = asyncio.get_running_loop()
        self._begun += 1
        revision, number = self._revision(), self._begun
        body, before = await make(), self._answers.get(key)
        if before is not None and before.body == body:
            body = before.body  # slow readers may still hold that one
        self._answers[key] = _Answer(body, revision, number, loop.time() + KEPT_SECONDS)
        loop.call_later(KEPT_SECONDS, self._drop)
        return body

    def _drop(self) -> None:
        now = asyncio.get_running_loop().time()
        for key, answer in list(self._answers.items()):
            if answer.until <= now:
                del self._answers[key]
        if not self._answers:
            return_freed_memory()
