"""Verdicts in the log: each by itself, unless so many change at once that nobody could read them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from vipd.health.state import Record, State
from vipd.health.targets import Target
from vipd.model import socket_text
from vipd.systemd.fields import Event, fields

log = logging.getLogger(__name__)

LINES = 20
SERVICES_NAMED = 100
PERIOD_SECONDS = 10.0
"""After so many lines within it, its other verdicts are only counted."""


class VerdictLog:
    """Writes a line for each verdict that matters. First verdicts of healthy backends do not."""

    def __init__(self, users: Callable[[Target], Sequence[str]] = lambda target: ()) -> None:
        """`users` names the services that a target is of."""
        self._users = users
        self._began = float("-inf")
        self._lines = 0
        self._more: Counter[State] = Counter()

    def tell(self, changed: Iterable[tuple[Target, Record]], now: float) -> None:
        """These changed, at `now` of the records' clock. With none, what was counted is told if it is due."""
        if now - self._began >= PERIOD_SECONDS:
            self._summarise()
            self._began, self._lines = now, 0
        for target, record in changed:
            if record.state is State.HEALTHY and not record.changes:
                continue
            if self._lines >= LINES:
                self._more[record.state] += 1
                continue
            self._lines += 1
            level = logging.WARNING if record.state is State.UNHEALTHY else logging.INFO
            reason = f"{record.state}: {record.reason(now)}"
            log.log(level, "%s is %s", target, reason, extra=self._fields(target, reason))

    def _fields(self, target: Target, reason: str) -> dict[str, object]:
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
