"""What must be noted while it happens: how long writes took, when all was well, how often what happened."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from vipd.control.reconciler import Reconciler
from vipd.host.observer import Observer
from vipd.host.supervisor import Task
from vipd.host.systemd.fields import ATTRIBUTE, Event, Fields
from vipd.model.durations import WRITE_BOUNDS, Durations
from vipd.sources.base import Source


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


class MetricCounters(Observer):
    """Notes what is to be known at a scrape."""

    def __init__(
        self,
        reconciler: Reconciler,
        sources: Sequence[Source],
        checks: Mapping[str, Durations] | None = None,
        tasks: Mapping[str, Task] | None = None,
    ) -> None:
        self._reconciler, self._sources = reconciler, sources
        self.tasks = tasks if tasks is not None else {}
        """How background tasks do, by their name; it follows them."""
        self.checks = checks or {}
        """How long health checks took, by their type."""
        self._applies = reconciler.progress.applies
        self.durations = Durations(WRITE_BOUNDS)
        """How long writes of rules took."""
        self.last_success: datetime | None = None
        """When all that is declared was last taken up without a problem."""
        self.events = EventCounts()

    def stepped(self) -> None:
        """Note how long a write took, and whether all is well."""
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
