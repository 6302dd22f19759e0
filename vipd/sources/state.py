"""A SQLite database of the state directory: `state.db`, what vipctl's users changed, or `cache.db` (`cache`).

A *change* is one transaction, on disk and synced before it is answered (guarantee G4): after a crash at any
moment, or a power cut, the file has all of it or nothing. The same transaction is made, unsynced, in a *copy*
beside it, which takes its place when it is damaged. A file without a copy is made anew then.

Facts that the code rests on:
- A connection is opened for each transaction: SQLite then sees a file that was moved or repaired meanwhile.
- SQLite follows a link in the place of a file. Root's tools work in the directory of the daemon's user, who
  may put one there at any moment; so files are opened with that user's rights (`setfsuid` concerns the
  calling thread alone, and takes root's rights over files with it), after a look at what stands there.
- With a rollback journal a change writes each page twice, and syncs three times; `extra` syncs the directory
  too, after which the removed journal cannot come back with a power cut. A write-ahead log is not faster for
  one change at a time (among 10,000 services: 80 KiB and 4 ms, as here), takes twice the writes to the disk,
  makes readers write, and a backup of the one file would lack what the log has.
- A journal is applied to whatever file has the name before its suffix, so it goes with its file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from vipd.host.durable import (
    error_text,
    make_directory,
    move_aside,
    open_own,
    read_fault,
    remove_own,
    rename_own,
    sync_directory,
)

T = TypeVar("T")
Connection = sqlite3.Connection

FILE_NAME = "state.db"
COPY_SUFFIX = ".last-good"
MAX_BYTES = 2**30
"""Of the file: files of services.d, keys of etcd and answers for names may be some hundred MiB."""
_FORM = 1
"""`user_version` of the tables."""
_BUSY_SECONDS = 5.0
"""How long one of root's tools waits for the daemon's change, or the daemon for theirs."""
_NOT_OURS = (ValueError, TypeError, KeyError)
"""What queries raise for content of another form than vipd's."""
_SCHEMA = """
create table change (revision integer primary key, first integer not null, at text not null,
                     by text not null, reason text not null, actions text not null, named text not null,
                     size integer not null, confirmation text);
create table changed (revision integer not null references change on delete cascade, name text not null,
                      before text, after text, unique (revision, name));
create table service (name text primary key, text text not null);
create table override (target text not null, text text not null);
"""
"""Texts are JSON: of a service, its item of a declaration. `change.first` is that of `history.Entry`,
`change.size` that of its texts. `application_id` is another number after each change, by which the copy is
known to have it; it stands in the page that each change writes anyway."""


class StoreError(RuntimeError):
    """What is stored cannot be read or changed; the text gives the reason."""


