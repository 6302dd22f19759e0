"""Reads files that users name, in threads: a read that hangs blocks nothing else.

Such a file may be on a file system that hangs. The call then occupies one thread; no second one is started
for the same file meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from vipd.host.bounded_threads import BoundedThreads

CALL_TIMEOUT_SECONDS = 2.0
MAX_THREADS = 16

T = TypeVar("T")


class FileCalls:
    """Runs calls, for any event loop."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._threads = BoundedThreads("vipd file", max_threads)
        self._guard = threading.Lock()
        self._under_way: dict[Hashable, Future[Any]] = {}

    async def run(self, about: Hashable, call: Callable[[], T]) -> T:
        """Returns or raises the outcome of a call. Concurrent calls `about` the same thing share it.

        Raises TimeoutError if there is none in time.
        """
        answer: Future[T] = self._begin(about, call)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
                # Shielded: others may wait for the same answer.
                return await asyncio.shield(asyncio.wrap_future(answer))
        except TimeoutError:
            if answer.done() and isinstance(answer.exception(), TimeoutError):
                raise
            what = f"it could not be read within {CALL_TIMEOUT_SECONDS:g} s: its file system hangs"
            raise TimeoutError(0, what) from None

    def _begin(self, about: Hashable, call: Callable[[], T]) -> Future[T]:
        with self._guard:
            known = self._under_way.get(about)
            if known is not None and not known.done():
                return known
            answer = self._under_way[about] = self._threads.submit(call)
        answer.add_done_callback(lambda done: self._ended(about, done))
        return answer

    def _ended(self, about: Hashable, answer: Future[Any]) -> None:
        with self._guard:
            if self._under_way.get(about) is answer:
                del self._under_way[about]


file_calls = FileCalls()
