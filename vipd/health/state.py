"""Computes a backend's health from probe results: enough equal results in a row change it (rise, fall). Pure.

All times are of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from vipd.health.flapping import NOT_FLAPPING, Flapping
from vipd.health.result import ProbeResult, ReportedWeight
from vipd.model.check import InitialHealth, Timing


class HealthState(StrEnum):
    """Whether a backend is healthy."""

    UNKNOWN = "unknown"
    """Not enough results yet: `start` of its check says how it counts."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """The health of one check target, and the results in a row that may change it."""

    since: float
    """When it entered `state`."""
    state: HealthState = HealthState.UNKNOWN
    streak: int = 0
    """Equal results in a row: positive for good ones (at most `rise`), negative for bad ones (at most
    `fall`)."""
    last_reason: str = "not asked yet"
    """Reason of the last result; with its number in the row while the row may change the state."""
    probe_error: str = ""
    """Why vipd could not send the last probe; empty if it could."""
    changes: int = 0
    """How often its state changed. Leaving `UNKNOWN` does not count."""
    serves_since: float | None = None
    """Start of its slow start: when it last became healthy after it had not counted as healthy. None: it has
    no slow start."""
    weight: ReportedWeight | None = None
    """The weight that its last good answer reported."""
    flapping: Flapping = NOT_FLAPPING

    def counts_healthy(self, start: InitialHealth) -> bool:
        """Whether the target counts as healthy; `start`: how it counts while its state is unknown."""
        return self.state is HealthState.HEALTHY or (
            self.state is HealthState.UNKNOWN and start is InitialHealth.HEALTHY
        )

    def reason(self, now: float) -> str:
        """The reason of its state, as one line of text."""
        held = self.flapping.text(now) if self.state is HealthState.UNHEALTHY else ""
        return "; ".join(filter(None, (held, self.probe_error, self.last_reason)))


def apply_result(record: HealthRecord, result: ProbeResult, timing: Timing, now: float) -> HealthRecord:
    """The record after one more result, which arrived at `now`."""
    if result.good is None:
        return replace(record, probe_error=result.reason)
    return _good(record, result, timing, now) if result.good else _bad(record, result, timing, now)


def reset_streak(record: HealthRecord, last: str) -> HealthRecord:
    """The record after a change of the check: the state stays, the count of results restarts."""
    return replace(record, streak=0, probe_error="", last_reason=last)


def _good(record: HealthRecord, result: ProbeResult, timing: Timing, now: float) -> HealthRecord:
    streak = min(max(record.streak, 0) + 1, timing.rise)
    counting = record.state is not HealthState.HEALTHY
    last = f"{result.reason}, {streak} of {timing.rise}" if counting else result.reason
    updated = replace(record, streak=streak, last_reason=last, probe_error="", weight=result.weight)
    if not counting or streak < timing.rise or record.flapping.held_down(now):
        return updated
    had_verdict = record.state is HealthState.UNHEALTHY
    return replace(
        updated,
        state=HealthState.HEALTHY,
        since=now,
        last_reason=result.reason,
        changes=record.changes + had_verdict,
        serves_since=record.serves_since if record.counts_healthy(timing.start) else now,
        flapping=record.flapping.came_up(now, timing) if had_verdict else record.flapping,
    )


def _bad(record: HealthRecord, result: ProbeResult, timing: Timing, now: float) -> HealthRecord:
    streak = max(min(record.streak, 0) - 1, -timing.fall)
    updated = replace(
        record, streak=streak, last_reason=f"{result.reason}, {-streak} of {timing.fall}", probe_error=""
    )
    if record.state is HealthState.UNHEALTHY or -streak < timing.fall:
        return updated
    had_verdict = record.state is HealthState.HEALTHY
    return replace(
        updated,
        state=HealthState.UNHEALTHY,
        since=now,
        changes=record.changes + had_verdict,
        serves_since=None,
        flapping=record.flapping.went_down(now, timing) if had_verdict else record.flapping,
    )
