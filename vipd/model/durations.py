"""A histogram of durations. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

WRITE_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""For writes of rules, in seconds."""
CHECK_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""For health checks, in seconds."""


class DurationHistogram:
    """A histogram of seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ends of the buckets, rising."""
        self._bounds = tuple(bounds)
        self._buckets = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._buckets[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> Sequence[tuple[str, int]]:
        """Cumulative counts by the upper bound as text; the last is `+Inf`, which counts all."""
        found, so_far = list[tuple[str, int]](), 0
        for end, number in zip((*map(str, self._bounds), "+Inf"), self._buckets, strict=True):
            so_far += number
            found.append((end, so_far))
        return found
