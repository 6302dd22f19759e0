"""Verdicts on disk: a restart must not send flows to backends that are known to be dead.

A small file, trusted for ten minutes only; its loss costs the time of some checks, so it is not synced.
Older versions read it too: newer fields are separate from those that they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vipd.health.flapping import Flapping
from vipd.health.record_cache import MAX_AGE_SECONDS, SavedRecord
from vipd.health.result import one_line, parse_weight
from vipd.health.state import HealthRecord, HealthState
from vipd.host.containment import log_once
from vipd.host.durable import error_text, move_aside, read_own, write_atomically

log = logging.getLogger(__name__)

MAX_SAVE_INTERVAL_SECONDS = 60.0
"""Unchanged verdicts are saved at this interval, since saved ones age."""

MIN_SAVE_INTERVAL_SECONDS = 0.1
"""Minimum time between saves, so that many backends that fail one by one do not cause many writes."""
INVERSE_SAVE_TIME_SHARE = 10
"""Saving takes at most one part in ten of the time, however large the file is."""

HANGS_SECONDS = 10.0
"""A save that takes longer is reported."""
LAST_SECONDS = 2.0
"""How long vipd waits at its end for a save that hangs."""

_FORMAT = 1
_ENTRIES_AT_ONCE = 500
"""Entries encoded at a time while Python's lock is held."""
_END_OF_TIME = 1e11
ROUNDING_SECONDS = 0.01
"""A verdict of this very moment may be later than now by that: two clocks are read, and the file has
milliseconds."""
_MOST_CHANGES = 2**53

CollectRecords = Callable[[], Iterable[SavedRecord]]
"""A snapshot of all verdicts to save; it may be called in a thread."""


def encode(known: Iterable[SavedRecord], now: float, wall: float) -> bytes:
    """The file's content. `now` and `wall` are the same moment by the monotonic clock and by the calendar.

    Older versions read `verdicts`, where the last entry for a place counts: a healthy one, if any, which has
    the same effect as none. `checks` names the check of each verdict, and its services.
    """
    entries = sorted(known, key=lambda each: each.record.state is HealthState.HEALTHY)
    offset = wall - now
    verdicts = ([*e.place, round(e.at + offset, 3), *_fields(e.record, offset)] for e in entries)
    checks = ([each.check, *each.services] for each in entries)
    text = f'{{"format":{_FORMAT},"verdicts":{_list(verdicts)},"checks":{_list(checks)}}}'
    return text.encode()


def _list(entries: Iterator[list[Any]]) -> str:
    parts = []
    while some := list(islice(entries, _ENTRIES_AT_ONCE)):
        parts.append(json.dumps(some, separators=(",", ":"))[1:-1])
    return f"[{','.join(parts)}]"


def decode(data: bytes, now: float, wall: float) -> list[SavedRecord]:
    """The verdicts in the file that are not too old. Raises ValueError for a file of another program."""
    try:
        read = json.loads(data)
        if read["format"] != _FORMAT:
            raise ValueError(f"format {read['format']!r} is not known")
        verdicts = read["verdicts"]
        checks = read.get("checks") or [[""]] * len(verdicts)
        entries = [_entry(*both, wall - now) for both in zip(verdicts, checks, strict=True)]
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    fresh = [entry for entry in entries if -ROUNDING_SECONDS <= now - entry.at <= MAX_AGE_SECONDS]
    return sorted(fresh, key=lambda entry: entry.at)


def load(path: Path, now: float, wall: float) -> list[SavedRecord]:
    """The verdicts in the file; if it cannot be used, nothing, with a line in the log."""
    try:
        return decode(read_own(path), now, wall)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        what = "the verdicts of before cannot be used"
        aside = move_aside(path)
        log.warning("%s: %s: %s; all backends are asked anew; %s", path, what, error_text(error), aside)
        return []


def save(path: Path, data: bytes) -> None:
    """Replace the file, unsynced. Raises OSError."""
    write_atomically(path, data)


