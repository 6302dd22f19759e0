"""Turns results into a verdict: equal ones in a row change it. Pure; times are of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from vipd.health.flapping import CALM, Flapping
from vipd.health.result import Result, SaidWeight
from vipd.model.check import Start, Timing


class State(StrEnum):
    """Verdict on a backend."""

    UNKNOWN = "unknown"
    """No verdict yet: its check's `start` decides."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Record:
    """State of one target."""

    since: float
    """When it got its state."""
    state: State = State.UNKNOWN
    streak: int = 0
    """Equal results in a row, up to the count that decides: above 0 good ones, below 0 bad ones."""
    last: str = "not asked yet"
    """Reason of the last answer, with its place in the row while rows count."""
    trouble: str = ""
    """Why vipd could not probe the last time; empty if it could."""
    changes: int = 0
    """How often its state changed; the first verdict does not count."""
    serves_since: float | None = None
    """When it last became healthy after being unhealthy; None if it never did: then it has no slow start."""
    weight: SaidWeight | None = None
    """The weight in its last good answer."""
    flapping: Flapping = CALM

    def fit(self, start: Start) -> bool:
        """Whether it counts as healthy."""
        return self.state is State.HEALTHY or (self.state is State.UNKNOWN and start is Start.HEALTHY)

    def reason(self, now: float) -> str:
        """Reason of its state, for people: one line."""
        held = self.flapping.text(now) if self.state is State.UNHEALTHY else ""
        return "; ".join(filter(None, (held, self.trouble, self.last)))


def observe(record: Record, result: Result, timing: Timing, now: float) -> Record:
    """The record after one more result, which arrived at `now`."""
    if result.good is None:
        return replace(record, trouble=result.reason)
    return _good(record, result, timing, now) if result.good else _bad(record, result, timing, now)


def begin_anew(record: Record, last: str) -> Record:
    """The record under another check: the verdict stays, the count restarts."""
    return replace(record, streak=0, trouble="", last=last)


def _good(record: Record, result: Result, timing: Timing, now: float) -> Record:
    streak = min(max(record.streak, 0) + 1, timing.rise)
    counting = record.state is not State.HEALTHY
    last = f"{result.reason}, {streak} of {timing.rise}" if counting else result.reason
    told = replace(record, streak=streak, last=last, trouble="", weight=result.weight)
    if not counting or streak < timing.rise or record.flapping.held(now):
        return told
    known = record.state is State.UNHEALTHY
    return replace(
        told,
        state=State.HEALTHY,
        since=now,
        last=result.reason,
        changes=record.changes + known,
        serves_since=record.serves_since if record.fit(timing.start) else now,
        flapping=record.flapping.came_up(now, timing) if known else record.flapping,
    )


def _bad(record: Record, result: Result, timing: Timing, now: float) -> Record:
    streak = max(min(record.streak, 0) - 1, -timing.fall)
    told = replace(record, streak=streak, last=f"{result.reason}, {-streak} of {timing.fall}", trouble="")
    if record.state is State.UNHEALTHY or -streak < timing.fall:
        return told
    known = record.state is State.HEALTHY
    return replace(
        told,
        state=State.UNHEALTHY,
        since=now,
        changes=record.changes + known,
        serves_since=None,
        flapping=record.flapping.went_down(now, timing) if known else record.flapping,
    )
