"""Runs the program of the setting `notify` for each event, with the event on its standard input.

One at a time, in the order of the events. Nothing waits for it: events that arrive while too many wait are
dropped and counted, and a program that fails is a warning, and never an event, which would run it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from vipd.host.accounts import CheckUsers
from vipd.host.unprivileged import Program, ProgramError, ProgramRun, ProgramRunners
from vipd.model.formatting import time_text
from vipd.model.text import shortened
from vipd.observe.events.event import EventRecord, encode
from vipd.observe.events.recorder import Recorder, Subscription

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
"""How long the program may take for one event."""
MAX_QUEUED = 500
"""Events that wait; further ones are dropped."""
DROPS_SHOWN_SECONDS = 3600.0
"""For so long after the last dropped event there is a warning."""
LOG_AGAIN_SECONDS = 3600.0
"""The same failure is logged again after this time."""
_POLL_SECONDS = 3600.0
_MAX_REASON_LENGTH = 200


class DroppingSubscription(Subscription):
    """A queue that drops new events while it is full, and goes on when there is room again."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.dropped = 0
        self.dropped_at = 0.0
        """When the last one was dropped, by the loop's clock."""

    def put(self, event: EventRecord) -> None:
        """Queue an event, or count it as dropped."""
        if self.full:
            self.dropped += 1
            self.dropped_at = asyncio.get_running_loop().time()
        else:
            super().put(event)


class NotifyProgram:
    """Runs one command for every event of a recorder, while `run` runs."""

    def __init__(
        self,
        command: tuple[str, ...],
        users: CheckUsers,
        recorder: Recorder,
        node: str = "",
        timeout: float = TIMEOUT_SECONDS,
        limit: int = MAX_QUEUED,
    ) -> None:
        """`node` is this host's name, which the program gets; `limit` is that of waiting events."""
        self._command, self._users, self._recorder = command, users, recorder
        self._node, self._timeout = node, timeout
        self._queue = DroppingSubscription(limit)
        self._counts = Counter[str]()
        self._fault, self._failures = "", 0
        self._since: datetime | None = None
        self._logged, self._logged_at = "", 0.0

    def counts(self) -> Mapping[str, int]:
        """Number of events by their end: `passed`, `failed` and `dropped`."""
        return {
            "passed": self._counts["passed"],
            "failed": self._counts["failed"],
            "dropped": self._queue.dropped,
        }

    def warnings(self) -> tuple[str, ...]:
        """That the program fails, and that events were dropped lately."""
        found = []
        if self._fault:
            times = "once" if self._failures == 1 else f"{self._failures} times in a row"
            since = f" since {time_text(self._since)}" if self._since else ""
            found.append(f"notify: {self._fault}; failed {times}{since}")
        quiet = asyncio.get_running_loop().time() - self._queue.dropped_at
        if self._queue.dropped and quiet < DROPS_SHOWN_SECONDS:
            found.append(
                f"notify: {self._queue.dropped} events were not passed on, since {self._command[0]} takes "
                "longer than they take to come; hint: make it leave out what nobody needs to read"
            )
        return tuple(found)

    async def run(self) -> None:
        """Run the program for each event, for ever."""
        runners, thread = ProgramRunners(), ThreadPoolExecutor(1, "vipd notify")
        try:
            with self._recorder.subscribe(self._queue):
                while True:
                    event = await self._queue.next(_POLL_SECONDS)
                    if event is not None:
                        run = ProgramRun(self._program(event), self._users, runners)
                        self._note(event, await self._failure_of(run, thread))
        finally:
            await asyncio.to_thread(thread.shutdown)
            await asyncio.to_thread(runners.close)

    async def _failure_of(self, run: ProgramRun, thread: ThreadPoolExecutor) -> str:
        """Runs the program once; returns why it failed, or nothing."""
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(thread, run.to_end)
        except ProgramError as error:
            return str(error)
        except RuntimeError as error:
            return f"no thread for it: {error}; hint: raise TasksMax of the unit"
        finally:
            run.cancel()
        if outcome.exit_code is None:
            return f"{self._command[0]} did not end within {self._timeout:g} s and was killed"
        return f"{self._command[0]}: {outcome.failure}" if outcome.failure else ""

    def _program(self, event: EventRecord) -> Program:
        environment = {"VIPD_EVENT": event.event, "VIPD_LEVEL": event.level, "VIPD_NODE": self._node}
        return Program(self._command, self._timeout, environment=environment, stdin=encode(event).decode())

    def _note(self, event: EventRecord, failure: str) -> None:
        """Keep how the program ended, and log a change of that."""
        self._counts["failed" if failure else "passed"] += 1
        if not failure:
            if self._fault:
                log.info("notify: %s works again", self._command[0])
            self._fault, self._failures, self._since = "", 0, None
            return
        self._fault = shortened(failure, _MAX_REASON_LENGTH)
        self._failures, self._since = self._failures + 1, self._since or datetime.now(UTC)
        now = asyncio.get_running_loop().time()
        if self._fault != self._logged or now - self._logged_at > LOG_AGAIN_SECONDS:
            self._logged, self._logged_at = self._fault, now
            log.warning("notify: %s, for the event %s", self._fault, event.event)
