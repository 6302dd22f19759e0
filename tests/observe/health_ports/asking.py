"""Listeners at work, and ports for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from tests.lab.held_ports import hold
from vipd.observe.listeners import Listeners

PATIENCE_SECONDS = 60.0
_HELD = contextlib.ExitStack()


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
