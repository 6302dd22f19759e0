"""Measures stalls of the event loop: an answer that arrives during a stall must not count as missing."""

from __future__ import annotations

import asyncio

BEAT_SECONDS = 0.1
NORMAL_LATENESS_SECONDS = 0.05
"""Normal lateness of a timer on a busy machine."""


class LoopLag:
    """Runs a timer while started, and adds up its delays."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.stalled = 0.0
        """Seconds in all; compare two readings."""

    def start(self) -> None:
        """Start the timer, unless it runs."""
        if self._timer is None:
            self._next()

    def stop(self) -> None:
        """Beat no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reading(self) -> float:
        """`stalled`, with the stall that may just have ended."""
        late = self._loop.time() - self._due if self._timer is not None else 0.0
        return self.stalled + (late if late > NORMAL_LATENESS_SECONDS else 0.0)

    def _beat(self) -> None:
        self.stalled = self.reading()
        self._next()

    def _next(self) -> None:
        self._due = self._loop.time() + BEAT_SECONDS
        self._timer = self._loop.call_at(self._due, self._beat)
