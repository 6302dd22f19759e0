"""Stores events: folds repetitions, writes the event log, passes events to followers. For any thread.

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
from vipd.observe.events.dedup import Folds
from vipd.observe.events.event import EventRecord, decode, encode
from vipd.observe.events.event_log import Ring

MOST_WAITING = 500
"""A follower with more unread events gets no further ones."""


class Follower:
    """The queue of one reader. Belongs to one event loop."""

    def __init__(self, limit: int = MOST_WAITING) -> None:
        self._waiting: deque[EventRecord] = deque()
        self._limit = limit
        self._news = asyncio.Event()
        self.behind = False
        """It was too slow: events after the waiting ones are not reported."""
        self.ended = False
        """No further events: vipd stops."""

    def notify(self, occurrence: EventRecord) -> None:
        """Queue an event, unless the reader is behind."""
        self.behind = self.behind or len(self._waiting) >= self._limit
        if not self.behind:
            self._waiting.append(occurrence)
        self._news.set()

    def end(self) -> None:
        """No further events follow."""
        self.ended = True
        self._news.set()

    async def next(self, seconds: float) -> EventRecord | None:
        """The next event; None if none arrives in this time, or no further ones follow."""
        if not self._waiting and not self.behind and not self.ended:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)
        return self._waiting.popleft() if self._waiting else None

    @property
    def over(self) -> bool:
        """Everything was read that this reader gets."""
        return not self._waiting and (self.behind or self.ended)


log = logging.getLogger(__name__)

SHORTEST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
PAUSE_PART = 0.1
"""Updates of a folded event are reported after this part of the time that it has lasted."""
MOST_PACED = 2000
"""With more folded events than this, updates are reported at once."""


class Recorder:
    """The events of one daemon. `loop` runs the followers; `clock` returns seconds since 1970."""

    def __init__(
        self, ring: Ring, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.time
    ) -> None:
        self._ring, self._loop, self._clock = ring, loop, clock
        self._lock = threading.RLock()
        self._folds = Folds()
        self._unpublished: dict[int, EventRecord] = {}
        """The latest state of folded events, by the first one's id, while they wait to be reported."""
        self._published_at: OrderedDict[int, float] = OrderedDict()
        self._followers: set[Follower] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._unreadable = 0
        """Lines that were left out at the last reading."""
        self._fault = ""
        for fault in ring.repair():
            log.warning("%s", fault)
        self._last = max((o.id for o in self._kept()), default=0)
        if self._unreadable:
            log.info("%d lines of the kept events cannot be read, and are left out", self._unreadable)

    def record(self, occurrence: EventRecord) -> None:
        """Store an event; it gets its id here."""
        with self._lock:
            found = self._folds.take_in(replace(occurrence, id=self._next_id()))
            if found.count == 1:
                self._publish(found)
                return
            self._unpublished[found.place] = found
            if self._due(found):
                self._publish_waiting(found.place)
            else:
                self._loop.call_soon_threadsafe(self._arm)

    def failed(self, error: Exception) -> None:
        """An event is not kept because of this; logged once."""
        expected = isinstance(error, OSError)
        fault = str(error) if expected else f"{internal_error(error, 'keeping an event')}; {PLEASE_REPORT}"
        if fault != self._fault:
            # Not here: the log's own lock is always acquired before this one, never after it.
            told = partial(log.warning, exc_info=None if expected else error)
            self._loop.call_soon_threadsafe(told, "events cannot be kept: %s", fault)
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
        return self._kept()

    @contextlib.contextmanager
    def following(self, limit: int | None = None) -> Iterator[Follower]:
        """A follower of all future events. From the loop's thread only."""
        follower = Follower() if limit is None else Follower(limit)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    @property
    def last(self) -> int:
        """The id that was given last; 0 if there was none yet."""
        return self._last

    @property
    def followers(self) -> int:
        """Number of followers."""
        return len(self._followers)

    def end_followers(self) -> None:
        """Let every follower read its waiting events, and no more."""
        for follower in self._followers:
            follower.end()

    def close(self) -> None:
        """Write waiting events, and close the ring."""
        with self._lock:
            for place in list(self._unpublished):
                self._publish_waiting(place)
            self._ring.close()
        if self._timer is not None:
            self._timer.cancel()

    def _next_id(self) -> int:
        # From the clock, so that ids keep increasing even if the ring was lost.
        self._last = max(self._last + 1, int(self._clock() * 1_000_000))
        return self._last

    def _due(self, found: EventRecord) -> bool:
        lasted = (found.at - (found.since or found.at)).total_seconds()
        pause = min(max(SHORTEST_PAUSE_SECONDS, PAUSE_PART * lasted), LONGEST_PAUSE_SECONDS)
        passed = self._clock() - self._published_at.get(found.place, 0.0)
        return passed >= pause or passed < 0  # the clock was set back

    def _publish_waiting(self, place: int) -> None:
        self._publish(replace(self._unpublished.pop(place), id=self._next_id()))

    def _publish(self, occurrence: EventRecord) -> None:
        if occurrence.count > 1:
            self._published_at[occurrence.place] = self._clock()
            self._published_at.move_to_end(occurrence.place)
            if len(self._published_at) > MOST_PACED:
                self._published_at.popitem(last=False)
        try:
            self._ring.append(encode(occurrence))
            self._fault = ""
        except Exception as error:
            self.failed(error)
        self._loop.call_soon_threadsafe(self._pass_on, occurrence)

    def _pass_on(self, occurrence: EventRecord) -> None:
        for follower in self._followers:
            follower.notify(occurrence)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(SHORTEST_PAUSE_SECONDS, self._publish_due)

    def _publish_due(self) -> None:
        self._timer = None
        with self._lock:
            for place in [place for place, found in self._unpublished.items() if self._due(found)]:
                self._publish_waiting(place)
            if self._unpublished:
                self._arm()

    def _kept(self) -> list[EventRecord]:
        try:
            with self._lock:
                data = self._ring.data()
        except OSError as error:
            log.warning("events cannot be read: %s", error)
            return []
        kept: dict[int, EventRecord] = {}
        self._unreadable = 0
        for line in filter(None, data.split(b"\n")):
            try:
                found = decode(line)
                kept[found.place] = found
            except ValueError:  # torn by a crash, or by a full disk
                self._unreadable += 1
        return sorted(kept.values(), key=lambda o: o.id)


def moment(seconds: float) -> datetime:
    """Seconds since 1970 as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
