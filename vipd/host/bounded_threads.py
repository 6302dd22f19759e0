"""Calls in a limited number of threads, for calls that may hang and cannot be ended: a file system, a name
service.

A call that hangs occupies its thread. Threads are daemons, so that a hanging one does not block the end of
the process, and a thread ends when no call is queued.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def started_threads(count: int) -> ThreadPoolExecutor:
    """An executor whose threads have all started.

    `Thread.start` waits until the new thread runs. A thread that gets no memory ends before that, and the
    caller waits for ever (CPython 3.11): on the event loop, that would stop the daemon.
    """
    executor = ThreadPoolExecutor(count, "vipd worker")
    all_run = threading.Barrier(count)
    for running in [executor.submit(all_run.wait) for _ in range(count)]:
        running.result()
    return executor


class BusyError(RuntimeError):
    """Every thread is busy."""


class BoundedThreads:
    """Runs calls in at most `max_threads` threads. May be used from any thread."""

    def __init__(self, name: str, max_threads: int) -> None:
        """`name` is that of each thread."""
        self._name, self._most, self._threads = name, max_threads, 0
        self._guard = threading.Lock()
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def submit(self, call: Callable[[], T], queue: bool = True) -> Future[T]:
        """A future for the result of a call, which can be cancelled until the call begins. If every thread is
        busy the call waits in a queue; without `queue`, BusyError is raised. Raises RuntimeError if there is
        no thread and none can be started.
        """
        entry = call, Future[T]()
        with self._guard:
            full = self._threads >= self._most
            if full and not queue:
                raise BusyError(f"{self._most} calls do not return")
            self._queue.append(entry)
            self._threads += not full
        if not full:
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError:
                with self._guard:
                    self._threads -= 1
                    if entry in self._queue and not (queue and self._threads):
                        self._queue.remove(entry)
                        raise
        return entry[1]

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._queue:
                    self._threads -= 1
                    return
                call, answer = self._queue.popleft()
            if not answer.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            # From here on a waiter that is cancelled leaves the future as it is: it can take the outcome.
            try:
                found = call()
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(found)
            del call, answer
