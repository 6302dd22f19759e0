"""The last known state of etcd's keys on this host's disk: what serves while etcd is away.

What is needed of it:
- The state it gives back was the store's at some revision, never a mix: one line of the file is one change,
  written as a whole and with a checksum, and reading ends at the first line that is not sound.
- Each service that served can serve again, also where its newest value is bad or where it is held: the
  accepted value is kept beside the newest one.
- A change costs its own size, not that of all keys: lines are appended. When they have grown past the state
  itself, it is written anew and renamed over.
Lines that come together are synced together, at once unless the disk is slow. What an end in that moment
loses etcd reports again, as it synced it before we learned of it; of a key that became bad meanwhile an
older value serves then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vipd.host.durable import keep_aside, make_directory, open_own, read_own, why, write_durably
from vipd.host.supervisor import Pace, Task

log = logging.getLogger(__name__)

FORMAT = 1
GATHER_SECONDS = 0.02
"""From a change to its writing: that it is accepted is noted a moment after it, and written with it."""
LONGEST_REST_SECONDS = 1.0
RESTS = 4
"""After a write the disk is left alone for so many times as long as that took."""
AGAIN_SECONDS = 30.0
"""After a write that failed."""
LEAST_GROWTH = 262_144
"""Bytes of appended lines below which the file is not written anew."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One key. Values are text, undecodable bytes as lone surrogates."""

    value: str
    mod_revision: int
    accepted: str | None = None
    """The value that serves, which may be an older one."""
    held: bool = False
    """The key is gone from the store, and its removal is held back."""
    create_revision: int = 0
    """0: not known, as of keys that an older vipd kept."""


@dataclass(slots=True)
class State:
    """Every followed key at one revision of one store."""

    cluster: str = ""
    revision: int = 0
    keys: dict[str, Kept] = field(default_factory=dict)


Record = dict[str, Any]

_GARBAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading a record raises that is none."""


@dataclass(frozen=True, slots=True)
class _Work:
    """One visit to the disk: lines to append, or the whole state. Numbered in the order of what they hold."""

    number: int
    lines: bytes
    state: State | None


class Snapshot:
    """The file. `load` first; then changes are noted, `run` brings them to disk, and `close` what is left."""

    def __init__(self, path: Path, prefix: str, state: Callable[[], State]) -> None:
        self._path, self._prefix, self._state = path, prefix, state
        self._lines: list[bytes] = []
        self._noted = asyncio.Event()
        self._size = 0
        self._grown = 0
        self._made = self._done = 0
        self._writing = threading.Lock()
        self._rewrite = True  # the first write of a process: whatever lies behind an unsound line goes
        self._underway = False
        """Whether a write has begun of which is not known how it ended."""
        self.task = Task(Pace(AGAIN_SECONDS, AGAIN_SECONDS), named_elsewhere=True)
        """How it is run, and how that goes: its fault is why the file cannot be written."""

    def load(self) -> State:
        """What the file holds; nothing when there is none, or when it is of another prefix.

        A file that is not sound is kept aside, with a line in the log: as far as it is sound it counts.
        """
        try:
            lines = read_own(self._path).split(b"\n")
        except FileNotFoundError:
            return State()
        except OSError as error:
            self._unsound(why(error))
            return State()
        state, read = State(), 0
        # What is sound by its checksum, but not of this program, ends the reading too.
        with contextlib.suppress(*_GARBAGE):
            for record in _sound(lines):
                if read == 0 and not self._begins(record):
                    return State()
                _replay(state, record)
                read += 1
        if len(lines) - read > 1 or (read == 0 and lines[0]):  # the last one is empty, or torn
            self._unsound(f"line {read + 1} is not as it was written", stays=True)
        return state

    def _begins(self, head: Record) -> bool:
        """Whether what follows the first line is of this prefix. Raises for what is no first line."""
        if head["format"] != FORMAT:
            raise ValueError("another format")
        return bool(head["prefix"] == self._prefix)

    def _unsound(self, what: str, stays: bool = False) -> None:
        meaning = "what it said from there on is not known until etcd tells it"
        aside = keep_aside(self._path, stays)
        log.warning("%s: cannot be read: %s; %s; %s", self._path, what, meaning, aside)

    def note(self, record: Record) -> None:
        """Bring one change to disk soon."""
        self._lines.append(_line(record))
        self._noted.set()

    async def run(self) -> None:
        """Write what is noted, for ever. Raises OSError, and writes the whole state when it is run again."""
        if self._lines or self._underway:
            self._noted.set()
        now, rested = asyncio.get_running_loop().time, 0.0
        while True:
            await self._noted.wait()
            await asyncio.sleep(max(GATHER_SECONDS, rested - now()))
            self._noted.clear()
            work, began = self._work(), now()
            self._underway = True
            await asyncio.to_thread(self._do, work)
            self._underway = False
            rested = now() + min(RESTS * (now() - began), LONGEST_REST_SECONDS)
            self.task.works()

    def close(self) -> None:
        """Write the rest. Blocks; a failure is logged."""
        if self._lines or self._underway:
            try:
                self._do(self._work())
            except OSError as error:
                log.warning("%s", error)

    def _work(self) -> _Work:
        """What to write: lines, or the whole state in their place."""
        self._made += 1
        lines, self._lines = self._lines, []
        # Whether a thread has done what was begun is not known here: the whole state is right either way.
        self._rewrite = self._rewrite or self._underway
        if not self._rewrite and self._grown <= max(LEAST_GROWTH, self._size):
            return _Work(self._made, b"".join(lines), None)
        state = self._state()
        return _Work(self._made, b"", State(state.cluster, state.revision, dict(state.keys)))

    def _do(self, work: _Work) -> None:
        with self._writing:
            # A thread cannot be cancelled: what it was late with must not come after what is newer.
            if work.number <= self._done:
                return
            self._done = work.number
            try:
                self._bring(work)
                self._rewrite = False
            except OSError as error:
                what = f"{self._path}: cannot be written: {error.strerror or error}"
                raise OSError(f"{what}; hint: services outlive no restart") from None

    def _bring(self, work: _Work) -> None:
        if work.state is None:
            self._append(work.lines)
        else:
            self._write(work.state)

    def _append(self, data: bytes) -> None:
        descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND)
        with open(descriptor, "ab") as file:  # noqa: PTH123 (a descriptor, not a path)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._grown += len(data)

    def _write(self, state: State) -> None:
        whole = change_record(state.cluster, state.revision, state.keys.items(), ())
        data = _line({"format": FORMAT, "prefix": self._prefix}) + _line(whole)
        make_directory(self._path.parent)
        write_durably(self._path, data)
        self._size, self._grown = len(data), 0


def change_record(
    cluster: str, revision: int, put: Iterable[tuple[str, Kept]], gone: Iterable[str]
) -> Record:
    """One change: what is kept of some keys from now on, and keys that are no more."""
    kept_keys = list(put)
    return {
        "cluster": cluster,
        "revision": revision,
        "put": [_fields(key, kept) for key, kept in kept_keys],
        "gone": list(gone),
        # Beside the fields of a key, which older versions count.
        "created": {key: kept.create_revision for key, kept in kept_keys if kept.create_revision},
    }


def accepted_record(keys: Iterable[str]) -> Record:
    """The present values of these keys serve."""
    return {"accepted": list(keys)}


def _replay(state: State, record: Record) -> None:
    """Take a record over. Raises whatever a record raises that is none; then nothing of it counts."""
    for key in record.get("accepted", ()):
        if kept := state.keys.get(key):
            state.keys[key] = replace(kept, accepted=kept.value)
    if "revision" not in record:
        return
    cluster, revision = str(record["cluster"]), int(record["revision"])
    put, gone = [_kept(fields) for fields in record["put"]], [str(key) for key in record["gone"]]
    state.cluster, state.revision = cluster, revision
    created = {str(key): int(number) for key, number in record.get("created", {}).items()}
    state.keys.update((key, replace(kept, create_revision=created.get(key, 0))) for key, kept in put)
    for key in gone:
        state.keys.pop(key, None)


def _fields(key: str, kept: Kept) -> list[object]:
    """A key as the file holds it; an accepted value that is the newest one is not written twice."""
    accepted = True if kept.accepted == kept.value else kept.accepted
    return [key, kept.value, kept.mod_revision, accepted, kept.held]


def _kept(fields: list[Any]) -> tuple[str, Kept]:
    key, value, mod_revision, accepted, held = fields
    accepted = value if accepted is True else accepted
    if not isinstance(value, str) or not isinstance(accepted, str | None):
        raise ValueError("a value is no text")
    return str(key), Kept(value, int(mod_revision), accepted, bool(held))


def _line(record: Record) -> bytes:
    data = json.dumps(record, separators=(",", ":")).encode("ascii")
    return b"%08x %b\n" % (zlib.crc32(data), data)


def _sound(lines: Iterable[bytes]) -> Iterator[Record]:
    """The records up to the first line that is not as it was written."""
    for line in lines:
        checksum, _, data = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(data):
            return
        yield json.loads(data)