class StateFile:
    """The database and its copy. Calls block on the disk; one at a time is carried out."""

    def __init__(
        self, path: Path, repair: bool = True, *, schema: str = _SCHEMA, has_copy: bool = True
    ) -> None:
        """`repair`: whether a damaged file is replaced by its copy; a tool that only looks leaves it.
        `has_copy`: False for what can be done without; it is whole after a power cut, but may be older."""
        self.path, self._repair = path, repair
        self._schema, self._synchronous = schema, "extra" if has_copy else "normal"
        self._copy = path.with_name(path.name + COPY_SUFFIX) if has_copy else None
        self._lock = threading.RLock()
        self.fault = ""
        """Why the database cannot be used; then it is left alone, and nothing can be changed."""
        self.damage = ""
        """What became of a damaged file that was found since the last `open`."""
        self.reads_copy = False
        """Whether the database cannot be used, and its copy is read."""

    def open(self) -> None:
        """Look at the database; a missing one comes with the first change. A damaged one is kept aside, and
        the copy takes its place; the copy of one that cannot be read is read. Never raises."""
        with self._lock:
            self.fault, self.damage, self.reads_copy = "", "", False
            try:
                # The first change may have been cut off; then there is no copy, either.
                empty = _exists(self.path) and _form_of(self.path) == 0
                if empty and self._copy and _exists(self._copy):
                    raise _DamagedError("it is empty")
            except _DamagedError as error:
                self._replace_damaged(str(error))
            except (sqlite3.Error, OSError) as error:
                self._read_copy(_read_fault(self.path, error))

    def read(self, query: Callable[[Connection], T]) -> T | None:
        """What a query returns; None if there is no database. Raises StoreError."""
        if self.fault and not self.reads_copy:
            raise StoreError(self.fault)
        path = self._copy if self._copy and self.reads_copy else self.path
        try:
            with self._lock:
                if not _exists(path):
                    return None
                with _transaction(path) as database:
                    return query(database) if _form(database) else None
        except (sqlite3.Error, OSError, _DamagedError) as error:
            raise StoreError(_read_fault(path, error)) from None
        except _NOT_OURS as error:
            raise StoreError(f"{path}: has what vipd does not write: {error}") from None

    def change(self, work: Callable[[Connection], object], query: Callable[[Connection], T]) -> T:
        """Carry out a change, which is on disk when this returns, and again in the copy; returns what a query
        finds after it. Raises StoreError; then nothing has changed."""
        with self._lock:
            try:
                return self._change(work, query)
            except _DamagedError:
                self.open()  # which puts the copy in its place
            try:
                return self._change(work, query)
            except _DamagedError as error:
                raise StoreError(f"{self.path}: {error}; nothing has changed") from None

    def _change(self, work: Callable[[Connection], object], query: Callable[[Connection], T]) -> T:
        """Raises StoreError, and _DamagedError."""
        if self.fault:
            raise StoreError(f"the store cannot be changed: {self.fault}" if self._copy else self.fault)
        number = 1 + secrets.randbelow(2**31 - 1)
        try:
            make_directory(self.path.parent)
            with _transaction(self.path, self._schema, self._synchronous) as database:
                before = _mark(database)
                work(database)
                database.execute(f"pragma application_id = {number}")
                result = query(database)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.path}: cannot be written: {_why(error, self.path)}") from None
        except _NOT_OURS as error:
            raise StoreError(f"{self.path}: has what vipd does not write: {error}") from None
        if self._copy:
            with contextlib.suppress(sqlite3.Error, OSError, _DamagedError):  # the next change tries again
                self._follow(self._copy, work, before, number)
        return result

    def _follow(self, path: Path, work: Callable[[Connection], object], before: int, number: int) -> None:
        """Bring the copy to the state of the database, of which it lacks this change, or more."""
        with contextlib.suppress(_DamagedError), _transaction(path, self._schema, "off") as copy:
            if _mark(copy) == before:
                work(copy)
                copy.execute(f"pragma application_id = {number}")
                return
        _duplicate(self.path, path, "off")

    def _read_copy(self, why: str) -> None:
        missing = self._fault_of_copy()
        self.reads_copy = not missing
        if self._copy is None:
            self.fault = why
            return
        serving = (
            f"no good copy of it can be read: {missing}" if missing else "its last good copy goes on serving"
        )
        reason, *hint = why.partition("; hint: ")
        self.fault = f"{reason}; {serving}{''.join(hint)}"

    def _fault_of_copy(self) -> str:
        """Why the copy cannot be used; empty: it can."""
        try:
            if self._copy is None or not _exists(self._copy):
                return "there is none"
            return "" if _form_of(self._copy) else "it is empty"
        except (sqlite3.Error, OSError, _DamagedError) as error:
            return _why(error, self._copy or self.path).partition("; hint: ")[0]

    def _replace_damaged(self, why: str) -> None:
        missing = self._fault_of_copy()
        if not self._repair:
            self._read_copy(f"{self.path}: {why}")
        elif missing or self._copy is None:
            self._remove_damaged(why, missing)
        else:
            try:
                self._put_copy(self._copy, why)
            except (sqlite3.Error, OSError, _DamagedError) as error:
                self._read_copy(f"{self.path}: {why}; it cannot be replaced: {_why(error, self.path)}")

    def _remove_damaged(self, why: str, missing: str) -> None:
        kept = move_aside(self.path)
        text = f"{self.path}: {why}; {kept}"
        if self._copy:
            text += f"; no good copy of it can be read: {missing}"
        if self.path.exists():
            self.fault = f"{text}; hint: move it aside, then vipctl reload"
        else:
            self.damage = text
            with contextlib.suppress(OSError):
                remove_own(_journal(self.path))

    def _put_copy(self, copy: Path, why: str) -> None:
        """Put the copy in the place of the damaged file, in one step. Raises sqlite3.Error, OSError and
        _DamagedError."""
        aside = self.path.with_name(f"{self.path.name}.new")
        _duplicate(copy, aside, self._synchronous)
        kept = move_aside(self.path, keep_original=True)
        remove_own(_journal(self.path))
        rename_own(aside, self.path.name)
        sync_directory(self.path.parent)
        self.damage = f"{self.path}: {why}; {kept}; its copy has taken its place"


def _duplicate(path: Path, to: Path, synchronous: str) -> None:
    """Make a file of what a database has, instead of one that is there."""
    with contextlib.suppress(FileNotFoundError):
        remove_own(to)
        remove_own(_journal(to))
    with _transaction(path) as source, _opened(to, make=True, synchronous=synchronous) as target:
        source.backup(target)


