"""Calls in a limited number of threads, and waiters that go away."""

from __future__ import annotations

import asyncio
import threading

import pytest

from vipd.host.bounded_threads import BoundedThreads

PATIENCE = 60.0


@pytest.mark.parametrize("when", ["in the queue", "while it runs"])
def test_a_cancelled_waiter_costs_no_thread(when: str) -> None:
    threads, begun, free = BoundedThreads("test", 2), threading.Event(), threading.Event()
    made = list[int]()

    def hangs() -> None:
        begun.set()
        free.wait(PATIENCE)

    async def scene() -> list[int]:
        running = [asyncio.wrap_future(threads.submit(hangs)) for _ in range(2)]
        await asyncio.to_thread(begun.wait, PATIENCE)
        queued = [asyncio.wrap_future(threads.submit(lambda: made.append(1))) for _ in range(4)]
        for waiter in queued if when == "in the queue" else running:
            waiter.cancel()
        await asyncio.sleep(0)  # the loop tells the threads
        free.set()
        later = [asyncio.wrap_future(threads.submit(lambda n=n: n)) for n in range(20)]  # type: ignore[misc]
        async with asyncio.timeout(PATIENCE):
            return [await each for each in later]

    assert asyncio.run(scene()) == list(range(20))
    assert len(made) == (0 if when == "in the queue" else 4)


def test_threads_that_end_leave_their_places_to_others() -> None:
    """As many cancelled waiters as there are threads, again and again: none is lost."""
    threads = BoundedThreads("test", 1)
    for _ in range(3):
        begun, free = threading.Event(), threading.Event()

        def hangs(begun: threading.Event = begun, free: threading.Event = free) -> None:
            begun.set()
            free.wait(PATIENCE)

        answer = threads.submit(hangs)
        assert begun.wait(PATIENCE)
        answer.cancel()
        free.set()
        assert threads.submit(lambda: 7).result(PATIENCE) == 7
