"""`cache.db` of the state directory: what the next start has before anybody else answers.

It holds the last good versions of files, of etcd's keys and of answers for names, verdicts of checks, totals
of counters, events. All of it comes from elsewhere, and much of it changes all the time; what vipctl's users
change is in another file, `state.db`: a change of theirs is synced before it is answered, and would wait for
the lock while ten thousand verdicts are written; its copy would have all that twice; and damage of one file
leaves the other.

Each owner has a *bucket* of texts by key, and puts what has changed. That never waits: one thread writes
soon, all that has come since in one transaction, of each key the newest. So the file has the state of one
moment, and a change costs what changed. A crash loses the last moment, a power cut perhaps a few seconds. A
damaged file is kept aside; a new one gets all that the owners know.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from vipd.host.containment import log_once
from vipd.sources.state import Connection, StateFile, StoreError

T = TypeVar("T")
Value = str | bytes | bytearray

FILE_NAME = "cache.db"
GATHER_SECONDS = 0.02
"""From a change to its write: more follow a moment later, and are written with it."""
MAX_PAUSE_SECONDS = 5.0
PAUSE_FACTOR = 9
"""After a write the disk is left alone for so many times as long as that took."""
RETRY_SECONDS = 2.0
"""After a write that failed."""
HANGS_SECONDS = 10.0
"""A write that takes longer is reported."""
LAST_SECONDS = 2.0
"""How long vipd waits at its end for a write that hangs."""
_SCHEMA = """
create table entry (bucket text not null, key blob not null, value blob not null, primary key (bucket, key))
without rowid;
"""
"""Without row numbers a bucket is read in one go: in a quarter of the time at 100,000 keys."""

_UPSERT = """
insert into entry values (?, ?, ?) on conflict (bucket, key) do update set value = excluded.value
"""

log = logging.getLogger(__name__)


class Bucket(Generic[T]):
    """What one owner keeps. For any thread."""

    def __init__(
        self,
        cache: Cache,
        name: str,
        encode: Callable[[T], Value],
        whole: Callable[[], Mapping[str, T]],
    ) -> None:
        self.name, self.encode, self.whole = name, encode, whole
        self._cache = cache

    def load(self) -> dict[str, Value]:
        """All that an earlier run has kept, in order of the keys; nothing if that cannot be read. Blocks."""
        return self._cache.load(self.name)

    def put(self, changes: Mapping[str, T | None]) -> None:
        """Keep these values instead of those of their keys; None: remove it."""
        self._cache.put(self, changes)

    def write(self) -> None:
        """Write now what has been put. Blocks. Raises StoreError, which is also the cache's fault."""
        self._cache.write()

    def clear(self) -> None:
        """Keep nothing of an earlier run. Blocks."""
        self.put(dict.fromkeys(self.load()))


