"""Somebody who hears of events as they happen, through a queue of bounded length."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from vipd.observe.events.event import EventRecord

MOST_WAITING = 500
"""Whoever leaves more events unread is not told of any further ones."""


class Follower:
    """The queue of one reader. Belongs to one event loop."""

    def __init__(self, limit: int = MOST_WAITING) -> None:
        self._waiting: deque[EventRecord] = deque()
        self._limit = limit
        self._news = asyncio.Event()
        self.behind = False
        """It was too slow: what comes after the waiting ones is not told."""
        self.ended = False
        """Nothing more will come: vipd stops."""

    def tell(self, occurrence: EventRecord) -> None:
        """Queue an event, unless the reader is behind."""
        self.behind = self.behind or len(self._waiting) >= self._limit
        if not self.behind:
            self._waiting.append(occurrence)
        self._news.set()

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._news.set()

    async def next(self, seconds: float) -> EventRecord | None:
        """The next event; None when none comes for so long, or when there will be none any more."""
        if not self._waiting and not self.behind and not self.ended:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)
        return self._waiting.popleft() if self._waiting else None

    @property
    def over(self) -> bool:
        """Everything was read that this reader is told."""
        return not self._waiting and (self.behind or self.ended)
