"""Logs verdicts: each by itself, or one line where very many change at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from vipd.health.state import HealthRecord, HealthState
from vipd.host.systemd.fields import Event, fields
from vipd.model.check_target import CheckTarget
from vipd.model.service import socket_text

log = logging.getLogger(__name__)

LINES = 20
SERVICES_NAMED = 100
PERIOD_SECONDS = 10.0
"""After so many lines within it, its other verdicts are only counted."""
CALM_SECONDS = 60.0
"""Late checks must be on time for this long before that is reported."""

_CHECKS = "health checks"


class HealthLog:
    """Writes a line for each verdict that matters. First verdicts of healthy backends do not."""

    def __init__(self, users: Callable[[CheckTarget], Sequence[str]] = lambda target: ()) -> None:
        """`users` names the services that a target is of."""
        self._users = users
        self._began = float("-inf")
        self._lines = 0
        self._more: Counter[HealthState] = Counter()
        self._late, self._late_at = False, 0.0

    def write(self, changed: Iterable[tuple[CheckTarget, HealthRecord]], now: float) -> None:
        """Log these changes, at `now` of the records' clock. With none, log the count if it is due."""
        if now - self._began >= PERIOD_SECONDS:
            self._summarise()
            self._began, self._lines = now, 0
        for target, record in changed:
            if record.state is HealthState.HEALTHY and not record.changes:
                continue
            if self._lines >= LINES:
                self._more[record.state] += 1
                continue
            self._lines += 1
            level = logging.WARNING if record.state is HealthState.UNHEALTHY else logging.INFO
            reason = f"{record.state}: {record.reason(now)}"
            log.log(level, "%s is %s", target, reason, extra=self._fields(target, reason))

    def log_late(self, troubles: Sequence[str], now: float) -> None:
        """Checks are late, each time for one reason of `troubles`; logged when it begins, and when it has not
        occurred for a while."""
        if troubles:
            self._late_at = now
            if not self._late:
                self._late = True
                what = "; ".join(troubles)
                log.warning("%s", what, extra=fields(Event.TASK_FAILED, cause=_CHECKS, reason=what))
        elif self._late and now - self._late_at >= CALM_SECONDS:
            self._late = False
            what = f"health checks have been in time for {CALM_SECONDS:.0f} s"
            log.info("%s", what, extra=fields(Event.TASK_RECOVERED, cause=_CHECKS, reason=what))

    def _fields(self, target: CheckTarget, reason: str) -> dict[str, object]:
        return fields(
            Event.BACKEND_HEALTH,
            service=self._users(target)[:SERVICES_NAMED],
            backend=socket_text(target.address, target.port),
            cause=f"check {target.kind}",
            reason=reason,
        )

    def _summarise(self) -> None:
        if self._more:
            counts = ", ".join(f"{number} became {state}" for state, number in sorted(self._more.items()))
            extra = fields(Event.BACKEND_HEALTH, cause="check", reason=f"of other backends, {counts}")
            log.warning("of other backends, %s; hint: vipctl list -o wide", counts, extra=extra)
            self._more.clear()
