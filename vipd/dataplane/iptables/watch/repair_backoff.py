"""Decides when to repair rules: at once, unless another program keeps undoing the repairs. Pure.

Callers pass the current time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from vipd.dataplane.iptables.watch.external_change import Actor

WINDOW_SECONDS = 60.0
"""Repairs are counted over this time. An offender is forgotten after this time without a change by it."""
REPAIRS_WITHOUT_PAUSE = 5
"""Number of repairs of one offender's changes within the window that vipd makes without a pause."""
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
MAX_OFFENDERS = 100
"""Further offenders count together as one unknown offender."""

_UNKNOWN = ""
_HINTS = {
    "firewalld": "firewall-cmd --reload flushes foreign rules where FlushAllOnReload=yes; set it to no",
}


@dataclass(slots=True)
class _Offender:
    """A program that changes vipd's rules, and the repairs that followed its changes."""

    name: str
    pid: int
    repairs: int = 0
    """Number of repairs since this record began."""
    first: float = 0.0
    """Time of the first repair."""
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=REPAIRS_WITHOUT_PAUSE))
    """Times of the latest repairs only, because the conflict may last for months."""
    pause: float = 0.0
    last: float = 0.0
    """Time of its last change, or of the last repair."""

    def recent(self, now: float) -> int:
        return sum(now - at < WINDOW_SECONDS for at in self.latest)

    def repaired(self, now: float) -> None:
        self.first = self.first if self.repairs else now
        self.repairs += 1
        self.latest.append(now)
        self.last = now


class RepairBackoff:
    """Prevents an endless loop of changes and repairs: records both, and computes the time of the next
    repair.

    Changes are counted by program, not by process, because each run of iptables has another pid.
    """

    def __init__(self, chain_prefix: str = "VIPD", *, accept_first: bool = False) -> None:
        """`accept_first`: vipd moves its jumps back to the head of FORWARD, also before rules that others
        insert there."""
        self._hint = (
            "with accept_forwarded: first vipd moves its accept before each rule that is put there; "
            "accept_forwarded: true leaves such rules first"
            if accept_first
            else f"make it leave the chains {chain_prefix}-* and the jumps to them alone"
        )
        self._offenders: dict[str, _Offender] = {}
        self._waiting: set[str] = set()
        self._due: float | None = None

    @property
    def due(self) -> float | None:
        """When to repair; None when nothing is broken. May be in the past."""
        return self._due

    def record_change(self, actors: Iterable[Actor], now: float) -> float:
        """Record that `actors` changed vipd's rules (none: unknown); returns when to repair, `now` or
        later."""
        for actor in [*actors] or [Actor(_UNKNOWN)]:
            offender = self._offender(actor.name, actor.pid, now)
            offender.last = now
            self._waiting.add(offender.name)
            due = now + offender.pause
            # A change by a new offender is repaired at once, even during a pause for another offender.
            self._due = due if self._due is None else min(self._due, due)
        assert self._due is not None  # noqa: S101 (there is at least one offender)
        return self._due

    def record_repair(self, wrote: bool, now: float) -> None:
        """Record the end of a comparison with the kernel. `wrote`: it required a repair; otherwise no
        offender is blamed."""
        for name in self._waiting:
            offender = self._offenders[name]
            if not wrote:
                continue
            offender.repaired(now)
            if offender.recent(now) >= REPAIRS_WITHOUT_PAUSE:
                offender.pause = min(max(FIRST_PAUSE_SECONDS, 2 * offender.pause), MAX_PAUSE_SECONDS)
        self._waiting.clear()
        self._due = None

    def warnings(self, now: float) -> tuple[str, ...]:
        """One warning for each offender that keeps undoing vipd's rules; none after it has stopped."""
        self._drop_inactive(now)
        return tuple(self._warning(q, now) for q in self._offenders.values() if q.pause)

    def _offender(self, name: str, pid: int, now: float) -> _Offender:
        self._drop_inactive(now)
        if name not in self._offenders and len(self._offenders) >= MAX_OFFENDERS:
            name, pid = _UNKNOWN, 0  # a program may use another name each time
        offender = self._offenders.setdefault(name, _Offender(name, pid))
        offender.pid = pid
        return offender

    def _drop_inactive(self, now: float) -> None:
        for name, offender in list(self._offenders.items()):
            if now - offender.last >= WINDOW_SECONDS and name not in self._waiting:
                del self._offenders[name]

    def _warning(self, offender: _Offender, now: float) -> str:
        who = f"{offender.name} (pid {offender.pid})" if offender.name else "another program"
        span = max(1, round(now - offender.first))
        told = f"{who} has undone vipd's rules {offender.repairs} times in {span} s"
        hint = _HINTS.get(offender.name, self._hint)
        return f"{told}; repairing after {offender.pause:g} s each time; hint: {hint}"
