"""Calls that read files which a user has named: in threads, and none is waited for longer than a moment.

Such a file may lie on a file system that hangs, and then the call cannot be ended. It keeps one thread; no
second one is begun for the same thing meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

PATIENCE_SECONDS = 2.0
MOST_THREADS = 16

T = TypeVar("T")


class FileCalls:
    """Runs calls for anybody, on any event loop."""

    def __init__(self, most_threads: int = MOST_THREADS) -> None:
        self._most_threads, self._threads = most_threads, 0
        self._guard = threading.Lock()
        self._under_way: dict[Hashable, Future[Any]] = {}
        self._queue: deque[tuple[Hashable, Callable[[], Any]]] = deque()

    async def run(self, about: Hashable, call: Callable[[], T]) -> T:
        """What a call returns or raises. Calls `about` the same thing that come meanwhile share its answer.

        Raises TimeoutError when there is none in time.
        """
        answer: Future[T] = self._begin(about, call)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                # Shielded: others may wait for the same answer.
                return await asyncio.shield(asyncio.wrap_future(answer))
        except TimeoutError:
            if answer.done() and isinstance(answer.exception(), TimeoutError):
                raise
            what = f"it could not be read within {PATIENCE_SECONDS:g} s: its file system hangs"
            raise TimeoutError(0, what) from None

    def _begin(self, about: Hashable, call: Callable[[], T]) -> Future[T]:
        with self._guard:
            if known := self._under_way.get(about):
                return known
            answer: Future[T] = Future()
            self._under_way[about] = answer
            self._queue.append((about, call))
            if self._threads < self._most_threads:
                self._threads += 1
                # A daemon thread: one that hangs must not hold up the end of the process.
                threading.Thread(target=self._work, name="vipd file", daemon=True).start()
        return answer

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._queue:
                    self._threads -= 1
                    return
                about, call = self._queue.popleft()
            found, failed = None, None
            try:
                found = call()
            except BaseException as error:
                failed = error
            with self._guard:
                answer = self._under_way.pop(about)
            if failed is None:
                answer.set_result(found)
            else:
                answer.set_exception(failed)


file_calls = FileCalls()
