"""Verdicts in the cache: a restart must not send flows to backends that are known to be dead.

They are trusted for ten minutes only. That on a target which is checked is as of the *stamp*, one entry for
all of them, renewed every minute: verdicts that stay as they are cost nothing. Others have their own time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from vipd.health.flapping import Flapping
from vipd.health.record_cache import CHECKED_NOW, MAX_AGE_SECONDS, SavedRecord
from vipd.health.result import one_line, parse_weight
from vipd.health.state import HealthRecord, HealthState
from vipd.sources.cache import Bucket, Cache

STAMP_SECONDS = 60.0
ROUNDING_SECONDS = 0.01
"""A verdict of this very moment may be later than now by that: two clocks are read, and the file has
milliseconds."""
_STAMP_KEY = ""
_END_OF_TIME = 1e11
_MOST_CHANGES = 2**53
_GARBAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class SavedVerdicts:
    """The bucket of verdicts. `clock` is monotonic, `wall` returns seconds since 1970; `all_verdicts` returns
    what should be kept, and may be called in a thread."""

    def __init__(
        self,
        cache: Cache | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
        all_verdicts: Callable[[], Iterable[SavedRecord]],
    ) -> None:
        self._clock, self._wall, self._all = clock, wall, all_verdicts
        self._stamped_at = clock()
        self._bucket: Bucket[SavedRecord | float] | None = None
        if cache is not None:
            self._bucket = cache.bucket("verdict", self._encode, self._whole)

    def load(self) -> list[SavedRecord]:
        """The verdicts of an earlier run that are not too old, the oldest first. From now on they have a time
        of their own."""
        rows = self._bucket.load() if self._bucket else {}
        now, offset = self._clock(), self._wall() - self._clock()
        stamp, known = rows.pop(_STAMP_KEY, "0"), list[SavedRecord]()
        for key, text in rows.items():
            try:
                record = _entry(json.loads(key), json.loads(text), float(stamp), offset)
            except _GARBAGE:
                continue
            if -ROUNDING_SECONDS <= now - record.at <= MAX_AGE_SECONDS:
                known.append(record)
        if self._bucket:
            self._bucket.put(dict.fromkeys(rows))
        self.put(known)
        return sorted(known, key=lambda record: record.at)

    def put(self, records: Iterable[SavedRecord]) -> None:
        """Keep these instead of what is kept of their keys."""
        changes = {json.dumps(record.key): record for record in records}
        if changes and self._bucket:
            self._bucket.put(changes)
            self.stamp()

    def remove(self, keys: Iterable[tuple[str, int, str, str]]) -> None:
        """Keep nothing of these."""
        if self._bucket:
            self._bucket.put({json.dumps(key): None for key in keys})

    def stamp(self) -> None:
        """The targets that are checked have the verdicts that are kept of them."""
        self._stamped_at = self._clock()
        if self._bucket:
            self._bucket.put({_STAMP_KEY: self._wall()})

    def stamp_if_due(self) -> None:
        """The same, from time to time."""
        if self._clock() - self._stamped_at >= STAMP_SECONDS:
            self.stamp()

    def _whole(self) -> dict[str, SavedRecord | float]:
        return {**{json.dumps(record.key): record for record in self._all()}, _STAMP_KEY: self._wall()}

    def _encode(self, value: SavedRecord | float) -> str:
        if isinstance(value, float):
            return str(value)
        return json.dumps(_fields(value, self._wall() - self._clock()), separators=(",", ":"))


def _fields(saved: SavedRecord, offset: float) -> list[Any]:
    record, flapping = saved.record, saved.record.flapping
    return [
        None if saved.at == CHECKED_NOW else round(saved.at + offset, 3),
        list(saved.services),
        str(record.state),
        round(record.since + offset, 3),
        record.last_reason,
        record.changes,
        None if record.serves_since is None else round(record.serves_since + offset, 3),
        None if record.weight is None else str(record.weight),
        [round(change + offset, 3) for change in flapping.changes],
        flapping.level,
        round(flapping.held_until + offset, 3),
    ]


def _entry(key: list[Any], entry: list[Any], stamp: float, offset: float) -> SavedRecord:
    """Raises one of _GARBAGE."""
    address, port, kind, check = key
    at, services, state, since, last, changes, serves, weight, flaps, level, held = entry
    flapping = Flapping(tuple(_moment(t, offset) for t in flaps), int(level), _moment(held, offset))
    if level and not flaps:
        raise ValueError("held down without a change")
    record = HealthRecord(
        _moment(since, offset),
        HealthState(state),
        last_reason=one_line(str(last)),
        changes=int(changes),
        serves_since=None if serves is None else _moment(serves, offset),
        weight=None if weight is None else parse_weight(str(weight)),
        flapping=flapping,
    )
    if not 0 <= record.changes < _MOST_CHANGES or abs(flapping.level) > _MOST_CHANGES:
        raise ValueError(f"{changes!r} changes")
    as_of = _moment(stamp if at is None else at, offset)
    place = str(address), int(port), str(kind)
    return SavedRecord(place, str(check), tuple(map(str, services)), as_of, record)


def _moment(seconds: Any, offset: float) -> float:
    """A moment of the calendar by the monotonic clock."""
    if not 0 <= seconds < _END_OF_TIME:
        raise ValueError(f"{seconds!r} is no time")
    return float(seconds) - offset
