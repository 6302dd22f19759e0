"""Stores events: folds repetitions, adds them to the event log, passes them to followers. For any thread.

It does not depend on the log; `log_handler` converts log records to calls of `record`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.observe.events.dedup import Deduplicator
from vipd.observe.events.event import EventRecord
from vipd.observe.events.event_log import EventLog

MAX_QUEUED = 500
"""A follower with more unread events gets no further ones."""


class Subscription:
    """The queue of one reader. Belongs to one event loop."""

    def __init__(self, limit: int = MAX_QUEUED) -> None:
        self._waiting: deque[EventRecord] = deque()
        self._limit = limit
        self._news = asyncio.Event()
        self.overflowed = False
        """It was too slow: events after the waiting ones are not reported."""
        self.ended = False
        """No further events: vipd stops."""

    def put(self, event: EventRecord) -> None:
        """Queue an event, unless the reader is behind."""
        self.overflowed = self.overflowed or self.full
        if not self.overflowed:
            self._waiting.append(event)
        self._news.set()

    def end(self) -> None:
        """No further events follow."""
        self.ended = True
        self._news.set()

    @property
    def full(self) -> bool:
        """As many events wait as may."""
        return len(self._waiting) >= self._limit

    async def next(self, seconds: float) -> EventRecord | None:
        """The next event; None if none arrives in this time, or no further ones follow."""
        if not self._waiting and not self.overflowed and not self.ended:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)
        return self._waiting.popleft() if self._waiting else None

    @property
    def finished(self) -> bool:
        """Everything was read that this reader gets."""
        return not self._waiting and (self.overflowed or self.ended)


log = logging.getLogger(__name__)

MIN_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
PAUSE_FRACTION = 0.1
"""Updates of a folded event are reported after this part of the time that it has lasted."""
MAX_THROTTLED = 2000
"""With more folded events than this, updates are reported at once."""


class Recorder:
    """The events of one daemon. `loop` runs the followers; `clock` returns seconds since 1970."""

    def __init__(
        self, event_log: EventLog, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.time
    ) -> None:
        self._event_log, self._loop, self._clock = event_log, loop, clock
        self._lock = threading.RLock()
        self._deduplicator = Deduplicator()
        self._unpublished: dict[int, EventRecord] = {}
        """The latest state of folded events, by the first one's id, while they wait to be reported."""
        self._published_at: OrderedDict[int, float] = OrderedDict()
        self._subscriptions: set[Subscription] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._fault = ""
        self._last = max((event.id for event in event_log.events()), default=0)

    def record(self, event: EventRecord) -> None:
        """Store an event; it gets its id here."""
        with self._lock:
            found = self._deduplicator.deduplicate(replace(event, id=self._next_id()))
            if found.count == 1:
                self._publish(found)
                return
            self._unpublished[found.group_id] = found
            if self._due(found):
                self._publish_waiting(found.group_id)
            else:
                self._loop.call_soon_threadsafe(self._start_timer)

    def failed(self, error: Exception) -> None:
        """An event is not kept because of this; logged once."""
        fault = f"{internal_error(error, 'keeping an event')}; {PLEASE_REPORT}"
        if fault != self._fault:
            # Not here: the log's own lock is always acquired before this one, never after it.
            log_warning = partial(log.warning, exc_info=error)
            self._loop.call_soon_threadsafe(log_warning, "events cannot be kept: %s", fault)
        self._fault = fault

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why events cannot be stored."""
        return (f"events cannot be kept: {self._fault}",) if self._fault else ()

    def read(self) -> list[EventRecord]:
        """Every stored event, oldest first; of folded ones only the last."""
        with self._lock:
            for place in list(self._unpublished):
                self._publish_waiting(place)
        return self._event_log.events()  # outside of the lock: it takes long

    @contextlib.contextmanager
    def subscribe(self, follower: Subscription | None = None) -> Iterator[Subscription]:
        """A follower of all future events, or this one. From the loop's thread only."""
        follower = follower or Subscription()
        self._subscriptions.add(follower)
        try:
            yield follower
        finally:
            self._subscriptions.discard(follower)

    @property
    def last(self) -> int:
        """The id that was given last; 0 if there was none yet."""
        return self._last

    def end_subscriptions(self) -> None:
        """Let every follower read its waiting events, and no more."""
        for follower in self._subscriptions:
            follower.end()

    def close(self) -> None:
        """Store waiting events."""
        with self._lock:
            for place in list(self._unpublished):
                self._publish_waiting(place)
        if self._timer is not None:
            self._timer.cancel()

    def _next_id(self) -> int:
        # From the clock, so that ids keep increasing even if the kept events were lost.
        self._last = max(self._last + 1, int(self._clock() * 1_000_000))
        return self._last

    def _due(self, found: EventRecord) -> bool:
        lasted = (found.at - (found.since or found.at)).total_seconds()
        pause = min(max(MIN_PAUSE_SECONDS, PAUSE_FRACTION * lasted), MAX_PAUSE_SECONDS)
        passed = self._clock() - self._published_at.get(found.group_id, 0.0)
        return passed >= pause or passed < 0  # the clock was set back

    def _publish_waiting(self, place: int) -> None:
        self._publish(replace(self._unpublished.pop(place), id=self._next_id()))

    def _publish(self, event: EventRecord) -> None:
        if event.count > 1:
            self._published_at[event.group_id] = self._clock()
            self._published_at.move_to_end(event.group_id)
            if len(self._published_at) > MAX_THROTTLED:
                self._published_at.popitem(last=False)
        try:
            self._event_log.append(event)
            self._fault = ""
        except Exception as error:
            self.failed(error)
        self._loop.call_soon_threadsafe(self._broadcast, event)

    def _broadcast(self, event: EventRecord) -> None:
        for follower in self._subscriptions:
            follower.put(event)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(MIN_PAUSE_SECONDS, self._publish_due)

    def _publish_due(self) -> None:
        self._timer = None
        with self._lock:
            for place in [place for place, found in self._unpublished.items() if self._due(found)]:
                self._publish_waiting(place)
            if self._unpublished:
                self._start_timer()


def utc_time(seconds: float) -> datetime:
    """Seconds since 1970 as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