def _fields(record: HealthRecord, offset: float) -> list[Any]:
    flapping = record.flapping
    return [
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


def _entry(entry: list[Any], check: list[Any], offset: float) -> SavedRecord:
    address, port, kind, at, state, since, last, changes, serves, weight, flaps, level, held = entry
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
    id_, *services = map(str, check)
    place = str(address), int(port), str(kind)
    return SavedRecord(place, id_, tuple(services), _moment(at, offset), record)


def _moment(seconds: Any, offset: float) -> float:
    """A moment of the calendar by the monotonic clock."""
    if not 0 <= seconds < _END_OF_TIME:
        raise ValueError(f"{seconds!r} is no time")
    return float(seconds) - offset


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class RecordFile:
    """The file of verdicts. A failed write is reported once, and retried.

    Verdicts that keep a dead backend out of use are written at once, other changes after some seconds.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._path, self._clock, self._wall = path, clock, wall
        self._saved_at = clock()
        self._fault = ""
        self._lock = threading.Lock()
        self._began: float | None = None
        """Start time of the current save."""
        self._stale = self._urgent = False
        self._wake = asyncio.Event()

    @property
    def fault(self) -> str:
        """Why verdicts cannot be saved; empty while they can. Contained here: a loop that ended with it would
        end all checks."""
        hangs = 0.0 if self._began is None else self._clock() - self._began
        return f"the disk has not answered for {hangs:.0f} s" if hangs > HANGS_SECONDS else self._fault

    def load(self) -> list[SavedRecord]:
        """The saved verdicts that are not too old."""
        return [] if self._path is None else load(self._path, self._clock(), self._wall())

    def mark_changed(self, bad: bool) -> None:
        """A verdict differs from the saved one; `bad`: a restart without it would make a dead backend serve
        again. Call it from the event loop's thread."""
        self._stale = True
        if bad and not self._urgent and self._path is not None:
            self._urgent = True
            self._wake.set()

    @property
    def due(self) -> bool:
        """Whether something has changed, or the saved verdicts become old."""
        return self._path is not None and (
            self._stale or self._clock() - self._saved_at >= MAX_SAVE_INTERVAL_SECONDS
        )

    async def run(self, known: Callable[[], CollectRecords], pause: float) -> None:
        """Save for ever whenever it is due: urgent changes at once, all others `pause` seconds later."""
        self._wake = asyncio.Event()
        while True:
            if not self._urgent:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
            self._wake.clear()
            self._stale |= self._urgent  # an urgent change is also a change; otherwise this would never wait
            if not self.due:
                continue
            began = self._clock()
            await self._save_in_thread(known())
            took = self._clock() - began
            await asyncio.sleep(
                pause if self._fault else max(MIN_SAVE_INTERVAL_SECONDS, took * (INVERSE_SAVE_TIME_SHARE - 1))
            )

    async def _save_in_thread(self, known: CollectRecords) -> None:
        """Save in a separate thread: those of the shared pool may all be busy, or hang."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def work() -> None:
            self._write(known)
            with contextlib.suppress(RuntimeError):  # the loop is closed: vipd has ended
                loop.call_soon_threadsafe(_settle, done)

        self._stale = self._urgent = False
        try:
            threading.Thread(target=work, name="vipd verdicts", daemon=True).start()
        except RuntimeError as error:
            self._failed(f"no thread for it: {error}")
            return
        await done

    def save(self, known: CollectRecords) -> None:
        """Save now, and wait for it, but not for a save that hangs."""
        self._stale = self._urgent = False
        self._write(known)

    def _write(self, known: CollectRecords) -> None:
        if self._path is None:
            return
        if not self._lock.acquire(timeout=LAST_SECONDS):
            self._failed(self.fault or "the disk does not answer")
            return
        try:
            self._began = self._clock()
            save(self._path, encode(known(), self._clock(), self._wall()))
        except OSError as error:
            self._failed(str(error))
        except Exception as error:
            self._failed(log_once(error, "saving verdicts"))
        else:
            self._saved_at, self._fault = self._clock(), ""
        finally:
            self._began = None
            self._lock.release()

    def _failed(self, fault: str) -> None:
        if fault != self._fault:
            log.warning("verdicts cannot be saved: %s", fault)
        self._stale, self._fault = True, fault
