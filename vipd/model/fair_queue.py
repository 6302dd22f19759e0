"""Limits how many jobs of a kind run at once: checks, programs of checks, lookups of names.

Each author of services has a share of the slots, and jobs that timed out the last time must leave some to the
others. Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

SHARE = 2
"""An author takes at most one of so many slots that the others leave. So whoever comes finds free ones,
however many jobs of others run, and for how long."""
MAX_SLOW_SHARE = (3, 4)
"""Part of a share for jobs that timed out the last time: the rest is for those that answer."""

LATE_SECONDS = 1.0
"""Longer waits are reported."""


class QueuedJob(Protocol):
    """A job that is due."""

    due: float
    gone: bool
    """It is not to run any more."""
    slow: bool
    """Its last run took all the time that it has."""


class _Queues(NamedTuple):
    """The jobs of one author that wait."""

    ready: deque[QueuedJob]
    slow: deque[QueuedJob]


@dataclass(slots=True)
class FairQueue:
    """The slots for one kind of jobs."""

    what: str
    """Kind of its jobs, in the plural."""
    limit: int
    hint: str = "raise LimitNOFILE of the unit, or use longer intervals"
    running: int = 0
    waiting: int = 0
    """Jobs that wait for a slot."""
    _running: Counter[str] = field(default_factory=Counter)
    """Running jobs by author."""
    _slow: Counter[str] = field(default_factory=Counter)
    """Those of them that timed out the last time."""
    _queues: OrderedDict[str, _Queues] = field(default_factory=OrderedDict)
    """By author, for those with jobs that wait. They take turns in this order."""

    def wait(self, job: QueuedJob, authors: Collection[str]) -> str:
        """It waits for its turn. Of the authors whose services use it, it goes into the share of the one with
        the least to do, which is returned."""
        author = min(authors, key=self._load, default="")
        queues = self._queues.setdefault(author, _Queues(deque(), deque()))
        (queues.slow if job.slow else queues.ready).append(job)
        self.waiting += 1
        return author

    def next(self) -> QueuedJob | None:
        """The job that may run now, removed from the queue; None if there is none, or no slot."""
        free = self.limit - self.running
        for author in tuple(self._queues) if free > 0 else ():  # an empty one is deleted
            share, slow_share = self._shares(author)
            if self._running[author] >= share:
                continue
            with_slow = self._slow[author] < slow_share
            heads = [head for head in self._heads(author) if with_slow or not head.slow]
            if heads:
                return self._begin(author, min(heads, key=lambda head: head.due))
            if not any(self._queues[author]):
                del self._queues[author]
        return None

    def ended(self, author: str, slow: bool) -> None:
        """A job of an author has ended. `slow`: its value when it began."""
        self.running -= 1
        for counter, one in ((self._running, 1), (self._slow, int(slow))):
            counter[author] -= one
            if not counter[author]:
                del counter[author]

    def warning(self, now: float) -> str:
        """Reports that jobs wait for others to end, with numbers; empty while none waits for long."""
        late = {
            author: now - min(head.due for head in heads)
            for author in self._queues
            if (heads := list(self._heads(author)))
        }
        author = max(late, key=lambda each: late[each], default="")
        if late.get(author, 0.0) <= LATE_SECONDS:
            return ""
        queues, (share, _) = self._queues[author], self._shares(author)
        hung_before = f"{self._slow[author]} of which hung before"
        room = f"{share} {self.what} at once are all there is room for, {hung_before}"
        waiting = len(queues.ready) + len(queues.slow)
        whose = f" of {author}" if author else ""
        hung = f", {len(queues.slow)} of them since they hung the last time" if queues.slow else ""
        return f"{room}: {waiting}{whose} wait{hung}, up to {late[author]:.0f} s late; hint: {self.hint}"

    def _shares(self, author: str) -> tuple[int, int]:
        """How many jobs of an author may run, and how many of those that timed out the last time."""
        part, whole = MAX_SLOW_SHARE
        share = max(1, (self.limit - self.running + self._running[author]) // SHARE)
        return share, max(1, share * part // whole)

    def _begin(self, author: str, job: QueuedJob) -> QueuedJob:
        queues = self._queues[author]
        (queues.slow if job.slow else queues.ready).popleft()
        self._queues.move_to_end(author)
        self._running[author] += 1
        self.running += 1
        self.waiting -= 1
        self._slow[author] += job.slow
        return job

    def _heads(self, author: str) -> Iterator[QueuedJob]:
        """Of each of an author's queues the job that waits longest and must still run."""
        for queue in self._queues[author]:
            while queue and queue[0].gone:
                queue.popleft()
                self.waiting -= 1
            if queue:
                yield queue[0]

    def _load(self, author: str) -> int:
        queues = self._queues.get(author)
        return self._running[author] + (len(queues.ready) + len(queues.slow) if queues else 0)
