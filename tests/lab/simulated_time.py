"""An event loop with a simulated clock: when every task waits, the clock jumps to the next deadline.

For code that only waits for time. Such a test does not depend on the machine's load and takes only as long as
its computation.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its clock starts at second 0."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Leaping(self))

    def time(self) -> float:
        """Simulated seconds so far."""
        return self.now


class _Leaping(selectors.DefaultSelector):
    """Advances the clock instead of waiting."""

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
    """Run a coroutine in simulated time; returns its result."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)


def pass_over(seconds: float) -> None:
    """Advance the running loop's clock, as if a callback had blocked it for `seconds`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    loop.now += seconds
