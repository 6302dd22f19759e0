"""An event loop with a simulated clock: when every task waits, the clock jumps to the next deadline.

For code that waits for time alone, for sockets of this process, or for threads of the loop's executor, while
which no time passes. Such a test does not depend on the machine's load and takes only as long as its
computation.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its clock starts at second 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.threads = 0
        """Calls in threads that are under way."""
        super().__init__(_Leaping(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """As the real one; the clock stands still until the call has returned."""
        future = super().run_in_executor(executor, func, *args)
        self.threads += 1
        future.add_done_callback(self._returned)
        return future

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        """As the real one, which waits for a thread."""
        self.threads += 1
        await super().shutdown_default_executor(*arguments)

    def _returned(self, _: object) -> None:
        self.threads -= 1


class _Leaping(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._loop.threads:
            return super().select(timeout if timeout == 0 else None)
        assert timeout is not None, "nothing is left to wait for"
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready:
            self._loop.now += max(timeout, 0.0)
        return ready


def simulate(coroutine: Coroutine[object, object, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)


def pass_over(seconds: float) -> None:
    """Advance the running loop's clock, as if a callback had blocked it for `seconds`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    loop.now += seconds