class Cache:
    """The database. The first change begins a thread that writes; `close` ends it."""

    def __init__(self, path: Path, repair: bool = True) -> None:
        """`repair`: whether a damaged file is kept aside; a tool that only looks leaves it."""
        self._file = StateFile(path, repair, schema=_SCHEMA, has_copy=False)
        self._buckets = dict[str, Bucket[Any]]()
        self._pending = dict[str, dict[str, Any]]()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._news, self._ended = threading.Event(), threading.Event()
        self._begun = False
        """The thread has begun."""
        self._began: float | None = None
        """When the write that goes on began, on the monotonic clock."""
        self._fault = ""
        self._file.open()
        self._report_damage()
        self._note_fault(self._file.fault)

    def bucket(
        self,
        name: str,
        encode: Callable[[T], Value],
        whole: Callable[[], Mapping[str, T]],
    ) -> Bucket[T]:
        """The bucket of an owner. The writing thread calls both: `encode` makes a text of a value, `whole`
        returns all that the owner would have kept, for a new file."""
        self._buckets[name] = Bucket(self, name, encode, whole)
        return self._buckets[name]

    @property
    def fault(self) -> str:
        """Why the file cannot be used; empty while it can."""
        began = self._began
        hangs = 0.0 if began is None else time.monotonic() - began
        if hangs > HANGS_SECONDS:
            return f"{self._file.path}: the disk has not answered for {hangs:.0f} s"
        return self._fault

    @property
    def warnings(self) -> tuple[str, ...]:
        """The fault with what it means, if there is one."""
        means = (
            "a restart begins without what has changed since: verdicts, totals, events, last good versions"
        )
        return (f"{self.fault}; {means}",) if self.fault else ()

    def close(self) -> None:
        """Write the rest. Blocks, for some seconds at most; a failure is logged."""
        self._ended.set()
        self._news.set()  # which ends the thread
        if self._writing.acquire(timeout=LAST_SECONDS):
            self._writing.release()
            with suppress(StoreError):
                self.write()

    def put(self, bucket: Bucket[T], changes: Mapping[str, T | None]) -> None:
        """As `Bucket.put`."""
        if not changes:
            return
        with self._lock:
            self._pending.setdefault(bucket.name, {}).update(changes)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            begin, self._begun = not self._begun, True
        if begin:
            try:
                # Not of the shared pool, whose threads may all be busy, or hang.
                threading.Thread(target=self._run, name="vipd cache", daemon=True).start()
            except RuntimeError as error:
                self._begun = False
                self._note_fault(f"{self._file.path}: there is no thread to write it: {error}")
        self._news.set()

    def load(self, bucket: str) -> dict[str, Value]:
        """As `Bucket.load`."""
        try:
            rows = self._file.read(partial(_rows, bucket=bucket))
        except StoreError as error:
            log.warning("%s; what it had is not known", error)
            return {}
        return rows or {}

    def write(self) -> None:
        """Write what has been put. Blocks. Raises StoreError; then it is written the next time."""
        with self._writing:
            with self._lock:
                pending, self._pending = self._pending, {}
            if not pending:
                return
            self._began = time.monotonic()
            try:
                if self._file.fault:
                    self._file.open()  # it may be readable now
                self._file.change(partial(self._store, pending), lambda _: None)
            except Exception as error:
                self._keep_pending(pending)
                if isinstance(error, StoreError):
                    self._note_fault(str(error))
                raise
            finally:
                self._began = None
                self._report_damage()
            self._note_fault("")

    def _run(self) -> None:
        pause = 0.0
        while not self._ended.is_set():
            self._news.wait()
            self._ended.wait(max(GATHER_SECONDS, pause))
            self._news.clear()
            began = time.monotonic()
            try:
                self.write()
                pause = min(PAUSE_FACTOR * (time.monotonic() - began), MAX_PAUSE_SECONDS)
            except StoreError:
                pause = RETRY_SECONDS
                self._news.set()
            except Exception as error:
                self._note_fault(log_once(error, "writing the cache"))
                pause = RETRY_SECONDS
                self._news.set()

    def _store(self, pending: Mapping[str, Mapping[str, Any]], database: Connection) -> None:
        (mark,) = database.execute("pragma application_id").fetchone()
        for bucket in tuple(self._buckets.values()):  # at the start owners still come
            changes = pending.get(bucket.name, {})
            if mark == 0:  # the file is new
                changes = {**bucket.whole(), **changes}
            gone = ((bucket.name, _bytes(key)) for key, value in changes.items() if value is None)
            database.executemany("delete from entry where bucket = ? and key = ?", gone)
            database.executemany(_UPSERT, _encoded(bucket, changes))

    def _keep_pending(self, pending: Mapping[str, Mapping[str, Any]]) -> None:
        with self._lock:
            newer, self._pending = self._pending, {}
            for changes in (pending, newer):
                for name, values in changes.items():
                    self._pending.setdefault(name, {}).update(values)

    def _report_damage(self) -> None:
        if self._file.damage:
            log.warning("%s; what it had is not known", self._file.damage)
            self._file.damage = ""

    def _note_fault(self, fault: str) -> None:
        if fault and fault != self._fault:
            log.warning("%s", fault)
        self._fault = fault


def _rows(database: Connection, bucket: str) -> dict[str, Value]:
    query = "select key, value from entry where bucket = ?"
    rows = database.execute(query, (bucket,))
    return {_key(bytes(key)): value for key, value in rows}


def _key(key: bytes) -> str:
    try:
        return key.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return key.decode("utf-8", "replace")  # nobody knows it


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _encoded(bucket: Bucket[Any], changes: Mapping[str, Any]) -> Iterator[tuple[str, bytes, Value]]:
    """The rows of what is not removed; a value that cannot be encoded is left out, and logged."""
    for key, value in changes.items():
        if value is not None:
            try:
                yield bucket.name, _bytes(key), bucket.encode(value)
            except Exception as error:
                log_once(error, f"keeping an entry of {bucket.name}")
