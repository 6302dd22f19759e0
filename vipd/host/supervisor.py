"""Runs every loop beside the reconciler: one that fails is logged once, counted, named in status, and run
again after a pause. No exception of a loop ends the daemon.

A loop that works for many (ports to open, checks to run) contains the failure of one by itself, so that the
others continue: that is no failure of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any, NoReturn

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.systemd.fields import Event, fields

log = logging.getLogger(__name__)

INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0
RECOVERED_AFTER_SECONDS = 1.0
"""A loop has recovered when it ran for the longest of: this, the last pause, and twice its last run before it
failed (it may wait for a while before the step that fails)."""
MAX_LOGGED_REASONS = 5
"""Number of distinct reasons within one run of failures that are logged without delay; a further one is
logged once in `LOG_AGAIN_SECONDS`. Status always has the newest."""
LOG_AGAIN_SECONDS = 3600.0

Work = Callable[[], Awaitable[object]]
Now = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses between tries, in seconds: each twice as long as the one before, up to the longest."""

    initial: float = INITIAL_BACKOFF_SECONDS
    maximum: float = MAX_BACKOFF_SECONDS
    jitter: float = 0.0
    """The random part of each pause, so that the hosts of a fleet do not retry together."""

    def delay(self, failures: int, rng: Random) -> float:
        """Seconds until the next try, after so many failures in a row."""
        # The exponent is bounded: 2.0**1024 is an OverflowError, after 17 hours of failures.
        longest = min(self.initial * 2.0 ** min(max(failures - 1, 0), 20), self.maximum)
        return longest * (1.0 - self.jitter * rng.random())


@dataclass(slots=True)
class LoopState:
    """The state of a loop, and how to run it."""

    backoff: Backoff = Backoff()
    reported_elsewhere: bool = False
    """Status reports its failures under another part, such as a source: no further warning."""

    failures: int = 0
    """Total number of failures."""
    consecutive_failures: int = 0
    """Failures since it last ran well."""
    fault: str = ""
    """Why it failed last; empty while it runs well, and after `clear_fault`."""
    retry_delay: float = 0.0
    """Seconds between the last failure and the next try."""
    last_run_seconds: float = 0.0
    """Seconds that it ran before it failed last."""
    since: datetime | None = None
    """When the current run of failures began."""
    logged: dict[str, float] = field(default_factory=dict)
    """The reasons in a row that are in the log, and when they were logged."""

    def clear_fault(self) -> None:
        """Called by the loop itself: what failed works again. It may fail again at once, so the backoff goes
        on."""
        self.fault = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop with its own `LoopState`: to set its backoff, or to read its failure."""

    work: Work
    state: LoopState

    async def __call__(self) -> None:
        """Run it, unsupervised."""
        await self.work()


async def until_first_ends(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until one of the tasks ends, and raise its exception if it failed. Before it returns or raises, it
    cancels the others and waits until they have ended."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Supervisor:
    """Runs loops. `expected` are the exceptions that describe the fault themselves; any other one is a fault
    of vipd, logged with its traceback. The clock is the event loop's; `now` returns the time of day, for
    people; `rng` spreads pauses."""

    def __init__(
        self,
        expected: tuple[type[Exception], ...] = (OSError,),
        now: Now = lambda: datetime.now(UTC),
        rng: Random | None = None,
    ) -> None:
        self._expected, self._now = expected, now
        self._random = rng or Random()  # noqa: S311 (spreads a fleet; nothing secret)
        self._states: dict[str, LoopState] = {}

    @property
    def loops(self) -> Mapping[str, LoopState]:
        """Every loop by its name."""
        return self._states

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each failing loop whose fault no other part names."""
        return tuple(
            f"{name} fails: {state.fault}; {_failure_count_text(state)}, "
            f"tried again every {state.retry_delay:.3g} s"
            for name, state in self._states.items()
            if state.fault and not state.reported_elsewhere
        )

    async def run(self, name: str, work: Work) -> NoReturn:
        """Run `work` repeatedly, for ever. It may be one round of a loop, or a loop that
        never returns; it must release its resources when it raises or is cancelled."""
        state = self._states.setdefault(name, work.state if isinstance(work, Loop) else LoopState())
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                await self._run_once(name, state, work)
            except Exception as error:
                state.last_run_seconds = clock() - began
                self._failed(name, state, error)
                _end_if_cancelled()
                await asyncio.sleep(state.retry_delay)
            else:
                self._recovered(name, state)
                _end_if_cancelled()
                await asyncio.sleep(0)  # work that returns at once must not block the event loop

    async def run_until_cancelled(self, name: str, work: Work) -> NoReturn:
        """Like `run`, for a loop that may be cancelled while the daemon continues: it is then no longer
        named."""
        try:
            await self.run(name, work)
        finally:
            self._states.pop(name, None)

    async def _run_once(self, name: str, state: LoopState, work: Work) -> None:
        """Run `work` once; if it failed the last time, check whether it keeps running."""
        if not state.consecutive_failures:
            await work()
            return
        enough = max(RECOVERED_AFTER_SECONDS, state.retry_delay, 2 * state.last_run_seconds)
        steady = asyncio.get_running_loop().call_later(enough, self._recovered, name, state)
        try:
            await work()
        finally:
            steady.cancel()

    def _failed(self, name: str, state: LoopState, error: Exception) -> None:
        state.failures += 1
        state.consecutive_failures += 1
        state.since = state.since or self._now()
        state.retry_delay = state.backoff.delay(state.consecutive_failures, self._random)
        known = isinstance(error, self._expected)
        state.fault = str(error) if known else f"{internal_error(error, name)}; {PLEASE_REPORT}"
        if _should_log(state):
            extra = fields(Event.TASK_FAILED, cause=name, reason=state.fault)
            log.warning("%s fails: %s", name, state.fault, extra=extra, exc_info=None if known else error)

    def _recovered(self, name: str, state: LoopState) -> None:
        if state.consecutive_failures:
            log.info(
                "%s works again",
                name,
                extra=fields(Event.TASK_RECOVERED, cause=name, reason=_failure_count_text(state)),
            )
        state.fault, state.consecutive_failures, state.since = "", 0, None
        state.logged.clear()


def _should_log(state: LoopState) -> bool:
    """Whether to log the fault of a loop: it is new, and within the limit. Records it if so."""
    now = asyncio.get_running_loop().time()
    if state.fault in state.logged:
        return False
    if len(state.logged) >= MAX_LOGGED_REASONS:
        if now - max(state.logged.values()) < LOG_AGAIN_SECONDS:
            return False
        del state.logged[min(state.logged, key=state.logged.__getitem__)]
    state.logged[state.fault] = now
    return True


def _failure_count_text(state: LoopState) -> str:
    since = f" since {state.since:%Y-%m-%dT%H:%M:%SZ}" if state.since else ""
    return (
        "failed once" + since
        if state.consecutive_failures == 1
        else f"failed {state.consecutive_failures} times{since}"
    )


def _end_if_cancelled() -> None:
    """Cancelled work may raise another exception while it releases its resources, or return: without
    this it would be run again, and the daemon would never end. Raises CancelledError."""
    running = asyncio.current_task()
    if running is not None and running.cancelling():
        raise asyncio.CancelledError
