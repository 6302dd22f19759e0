"""The last known state of etcd's keys on this host's disk: it serves while etcd is unreachable.

Requirements:
- The state that it restores was the store's at some revision, never a mix: one line of the file is one
  change, written as a whole and with a checksum, and reading ends at the first invalid line.
- Each service that served can serve again, even if its newest value is bad or held: the
  accepted value is kept beside the newest one.
- A change costs its own size, not that of all keys: lines are appended. When they have grown past the state
  itself, the file is written anew and renamed over the old one.
Lines that arrive together are synced together, at once unless the disk is slow. If vipd ends at that moment,
etcd reports the lost ones again, as it synced them before vipd received them; for a key that became bad in
between an older value then serves.
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

from vipd.host.durable import error_text, make_directory, move_aside, open_own, read_own, write_durably
from vipd.host.supervisor import Backoff, LoopState

log = logging.getLogger(__name__)

FORMAT = 1
WRITE_DELAY_SECONDS = 0.02
"""From a change to its write: its acceptance follows a moment later, and is written with it."""
MAX_PAUSE_SECONDS = 1.0
PAUSE_FACTOR = 4
"""After a write the disk is left alone for so many times as long as that took."""
RETRY_SECONDS = 30.0
"""After a write that failed."""
MIN_REWRITE_BYTES = 262_144
"""Bytes of appended lines below which the file is not rewritten."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key. Values are text, undecodable bytes as lone surrogates."""

    value: str
    mod_revision: int
    accepted: str | None = None
    """The value that serves, which may be an older one."""
    held: bool = False
    """The key is gone from the store, and its removal is held."""
    create_revision: int = 0
    """0: unknown, as for keys that an older vipd stored."""


@dataclass(slots=True)
class SnapshotState:
    """Every followed key at one revision of one store."""

    cluster: str = ""
    revision: int = 0
    keys: dict[str, StoredKey] = field(default_factory=dict)


Record = dict[str, Any]

_GARBAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions from reading an invalid record."""


class SnapshotFile:
    """The file. `load` first; then `run` writes recorded changes, and `close` the rest."""

    def __init__(self, path: Path, prefix: str, state: Callable[[], SnapshotState]) -> None:
        self._path, self._prefix, self._state = path, prefix, state
        self._lines: list[bytes] = []
        self._noted = asyncio.Event()
        self._size = 0
        self._grown = 0
        self._writing = threading.Lock()
        self._rewrite = True  # the first write of a process drops everything after an invalid line
        self._failed = False
        """The last write failed, and its lines are lost: the whole state is written next."""
        self.loop_state = LoopState(Backoff(RETRY_SECONDS, RETRY_SECONDS), reported_elsewhere=True)
        """How the loop is run, and its state: its fault is why the file cannot be written."""

    def load(self) -> SnapshotState:
        """The file's content; empty if there is no file, or one of another prefix.

        An invalid file is kept aside, with a line in the log: its valid part counts.
        """
        try:
            lines = read_own(self._path).split(b"\n")
        except FileNotFoundError:
            return SnapshotState()
        except OSError as error:
            self._unsound(error_text(error))
            return SnapshotState()
        state, read = SnapshotState(), 0
        # A record with a valid checksum that is not of this program also ends the reading.
        with contextlib.suppress(*_GARBAGE):
            for record in _sound(lines):
                if read == 0 and not self._begins(record):
                    return SnapshotState()
                _replay(state, record)
                read += 1
        if len(lines) - read > 1 or (read == 0 and lines[0]):  # the last one is empty, or torn
            self._unsound(f"line {read + 1} is not as it was written", stays=True)
        return state

    def _begins(self, head: Record) -> bool:
        """Whether the first line has this prefix. Raises for an invalid first line."""
        if head["format"] != FORMAT:
            raise ValueError("another format")
        return bool(head["prefix"] == self._prefix)

    def _unsound(self, what: str, stays: bool = False) -> None:
        meaning = "what it said from there on is not known until etcd tells it"
        aside = move_aside(self._path, stays)
        log.warning("%s: cannot be read: %s; %s; %s", self._path, what, meaning, aside)

    def enqueue(self, record: Record) -> None:
        """Bring one change to disk soon."""
        self._lines.append(_line(record))
        self._noted.set()

    async def run(self) -> None:
        """Write recorded changes, for ever. Raises OSError, and writes the whole state when run again."""
        if self._lines or self._failed:
            self._noted.set()
        now, rested = asyncio.get_running_loop().time, 0.0
        while True:
            await self._noted.wait()
            await asyncio.sleep(max(WRITE_DELAY_SECONDS, rested - now()))
            self._noted.clear()
            began = now()
            await asyncio.to_thread(self._write_rest)
            rested = now() + min(PAUSE_FACTOR * (now() - began), MAX_PAUSE_SECONDS)
            self.loop_state.clear_fault()

    def close(self) -> None:
        """Write the rest. Blocks; a failure is logged."""
        with self._writing:  # a thread of `run` may not have ended with it
            pending = self._lines or self._failed
        if pending:
            try:
                self._write_rest()
            except OSError as error:
                log.warning("%s", error)

    def _write_rest(self) -> None:
        """Append what has been recorded since the last write, or write the whole state. Raises OSError.

        The content is taken when the write begins, so that none is older than the one before.
        """
        with self._writing:
            lines, self._lines = self._lines, []
            try:
                if self._rewrite or self._failed or self._grown > max(MIN_REWRITE_BYTES, self._size):
                    # Lines that are recorded from here on may be in it already: they change nothing then.
                    state = self._state()
                    self._write(SnapshotState(state.cluster, state.revision, dict(state.keys)))
                else:
                    self._append(b"".join(lines))
                self._rewrite = self._failed = False
            except OSError as error:
                self._failed = True
                why = f"{self._path}: cannot be written: {error.strerror or error}"
                raise OSError(f"{why}; hint: services outlive no restart") from None

    def _append(self, data: bytes) -> None:
        descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND)
        with open(descriptor, "ab") as file:  # noqa: PTH123 (a descriptor, not a path)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._grown += len(data)

    def _write(self, state: SnapshotState) -> None:
        whole = change_record(state.cluster, state.revision, state.keys.items(), ())
        data = _line({"format": FORMAT, "prefix": self._prefix}) + _line(whole)
        make_directory(self._path.parent)
        write_durably(self._path, data)
        self._size, self._grown = len(data), 0


def change_record(
    cluster: str, revision: int, put: Iterable[tuple[str, StoredKey]], gone: Iterable[str]
) -> Record:
    """One change: the new state of some keys, and keys that are removed."""
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


def _replay(state: SnapshotState, record: Record) -> None:
    """Apply a record. Raises any exception for an invalid record; then nothing of it counts."""
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


def _fields(key: str, kept: StoredKey) -> list[object]:
    """A key in the form of the file; an accepted value that is also the newest is not written twice."""
    accepted = True if kept.accepted == kept.value else kept.accepted
    return [key, kept.value, kept.mod_revision, accepted, kept.held]


def _kept(fields: list[Any]) -> tuple[str, StoredKey]:
    key, value, mod_revision, accepted, held = fields
    accepted = value if accepted is True else accepted
    if not isinstance(value, str) or not isinstance(accepted, str | None):
        raise ValueError("a value is no text")
    return str(key), StoredKey(value, int(mod_revision), accepted, bool(held))


def _line(record: Record) -> bytes:
    data = json.dumps(record, separators=(",", ":")).encode("ascii")
    return b"%08x %b\n" % (zlib.crc32(data), data)


def _sound(lines: Iterable[bytes]) -> Iterator[Record]:
    """The records up to the first invalid line."""
    for line in lines:
        checksum, _, data = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(data):
            return
        yield json.loads(data)
