"""Verdicts that outlive vipd: a restart must not put dead backends back to work.

A small file, trusted for ten minutes only; losing it costs the time of some checks, so it is not synced.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vipd.durable import keep_aside, read_own, why, write_aside
from vipd.health.flapping import Flapping
from vipd.health.result import one_line, parse_weight
from vipd.health.state import Record, State
from vipd.health.targets import Target

log = logging.getLogger(__name__)

TRUSTED_SECONDS = 600.0
"""Older verdicts are not used."""

SAVE_ANYWAY_SECONDS = 60.0
"""Unchanged verdicts are saved so often, since saved ones age."""

_FORMAT = 1
_END_OF_TIME = 1e11
_MOST_CHANGES = 2**53

Place = tuple[str, int, str]
"""Address, port and type of check: what else a check says may change, the verdict stays."""

Remembered = tuple[Place, float, Record]
"""Of whom, as of when, and what."""


def place_of(target: Target) -> Place:
    """Where a target is remembered."""
    return target.address, target.port, target.kind


class Memory:
    """What targets that are not followed now were like. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[Place, tuple[float, Record]] = {}

    def remember(self, target: Target, record: Record, now: float) -> None:
        """Keep the verdict of a target that is left; nothing is kept of one without."""
        if record.state is not State.UNKNOWN:
            self._known[place_of(target)] = (now, record)

    def recall(self, target: Target, now: float) -> Record | None:
        """The record that the target begins with; None when there is none to trust."""
        at, record = self._known.get(place_of(target), (now, None))
        return record if now - at <= TRUSTED_SECONDS else None

    def tidy(self, now: float) -> None:
        """Forget what is too old."""
        self._known = {place: kept for place, kept in self._known.items() if now - kept[0] <= TRUSTED_SECONDS}

    def known(self) -> Iterable[Remembered]:
        """All that is remembered, and when it was so."""
        return [(place, at, record) for place, (at, record) in self._known.items()]

    def learn(self, place: Place, at: float, record: Record) -> None:
        """Add what an earlier vipd knew."""
        self._known[place] = (at, record)


def encode(known: Iterable[Remembered], now: float, wall: float) -> bytes:
    """The file's content. `now` and `wall` are the same moment by the monotonic clock and by the calendar."""
    offset = wall - now
    entries = [[*place, round(at + offset, 3), *_fields(record, offset)] for place, at, record in known]
    return json.dumps({"format": _FORMAT, "verdicts": entries}, separators=(",", ":")).encode()


def decode(data: bytes, now: float, wall: float) -> list[Remembered]:
    """What the file knows that is not too old. Raises ValueError when it is none of ours."""
    try:
        read = json.loads(data)
        if read["format"] != _FORMAT:
            raise ValueError(f"format {read['format']!r} is not known")
        entries = [_entry(entry, wall - now) for entry in read["verdicts"]]
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return [entry for entry in entries if 0 <= now - entry[1] <= TRUSTED_SECONDS]


def load(path: Path, now: float, wall: float) -> list[Remembered]:
    """What is remembered in the file; nothing, with a line in the log, when it cannot be used."""
    try:
        return decode(read_own(path), now, wall)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        what = "the verdicts of before cannot be used"
        aside = keep_aside(path)
        log.warning("%s: %s: %s; all backends are asked anew; %s", path, what, why(error), aside)
        return []


def save(path: Path, data: bytes) -> None:
    """Replace the file, unsynced. Raises OSError."""
    write_aside(path, data)


def _fields(record: Record, offset: float) -> list[Any]:
    flapping = record.flapping
    return [
        str(record.state),
        round(record.since + offset, 3),
        record.last,
        record.changes,
        None if record.serves_since is None else round(record.serves_since + offset, 3),
        None if record.weight is None else str(record.weight),
        [round(change + offset, 3) for change in flapping.changes],
        flapping.level,
        round(flapping.held_until + offset, 3),
    ]


def _entry(entry: list[Any], offset: float) -> Remembered:
    address, port, kind, at, state, since, last, changes, serves, weight, flaps, level, held = entry
    flapping = Flapping(tuple(_moment(t, offset) for t in flaps), int(level), _moment(held, offset))
    if level and not flaps:
        raise ValueError("held down without a change")
    record = Record(
        _moment(since, offset),
        State(state),
        last=one_line(str(last)),
        changes=int(changes),
        serves_since=None if serves is None else _moment(serves, offset),
        weight=None if weight is None else parse_weight(str(weight)),
        flapping=flapping,
    )
    if not 0 <= record.changes < _MOST_CHANGES or abs(flapping.level) > _MOST_CHANGES:
        raise ValueError(f"{changes!r} changes")
    return (str(address), int(port), str(kind)), _moment(at, offset), record


def _moment(seconds: Any, offset: float) -> float:
    """A moment of the calendar by the monotonic clock."""
    if not 0 <= seconds < _END_OF_TIME:
        raise ValueError(f"{seconds!r} is no time")
    return float(seconds) - offset


class SavedVerdicts:
    """The file of verdicts. A failure to write it is told once, and tried again."""

    def __init__(self, path: Path | None, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._path, self._clock, self._wall = path, clock, wall
        self._saved_at = clock()
        self.fault = ""
        """Why verdicts cannot be saved; empty while they can. Contained here: a loop that ended with it would
        end all checks."""
        self._one_at_a_time = threading.Lock()
        self.stale = False
        """Verdicts have changed since the last save."""

    def load(self) -> list[Remembered]:
        """What is in the file and not too old."""
        return [] if self._path is None else load(self._path, self._clock(), self._wall())

    @property
    def due(self) -> bool:
        """Whether something has changed, or what is saved grows old."""
        return self._path is not None and (
            self.stale or self._clock() - self._saved_at >= SAVE_ANYWAY_SECONDS
        )

    def save(self, known: Iterable[Remembered]) -> None:
        """Save now. May run in a thread."""
        if self._path is None:
            return
        self.stale = False
        try:
            with self._one_at_a_time:
                save(self._path, encode(known, self._clock(), self._wall()))
        except OSError as error:
            if str(error) != self.fault:
                log.warning("verdicts cannot be saved: %s", error)
            self.stale, self.fault = True, str(error)
            return
        self._saved_at, self.fault = self._clock(), ""
