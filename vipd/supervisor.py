"""The one way to run what goes on beside the reconciler: a loop that fails is logged once, counted, named in
status, and run again after a pause. No exception of a loop ends the daemon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.systemd.fields import Event, fields

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 1.0
"""What runs on for so long has recovered, if that is also longer than the last pause, and twice as long as
it ran before it failed: a loop may wait for a while before it does what fails."""

Work = Callable[[], Awaitable[object]]
Now = Callable[[], datetime]


@dataclass(slots=True)
class Task:
    """How a loop does."""

    failures: int = 0
    """How often it has failed, ever."""
    in_row: int = 0
    """How often since it last ran well."""
    fault: str = ""
    """Why it failed last; empty while it runs well."""
    lasted: float = 0.0
    """Seconds that it ran before it failed last."""
    since: datetime | None = None
    """When the first of the failures in a row was."""

    @property
    def pause(self) -> float:
        """Seconds until it is run again."""
        # The exponent is bounded: 2.0**1024 is an OverflowError, after 17 hours of failures.
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(max(self.in_row - 1, 0), 16), LONGEST_PAUSE_SECONDS)


class Supervisor:
    """Runs loops. `expected` are the exceptions that say by themselves what is wrong; any other one is a
    fault of vipd, logged with its traceback. The clock is the event loop's; `now` gives the time of day, for
    people."""

    def __init__(
        self, expected: tuple[type[Exception], ...] = (OSError,), now: Now = lambda: datetime.now(UTC)
    ) -> None:
        self._expected, self._now = expected, now
        self._tasks: dict[str, Task] = {}

    @property
    def tasks(self) -> Mapping[str, Task]:
        """Every loop by its name."""
        return self._tasks

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each loop that fails now."""
        return tuple(
            f"{name} fails: {task.fault}; {_times(task)}, tried again every {task.pause:.3g} s"
            for name, task in self._tasks.items()
            if task.fault
        )

    async def run(self, name: str, work: Work) -> NoReturn:
        """Run `work` again and again, for ever. It may be one round of a loop, or a loop of its own that
        never returns; it must let go of what it holds when it raises or is cancelled."""
        task = self._tasks.setdefault(name, Task())
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                await self._watched(name, task, work)
            except Exception as error:
                task.lasted = clock() - began
                self._failed(name, task, error)
                await asyncio.sleep(task.pause)
            else:
                self._recovered(name, task)
                await asyncio.sleep(0)  # work that returns at once must not hold up the event loop

    async def _watched(self, name: str, task: Task, work: Work) -> None:
        """Run `work` once; when it failed the last time, see whether it keeps running."""
        if not task.fault:
            await work()
            return
        enough = max(STEADY_SECONDS, task.pause, 2 * task.lasted)
        steady = asyncio.get_running_loop().call_later(enough, self._recovered, name, task)
        try:
            await work()
        finally:
            steady.cancel()

    def _failed(self, name: str, task: Task, error: Exception) -> None:
        task.failures += 1
        task.in_row += 1
        task.since = task.since or self._now()
        known = isinstance(error, self._expected)
        fault = str(error) if known else f"{internal_error(error, name)}; {PLEASE_REPORT}"
        if fault != task.fault:
            extra = fields(Event.TASK_FAILED, cause=name, reason=fault)
            log.warning("%s fails: %s", name, fault, extra=extra, exc_info=None if known else error)
        task.fault = fault

    def _recovered(self, name: str, task: Task) -> None:
        if task.fault:
            log.info(
                "%s works again", name, extra=fields(Event.TASK_RECOVERED, cause=name, reason=_times(task))
            )
        task.fault, task.in_row, task.since = "", 0, None


def _times(task: Task) -> str:
    since = f" since {task.since:%Y-%m-%dT%H:%M:%SZ}" if task.since else ""
    return "failed once" + since if task.in_row == 1 else f"failed {task.in_row} times{since}"
