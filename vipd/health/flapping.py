"""Detects a backend that changes its state too often: it is held down, longer each time. Pure.

Only the change to healthy is delayed, never the other. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vipd.model.check import Timing

FLAPPING_CHANGES = 6
"""This many changes within the window are flapping: three times down, three times up."""

SHORTEST_WINDOW_SECONDS = 60.0
MAX_HOLD_SECONDS = 600.0
_MOST_LEVELS = 16
_MOST_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Flapping:
    """Record of a backend's changes."""

    changes: tuple[float, ...] = ()
    """When the state changed, as far back as it matters."""
    level: int = 0
    """How often in a row it was held down; each window without changes subtracts one."""
    held_until: float = 0.0

    def held_down(self, now: float) -> bool:
        """Whether it must stay down."""
        return self.level > 0 and now < self.held_until

    def text(self, now: float) -> str:
        """`flapping: 6 changes in 60 s, held down for 40 s`; empty when it is not held."""
        if not self.held_down(now):
            return ""
        span, left = now - self.changes[0], self.held_until - now
        return f"flapping: {len(self.changes)} changes in {span:.0f} s, held down for {left:.0f} s"

    def came_up(self, now: float, timing: Timing) -> Flapping:
        """It became healthy."""
        return self._noted(now, timing)

    def went_down(self, now: float, timing: Timing) -> Flapping:
        """Record that it became unhealthy; it is held down if that happens too often."""
        noted = self._noted(now, timing)
        if not noted.level and len(noted.changes) < FLAPPING_CHANGES:
            return noted
        level = min(noted.level + 1, _MOST_LEVELS)
        return replace(noted, level=level, held_until=now + hold_seconds(level, timing))

    def _noted(self, now: float, timing: Timing) -> Flapping:
        span = window(timing)
        quiet_since = max(self.held_until, self.changes[-1] if self.changes else now)
        level = max(0, self.level - int(max(0.0, now - quiet_since) / span))
        # While it is held repeatedly, all its changes count; otherwise the reason would report only one.
        kept = self.changes if level else tuple(t for t in self.changes if t > now - span)
        return replace(self, changes=(*kept, now)[-_MOST_REMEMBERED:], level=level)


NOT_FLAPPING = Flapping()
"""The record of a backend that never changed."""


def window(timing: Timing) -> float:
    """Seconds within which changes count together.

    With these counts and intervals six changes take at least half of it, so flapping at half the highest
    possible speed is detected.
    """
    return max(SHORTEST_WINDOW_SECONDS, FLAPPING_CHANGES * (timing.rise + timing.fall) * timing.interval)


def hold_seconds(level: int, timing: Timing) -> float:
    """How long a backend is held down for the `level`th time in a row: twice as long as the previous time."""
    first = max(10.0, (timing.rise + timing.fall) * timing.interval)
    return min(first * 2.0 ** (level - 1), max(MAX_HOLD_SECONDS, first))
