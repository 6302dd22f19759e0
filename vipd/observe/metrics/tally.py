"""What must be noted while it happens: how long applies took, when all was well, how often what happened."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from vipd.reconciler import Reconciler
from vipd.sources.base import Source
from vipd.systemd.fields import ATTRIBUTE, Event, Fields

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the buckets of a duration, in seconds."""


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._buckets = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._buckets[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> Sequence[tuple[str, int]]:
        """How many took so long at most, by the upper end as text; the last is `+Inf`, all of them."""
        found, so_far = list[tuple[str, int]](), 0
        for end, number in zip((*map(str, BOUNDS), "+Inf"), self._buckets, strict=True):
            so_far += number
            found.append((end, so_far))
        return found


class EventCounts(logging.Handler):
    """Counts log records that are events, each as it happens: the events' recorder tells several as one."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Count an event; anything else is none of ours."""
        carried: Fields = getattr(record, ATTRIBUTE, {})
        self._counts.update(carried.get("VIPD_EVENT", ())[:1])

    def counts(self) -> Mapping[str, int]:
        """How often each event happened, also those that never did."""
        return {event.value: self._counts[event.value] for event in Event}


class Tally:
    """Notes what is to be known at a scrape. `look` belongs into the reconciler's `after_step`."""

    def __init__(self, reconciler: Reconciler, sources: Sequence[Source]) -> None:
        self._reconciler, self._sources = reconciler, sources
        self._applies = reconciler.progress.applies
        self.durations = Durations()
        self.last_success: datetime | None = None
        """When all that is declared was last taken up without a problem."""
        self.events = EventCounts()

    def look(self) -> None:
        """A step is over."""
        progress = self._reconciler.progress
        if progress.applies != self._applies:
            self._applies = progress.applies
            self.durations.add(progress.last_seconds)
        troubled = progress.fault or progress.quarantined or self._reconciler.problems
        if not troubled and not any(source.faults() for source in self._sources):
            self.last_success = self._reconciler.clock()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what vipd logs, until the end."""
        logger = logging.getLogger("vipd")
        logger.addHandler(self.events)
        try:
            yield
        finally:
            logger.removeHandler(self.events)
