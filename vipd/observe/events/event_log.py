"""The kept events: new ones replace the oldest, within a number of bytes.

When some have to go, each author's newest stay, the same number of each, so that nobody's flood of events
takes those of others. A crash loses the last moment's.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from vipd.host.systemd.fields import author_of
from vipd.observe.events.event import EventRecord, decode, encode
from vipd.sources.cache import Cache

MAX_BYTES = 2 << 20
"""Of all events; some thousand."""
KEPT_BYTES_SHARE = 0.75
"""What stays of them when they have become more."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    line: bytes
    author: object


class EventLog:
    """The events, in memory and in the cache. Not thread-safe."""

    def __init__(self, cache: Cache, max_bytes: int = MAX_BYTES) -> None:
        """Reads those of earlier runs."""
        self._bucket = cache.bucket("event", lambda kept: kept.line, self._whole)
        self._max_bytes = max_bytes
        self._kept: dict[int, _Kept] = {}
        """By the first id of folded events, those that have changed last at the end."""
        self._size = 0
        for event in self._load():
            self._add(event)

    def append(self, event: EventRecord) -> None:
        """Add an event; of folded ones it replaces the one before it."""
        self._bucket.put({str(event.group_id): self._add(event)})
        if self._size > self._max_bytes:
            self._drop_some()

    def events(self) -> list[EventRecord]:
        """All events, the oldest first."""
        return sorted((decode(kept.line) for kept in list(self._kept.values())), key=lambda event: event.id)

    def _add(self, event: EventRecord) -> _Kept:
        former = self._kept.pop(event.group_id, None)
        kept = self._kept[event.group_id] = _Kept(encode(event), _author_of(event))
        self._size += len(kept.line) - (len(former.line) if former else 0)
        return kept

    def _load(self) -> list[EventRecord]:
        events, invalid = list[EventRecord](), list[str]()
        for key, value in self._bucket.load().items():
            try:
                event = decode(value.encode() if isinstance(value, str) else bytes(value))
            except ValueError:
                invalid.append(key)
            else:
                events.append(event)
        if invalid:
            log.info("%d of the kept events cannot be read, and are left out", len(invalid))
            self._bucket.put(dict.fromkeys(invalid))
        return sorted(events, key=lambda event: event.id)

    def _drop_some(self) -> None:
        """Keep of each author the newest events, one after the other of each until there is no more room."""
        numbers, ranked = Counter[object](), list[tuple[int, int, int]]()
        for age, (group_id, kept) in enumerate(reversed(self._kept.items())):
            ranked.append((numbers[kept.author], age, group_id))
            numbers[kept.author] += 1
        room, gone = int(self._max_bytes * KEPT_BYTES_SHARE), list[int]()
        for _, _, group_id in sorted(ranked):
            room -= len(self._kept[group_id].line)
            if room < 0:
                gone.append(group_id)
        for group_id in gone:
            self._size -= len(self._kept.pop(group_id).line)
        self._bucket.put({str(group_id): None for group_id in gone})

    def _whole(self) -> dict[str, _Kept]:
        return {str(group_id): kept for group_id, kept in self._kept.copy().items()}


def _author_of(event: EventRecord) -> object:
    """Who an event is about; without a unit its cause, and its first service."""
    author = author_of(event.unit, event.cause)
    return author if event.unit else (author, event.services[:1])
