"""An event loop whose clock is not the machine's: where all wait for a moment, that moment has come.

For what does nothing but wait. A busy machine makes no difference there, and a test takes only as long as its
work.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Begins at second 0."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Leaping(self))

    def time(self) -> float:
        """Seconds that have been waited."""
        return self.now


class _Leaping(selectors.DefaultSelector):
    """Passes time on instead of waiting."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left to wait for"
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready:
            self._loop.now += max(timeout, 0.0)
        return ready


def simulate(coroutine: Coroutine[object, object, T]) -> T:
    """The coroutine's result, at once."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)


def pass_over(seconds: float) -> None:
    """The running loop stands still for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    loop.now += seconds