@contextlib.contextmanager
def _transaction(path: Path, schema: str = "", synchronous: str = "extra") -> Iterator[Connection]:
    """A transaction that is committed at the end of the block; without a schema it only reads. Raises
    sqlite3.Error, OSError and _DamagedError."""
    with _opened(path, make=bool(schema), synchronous=synchronous) as database:
        database.execute("begin immediate" if schema else "begin")
        try:
            if schema and _form(database) == 0:
                for statement in filter(str.strip, schema.split(";")):
                    database.execute(statement)
                database.execute(f"pragma user_version = {_FORM}")
            yield database
            database.execute("commit")
        finally:
            if database.in_transaction:
                database.execute("rollback")


class _DamagedError(Exception):
    """A file is no database, or a damaged one."""


def _exists(path: Path) -> bool:
    """Whether there is a file that may be opened. Raises OSError for what is none of vipd's."""
    for name in (path, _journal(path)):
        with contextlib.suppress(FileNotFoundError):
            status = name.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, f"{name.name} is not a regular file")
            if status.st_size > MAX_BYTES:
                raise OSError(0, f"{name.name} is larger than {MAX_BYTES >> 20} MiB")
    return path.exists()


def _form_of(path: Path) -> int:
    """The form of a database that is whole; 0: it is empty. Raises _DamagedError, and sqlite3.Error and
    OSError for one that cannot be read."""
    with _opened(path) as database:
        (result,) = database.execute("pragma quick_check(1)").fetchone()
        form = _form(database)
    if result != "ok":
        raise _DamagedError(f"it is damaged: {' '.join(str(result).split())}")
    if form > _FORM:
        hint = "hint: install that version, or move the file aside, then vipctl reload"
        raise OSError(0, f"a newer version of vipd wrote it (form {form}, this one knows {_FORM}); {hint}")
    return form


def _form(database: Connection) -> int:
    (form,) = database.execute("pragma user_version").fetchone()
    return int(form)


def _mark(database: Connection) -> int:
    (number,) = database.execute("pragma application_id").fetchone()
    return int(number)


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}-journal")


@contextlib.contextmanager
def _opened(path: Path, *, make: bool = False, synchronous: str = "extra") -> Iterator[Connection]:
    """A connection, with the rights of the directory's owner. Raises sqlite3.Error, OSError and
    _DamagedError."""
    with _as_owner(path.parent):
        if not _exists(path) and make:
            # SQLite gives the journal the rights of this file.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640))
        address = f"{path.absolute().as_uri()}?mode=rw"  # a file that is gone meanwhile is not made
        try:
            database = sqlite3.connect(address, timeout=_BUSY_SECONDS, isolation_level=None, uri=True)
            with contextlib.closing(database):
                for pragma in (
                    "trusted_schema = off",  # functions in the schema of a forged file are not called
                    "cell_size_check = on",
                    "foreign_keys = on",
                    "temp_store = memory",  # no files outside of the directory
                    # What is larger would not be opened again; a page has 4096 bytes.
                    f"max_page_count = {MAX_BYTES // 4096}",
                    f"synchronous = {synchronous}",
                ):
                    database.execute(f"pragma {pragma}")
                yield database
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
            ):
                raise _DamagedError(f"it is damaged: {error}") from None
            raise


@contextlib.contextmanager
def _as_owner(directory: Path) -> Iterator[None]:
    """This thread's access to files with the rights of a directory's owner, if this is root. Raises
    OSError."""
    owner = directory.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        yield
        return
    libc = ctypes.CDLL(None)
    libc.setfsgid(owner.st_gid)
    libc.setfsuid(owner.st_uid)
    try:
        if libc.setfsuid(-1) != owner.st_uid:  # it tells only what was
            raise OSError(errno.EPERM, f"root cannot take the rights of the owner of {directory}")
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(os.getegid())


def _read_fault(path: Path, error: Exception) -> str:
    reason = _why(error, path)
    if reason == os.strerror(errno.EACCES):
        return read_fault(path, PermissionError(errno.EACCES, reason))
    return f"{path}: cannot be read: {reason}"


def _why(error: Exception, path: Path) -> str:
    """What hindered SQLite, which knows the system's error but does not tell it."""
    if isinstance(error, OSError):
        return error_text(error)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        room = os.statvfs(path.parent)
        full = room.f_bavail * room.f_frsize < MAX_BYTES
        return os.strerror(errno.ENOSPC) if full else f"it would be larger than {MAX_BYTES >> 20} MiB"
    if code == sqlite3.SQLITE_BUSY:
        return f"another program has kept it locked for {_BUSY_SECONDS:g} seconds"
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        with contextlib.suppress(OSError):
            if os.statvfs(path.parent).f_favail == 0 < os.statvfs(path.parent).f_files:
                return os.strerror(errno.ENOSPC)
        try:
            with _as_owner(path.parent):
                os.close(open_own(path, os.O_RDWR))
        except OSError as reason:
            return error_text(reason)
    return str(error)
