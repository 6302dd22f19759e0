"""Reports a reconciler's state to the service manager: ready, status, heartbeats, reloading, stopping.

Heartbeats are sent when the reconciler's own loop beats and at no other time, so that whatever blocks
that loop ends them. systemd then ends the daemon, whose rules stay, and restarts it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from vipd.control.progress import Progress
from vipd.control.reconciler import Reconciler
from vipd.host.observer import Observer
from vipd.host.systemd.notify import Notifier, one_line
from vipd.observe.views import services_by_state

EXTENSION_SECONDS = 60
"""Time that each sign of progress gives to a start."""
READY_TIMEOUT_SECONDS = 20.0
"""How long a start may fail before it counts as ready all the same: the API answers, the status names the
fault, and programs that wait for the unit continue."""
STATUS_SECONDS = 1.0
"""A status is sent at most so often."""
HEARTBEATS_PER_WATCHDOG = 2
"""Signs of life in the time after which their absence counts, as sd_watchdog_enabled(3) advises."""
MAX_PROGRAM_SECONDS = 60.0
MIN_PROGRAM_SECONDS = 20.0
_SPARE_SECONDS = 5.0


def heartbeat_seconds(notifier: Notifier) -> float:
    """Interval of an idle loop's heartbeats for the watchdog."""
    return (notifier.watchdog_seconds or 2 * MAX_PROGRAM_SECONDS) / HEARTBEATS_PER_WATCHDOG


def program_seconds(notifier: Notifier) -> float:
    """How long a program may run: it is killed, and that is logged, before the watchdog ends the daemon."""
    if notifier.watchdog_seconds is None:
        return MAX_PROGRAM_SECONDS
    room = notifier.watchdog_seconds - _SPARE_SECONDS
    return min(MAX_PROGRAM_SECONDS, max(MIN_PROGRAM_SECONDS, room))


class StatusReporter(Observer):
    """Reports one reconciler's state, from its loop, to one notifier."""

    def __init__(
        self,
        notifier: Notifier,
        reconciler: Reconciler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notifier, self._reconciler, self._clock = notifier, reconciler, clock
        self._ready = self._stopping = False
        self._failing_since: float | None = None
        """When the first step failed, and none before that was good."""
        self._status = ""
        self._later: asyncio.TimerHandle | None = None
        self._sent: dict[str, float] = {}
        """When each kind of notification was sent last."""
        self._reloading = asyncio.Lock()
        reconciler.observers.add(self)

    def heartbeat(self) -> None:
        """The loop continues: sends a heartbeat, and before the first successful step extends the start
        timeout."""
        seconds = self._notifier.watchdog_seconds
        if seconds is not None and self._due("watchdog", min(1.0, seconds / 8)):
            self._notifier.send("WATCHDOG=1")
        # A start that has failed once is not to be prolonged for ever by being tried again.
        starting = not self._ready and not self._reconciler.progress.failures
        if starting and self._due("extension", 1.0):
            self._notifier.send(f"EXTEND_TIMEOUT_USEC={EXTENSION_SECONDS * 1_000_000}")
        if not self._notify_ready():
            self._schedule_refresh()  # not at once: most changes are over before a user could read them

    def stepped(self) -> None:
        """Report that the daemon is ready once it is, and its status if that has changed."""
        if self._stopping or self._notify_ready():
            return
        if self._due("status", STATUS_SECONDS):
            self._notify_status()
        else:
            self._schedule_refresh()
        if self._failing_since is not None and not self._ready:
            self._schedule_refresh()  # the next try may be far

    @asynccontextmanager
    async def reloading(self) -> AsyncIterator[None]:
        """Report that a reload begins, and at its end that it is over, whatever the outcome. One at a
        time."""
        async with self._reloading:
            if not self._ready:
                yield  # ready would be a lie before the first good step
                return
            self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                yield
            finally:
                self._status = status_text(self._reconciler)
                self._notifier.send("READY=1", f"STATUS={self._status}")

    def stopping(self) -> None:
        """Report that the daemon stops; the last message."""
        self._stopping = True
        if self._later:
            self._later.cancel()
        self._notifier.send("STOPPING=1", "STATUS=stopping; the rules stay in the kernel")

    def _notify_ready(self) -> bool:
        """Report readiness if it is due; returns whether it was."""
        if self._ready or not (self._reconciler.progress.applied or self._fails_for_long()):
            return False
        self._status = status_text(self._reconciler)
        self._ready = self._notifier.send("READY=1", f"STATUS={self._status}")
        self._sent["status"] = self._clock()
        return True

    def _fails_for_long(self) -> bool:
        if self._failing_since is None and self._reconciler.progress.failures:
            self._failing_since = self._clock()
        since = self._failing_since
        return since is not None and self._clock() - since >= READY_TIMEOUT_SECONDS

    def _schedule_refresh(self) -> None:
        if self._later is None and not self._stopping:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(STATUS_SECONDS, self._refresh)

    def _refresh(self) -> None:
        self._later = None
        self.stepped()

    def _notify_status(self) -> None:
        status = status_text(self._reconciler)
        if status != self._status and self._notifier.send(f"STATUS={status}"):
            self._status = status

    def _due(self, kind: str, pause: float) -> bool:
        now, last = self._clock(), self._sent.get(kind)
        if last is not None and now - last < pause:
            return False
        self._sent[kind] = now
        return True


def status_text(reconciler: Reconciler) -> str:
    """One line such as `12 services, 31/33 backends ready, in sync`."""
    progress, services = reconciler.progress, reconciler.services
    if not progress.applied:
        what = f"starting with {_several(len(services), 'service')}" if services else "starting"
        return one_line(f"{what}; {progress.fault}" if progress.fault else what)
    ready = f"{reconciler.readiness.ready}/{reconciler.readiness.declared} backends ready"
    if reconciler.readiness.unchecked:
        ready = f"{ready}, {reconciler.readiness.unchecked} unchecked"
    states = services_by_state(reconciler)
    failing = states["degraded"] + states["no-backends"]
    faults = [f"{failing} degraded"] if failing else []
    parts = [_several(len(services), "service"), ready, *faults, _state(progress)]
    if refused := len(reconciler.problems):
        parts.append(f"{refused} with problems: see vipctl status")
    return one_line(", ".join(parts))


def _state(progress: Progress) -> str:
    if progress.fault:
        return f"failed: {progress.fault}"
    if progress.applied != progress.requested:
        return "changing"
    return f"{len(progress.quarantined)} quarantined" if progress.quarantined else "in sync"


def _several(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
