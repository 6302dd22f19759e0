"""Schedules probes: each target has its own interval, spread evenly, and none waits for another while slots
are free (`vipd/model/fair_queue.py`).

A heap of due times and one timer. Probes that are due within some milliseconds of each other start together,
since a wakeup costs more than a probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import count
from typing import cast

from vipd.health.probes.base import Attempt, ProbeCallback, internal_error_result
from vipd.health.result import ProbeResult
from vipd.host.containment import log_once
from vipd.model.check_target import CheckTarget
from vipd.model.fair_queue import FairQueue

TOGETHER_SECONDS = 0.005
MAX_STARTS_PER_TURN = 64
"""Then other tasks of the loop run: after a stall thousands may be due."""
REST = 2
"""So many times as long as such a full turn took, the loop is left to others: checks that are due faster than
they can be started come late, and nothing else does."""

FIRST_SECONDS_EACH = 0.002
"""New targets are probed first within this many seconds times their number, and within their interval."""

SHORTEST_PART = 0.1
"""Shortest first pause as a part of the interval; it is random, so that targets added together spread."""


class _Job:
    """A target's place in the schedule."""

    __slots__ = (
        "attempt",
        "author",
        "began",
        "due",
        "gone",
        "overtaken",
        "rounds",
        "running",
        "slow",
        "target",
        "was_slow",
    )

    def __init__(self, target: CheckTarget, due: float) -> None:
        self.target, self.due = target, due
        self.attempt: Attempt | None = None
        self.running = self.gone = False
        self.overtaken = False
        """It was due again while it ran or waited."""
        self.rounds = 0
        self.began = 0.0
        self.author = ""
        """In whose share of the slots it waits or runs."""
        self.slow = self.was_slow = False
        """Whether its last run reached its timeout; and the run before."""


class Scheduler:
    """Probes targets at their times while it is started. `random` returns numbers from 0 up to 1."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ask: Callable[[CheckTarget, ProbeCallback], Attempt],
        answered: Callable[[CheckTarget, ProbeResult], None],
        random: Callable[[], float],
        slots: Mapping[str, FairQueue],
        authors_of: Callable[[CheckTarget], Collection[str]] = lambda _: (),
    ) -> None:
        """`slots` are the places of types of checks; those of "" are for all that are not named. `authors_of`
        returns the authors of the services that use a target."""
        self._loop, self._ask, self._answered = loop, ask, answered
        self._random, self._slots, self._authors_of = random, slots, authors_of
        self._jobs: dict[CheckTarget, _Job] = {}
        self._due: list[tuple[float, int, _Job]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None
        self.probes_started = 0
        """Probes that were started, ever."""

    @property
    def running(self) -> int:
        """Probes on their way."""
        return sum(slots.running for slots in self._slots.values())

    def warnings(self) -> list[str]:
        """Types of checks that are late because all their slots are taken."""
        now = self._loop.time()
        return [trouble for slots in self._slots.values() if (trouble := slots.warning(now))]

    def add(self, targets: Iterable[CheckTarget]) -> None:
        """Probe these too, soon."""
        added = [target for target in targets if target not in self._jobs]
        now, spread = self._loop.time(), FIRST_SECONDS_EACH * len(added)
        for target in added:
            delay = self._random() * min(spread, target.timing.interval)
            self._jobs[target] = job = _Job(target, now + delay)
            self._push(job)
        self._arm()

    def remove(self, target: CheckTarget) -> None:
        """Stop probing this one; the result of a running probe is not reported."""
        job = self._jobs.pop(target, None)
        if job is None:
            return
        job.gone = True
        if job.attempt is not None:
            attempt, job.attempt = job.attempt, None
            try:
                attempt.cancel()
            except Exception as error:
                log_once(error, f"ending a check of {target}")
        if job.running:
            self._ended(job)

    def stop(self) -> None:
        """Stop all probes."""
        for target in tuple(self._jobs):
            self.remove(target)
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._timer = self._turn = None

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._due and self._due[0][0] <= now + TOGETHER_SECONDS:
            job = heapq.heappop(self._due)[2]
            if job.gone:
                continue
            if job.running:
                job.overtaken = True
            else:
                self._wait(job)
        if self._turn is None:
            self._start_some()
        else:
            self._arm()

    def _start_some(self) -> None:
        self._turn = None
        began, left = self._loop.time(), MAX_STARTS_PER_TURN
        queues = list(self._slots.values())
        while left and queues:  # in turn: many checks of one type do not keep out those of another
            for slots in tuple(queues):
                if left and (job := slots.next()):
                    left -= 1
                    self._start(cast("_Job", job))
                else:
                    queues.remove(slots)
        if not left:
            self._rest(self._loop.time() - began)
        # Those that were started have new due times, and perhaps no others wait for the timer.
        self._arm()

    def _start(self, job: _Job) -> None:
        now = job.began = self._loop.time()
        job.was_slow = job.slow
        job.due = now + self._pause(job)
        job.rounds += 1
        self._push(job)
        job.running = True
        self.probes_started += 1
        done = partial(self._finished, job, job.rounds)
        try:
            attempt = self._ask(job.target, done)
        except Exception as error:
            done(internal_error_result(job.target, error))
            return
        if job.running:
            job.attempt = attempt

    def _pause(self, job: _Job) -> float:
        timing = job.target.timing
        if not job.rounds:
            return timing.interval * (SHORTEST_PART + (1 - SHORTEST_PART) * self._random())
        return timing.interval * (1 - timing.jitter * self._random())

    def _finished(self, job: _Job, round_: int, result: ProbeResult) -> None:
        if not job.running or job.rounds != round_:
            return
        job.attempt = None
        self._ended(job)
        try:
            self._answered(job.target, result)
        except Exception as error:
            with contextlib.suppress(Exception):  # then it is the same as before, and has been logged
                self._answered(job.target, internal_error_result(job.target, error))

    def _ended(self, job: _Job) -> None:
        job.running = False
        slots = self._slots_of(job)
        slots.ended(job.author, job.was_slow)
        now = self._loop.time()
        job.slow = now - job.began >= job.target.timing.timeout
        if job.overtaken and not job.gone:
            job.overtaken, job.due = False, now
            self._wait(job)
        if slots.waiting:
            self._soon()

    def _wait(self, job: _Job) -> None:
        job.author = self._slots_of(job).wait(job, self._authors_of(job.target))

    def _slots_of(self, job: _Job) -> FairQueue:
        return self._slots.get(job.target.kind) or self._slots[""]

    def _push(self, job: _Job) -> None:
        heapq.heappush(self._due, (job.due, next(self._numbers), job))

    def _arm(self) -> None:
        if not self._due:
            return
        due = self._due[0][0]
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._tick)

    def _rest(self, spent: float) -> None:
        """Start more after a while, also if a probe that has ended asked for it at once."""
        if self._turn is not None:
            self._turn.cancel()
        # A timer of no time, as with a clock that stands still, would run within this turn of the loop.
        later = partial(self._loop.call_later, REST * spent) if spent else self._loop.call_soon
        self._turn = later(self._start_some)

    def _soon(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._start_some)
