"""Records what must be noted when it happens: durations of writes, the time of the last success, event
counts."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

from vipd.control.announcer import Announcer
from vipd.control.reconciler import Reconciler
from vipd.host.observer import Observer
from vipd.host.supervisor import LoopState
from vipd.host.systemd.fields import ATTRIBUTE, Event, Fields
from vipd.model.durations import WRITE_BOUNDS, DurationHistogram
from vipd.sources.base import Source


class EventCounts(logging.Handler):
    """Counts log records that are events, each one: the events' recorder folds several into one."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Count an event; ignores other records."""
        carried: Fields = getattr(record, ATTRIBUTE, {})
        self._counts.update(carried.get("VIPD_EVENT", ())[:1])

    def counts(self) -> Mapping[str, int]:
        """The count of each event, including zero."""
        return {event.value: self._counts[event.value] for event in Event}


class MetricCounters(Observer):
    """Records values for scrapes."""

    def __init__(
        self,
        reconciler: Reconciler,
        sources: Sequence[Source],
        checks: Mapping[str, DurationHistogram] | None = None,
        tasks: Mapping[str, LoopState] | None = None,
        notifications: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._reconciler, self._sources = reconciler, sources
        self.tasks = tasks if tasks is not None else {}
        """The state of background tasks, by their name; it follows changes."""
        self.notifications = notifications
        """Events passed to the program of `notify`, by result; None without one."""
        self.announcer: Announcer | None = None
        """What this host announces."""
        self.checks = checks or {}
        """Durations of health checks, by their type."""
        self._applies = reconciler.progress.applies
        self.durations = DurationHistogram(WRITE_BOUNDS)
        """Durations of writes of rules."""
        self.last_success: datetime | None = None
        """When all declarations were last applied without a problem."""
        self.events = EventCounts()

    def stepped(self) -> None:
        """Record the duration of a write, and whether all is well."""
        progress = self._reconciler.progress
        if progress.applies != self._applies:
            self._applies = progress.applies
            self.durations.add(progress.last_seconds)
        troubled = progress.fault or progress.quarantined or self._reconciler.problems
        if not troubled and not any(source.faults() for source in self._sources):
            self.last_success = self._reconciler.clock()

    @contextlib.contextmanager
    def count_events(self) -> Iterator[None]:
        """Count what vipd logs, until the end."""
        logger = logging.getLogger("vipd")
        logger.addHandler(self.events)
        try:
            yield
        finally:
            logger.removeHandler(self.events)
