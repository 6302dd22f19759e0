"""Limits how many checks run at once: those that run a program have separate slots, and those that timed out
the last time must leave some to the others. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

MAX_SLOW_SHARE = (3, 4)
"""Part of the slots for checks that timed out the last time: the rest is for those that answer."""

LATE_SECONDS = 1.0
"""Longer waits are reported."""


class QueuedProbe(Protocol):
    """A check that is due."""

    due: float
    gone: bool
    """It is not to run any more."""
    slow: bool
    """Its last run took all the time that it has."""


@dataclass(slots=True)
class ProbeSlots:
    """The places of some types of checks."""

    what: str
    """Kind of its checks, in the plural."""
    limit: int
    hint: str = "raise LimitNOFILE of the unit, or use longer intervals"
    running: int = 0
    slow: int = 0
    """Running checks that timed out the last time."""
    _ready: deque[QueuedProbe] = field(default_factory=deque)
    _slow: deque[QueuedProbe] = field(default_factory=deque)

    def wait(self, job: QueuedProbe) -> None:
        """It waits for its turn."""
        (self._slow if job.slow else self._ready).append(job)

    def next(self) -> QueuedProbe | None:
        """The check that may run now, removed from the queue; None if there is none, or no slot."""
        part, whole = MAX_SLOW_SHARE
        queues = [queue for queue in (self._ready, self._slow) if _head(queue) is not None]
        if self.slow >= max(1, self.limit * part // whole):
            queues = [queue for queue in queues if queue is not self._slow]
        if not queues or self.running >= self.limit:
            return None
        job = min(queues, key=lambda queue: queue[0].due).popleft()
        self.running += 1
        self.slow += job.slow
        return job

    def ended(self, slow: bool) -> None:
        """A check has ended; `slow`: its value when it began."""
        self.running -= 1
        self.slow -= slow

    @property
    def waiting(self) -> int:
        """Number of checks that wait for a slot."""
        return len(self._ready) + len(self._slow)

    def warning(self, now: float) -> str:
        """Reports that checks wait for others to end, with numbers; empty while none waits for long."""
        heads = [head for queue in (self._ready, self._slow) if (head := _head(queue))]
        late = max((now - head.due for head in heads), default=0.0)
        if late <= LATE_SECONDS:
            return ""
        hung = f", {len(self._slow)} of them since they hung the last time" if self._slow else ""
        what = f"{self.limit} {self.what} at once are all there is room for, {self.slow} of which hung before"
        return f"{what}: {self.waiting} wait{hung}, up to {late:.0f} s late; hint: {self.hint}"


def _head(queue: deque[QueuedProbe]) -> QueuedProbe | None:
    """The check that waits longest and must still run."""
    while queue and queue[0].gone:
        queue.popleft()
    return queue[0] if queue else None
