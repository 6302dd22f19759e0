"""Log records as entries of the journal with fields, by its native protocol
(systemd.io/JOURNAL_NATIVE_PROTOCOL).

Without libsystemd, which takes 0.8 MB of memory.
Entries that the journal rejects go to stderr without fields; the journal reads that as well.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from errno import EMSGSIZE, ENOBUFS
from pathlib import Path
from typing import NamedTuple

from vipd.host.systemd.fields import ATTRIBUTE, Fields, author_of
from vipd.model.text import one_line

SOCKET = Path("/run/systemd/journal/socket")
STDERR = 2
BACKLOG_RECORDS = 10_000
BACKLOG_BYTES = 8 << 20
"""Records that wait while nobody reads them."""
WAIT_SECONDS = 0.5
"""A thread that waits for the reader looks so often whether the process ends."""
AUTHOR_RECORDS, SHARE_SECONDS = 2000, 30.0
"""Records in so much time that are about one author's declarations. journald drops everything of a service
that logs more than 10,000 in 30 seconds, whoever caused it (RateLimitBurst of journald.conf(5))."""
CLOSE_SECONDS = 1.0
"""How long the end of the process waits for the reader."""
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Least weighty level of each syslog priority; anything below is 7, debug."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def priority(level: int) -> int:
    """The syslog priority of a logging level."""
    return next((number for least, number in PRIORITIES if level >= least), 7)


def stream_is_journal(environment: Mapping[str, str], descriptor: int = 2) -> bool:
    """Whether a file descriptor is the stream to the journal that JOURNAL_STREAM names (systemd.exec(5)).

    The variable alone is not enough: processes with another output inherit it too.
    """
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def entry(values: Iterable[tuple[str, str]]) -> bytes:
    """Fields in the protocol's form. A value of several lines follows its length."""
    return b"".join(_field(name, value.encode("utf-8", "surrogateescape")) for name, value in values)


def _field(name: str, value: bytes) -> bytes:
    if b"\n" in value:
        return name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"
    return name.encode() + b"=" + value + b"\n"


class LineFormatter(logging.Formatter):
    """One line for each record, a traceback included: no value can end it and begin another, or write to a
    terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line, with escapes for characters that are not printable."""
        return one_line(super().format(record))


class StreamFormatter(LineFormatter):
    """`<N>message`, N a syslog priority: the format that the journal reads from stderr (sd-daemon(3))."""

    def format(self, record: logging.LogRecord) -> str:
        """The message with its priority."""
        return f"<{priority(record.levelno)}>{super().format(record)}"


class _AuthorShares:
    """Counts the records about each author, of which it leaves out those beyond a share."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._began = float("-inf")

    def limited(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """The record; None: it is left out, and one before it said so."""
        author, now = _author_of(getattr(record, ATTRIBUTE, {})), time.monotonic()
        if not author:
            return record
        if now - self._began >= SHARE_SECONDS:
            self._began = now
            self._counts.clear()
        self._counts[author] += 1
        if self._counts[author] <= AUTHOR_RECORDS:
            return record
        if self._counts[author] > AUTHOR_RECORDS + 1:
            return None
        text = "%s: %d log records within %d s: further ones are left out until then"
        return _warning(text, author, AUTHOR_RECORDS, SHARE_SECONDS)


def _author_of(carried: Fields) -> str:
    """Whose declaration a record is about, or which user's change; empty: nobody's."""
    unit, cause = (next(iter(carried.get(name, ())), "") for name in ("VIPD_UNIT", "VIPD_CAUSE"))
    return author_of(unit, cause) if unit else ""


def _warning(text: str, *arguments: object) -> logging.LogRecord:
    values = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
    return logging.makeLogRecord({**values, "args": arguments})


class _Entry(NamedTuple):
    """A record as it is sent: to the journal, or without `data` to stderr."""

    data: bytes
    line: bytes


class StderrHandler(logging.Handler):
    """Writes each record as a line to stderr, and never waits for whoever reads it.

    What the reader does not take at once is written by a thread, and all later records after it. Beyond
    BACKLOG_RECORDS and BACKLOG_BYTES records are lost; their number is logged once all others are written.
    """

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(lines)
        self._lines = lines
        self._shares = _AuthorShares()
        self._writable = select.poll()
        self._writable.register(STDERR, select.POLLOUT)
        self._changed = threading.Condition()
        """Guards what follows."""
        self._backlog: deque[_Entry] = deque()
        self._backlog_bytes = self._lost = 0
        self._sending = self._closed = False
        # From the start, and not at a moment when there may be no memory for a thread.
        threading.Thread(target=self._send_backlog, name="vipd log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, or leave it to the thread."""
        try:
            written = self._shares.limited(record)
            if written is None:
                return
            entry = self._entry(written)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if not (self._backlog or self._sending or self._lost):
                left = self._send(entry, wait=False)
                if left is None:
                    return
                entry = left
            size = len(entry.data) + len(entry.line)
            if len(self._backlog) >= BACKLOG_RECORDS or self._backlog_bytes + size > BACKLOG_BYTES:
                self._lost += 1
                return
            self._backlog.append(entry)
            self._backlog_bytes += size
            self._changed.notify_all()

    def close(self) -> None:
        """Wait briefly until all is written, and end the thread."""
        with self._changed:
            if not self._closed:
                self._changed.wait_for(
                    lambda: not (self._backlog or self._sending or self._lost), CLOSE_SECONDS
                )
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _entry(self, record: logging.LogRecord) -> _Entry:
        return _Entry(b"", f"{self._lines.format(record)}\n".encode("utf-8", "backslashreplace"))

    def _send(self, entry: _Entry, *, wait: bool) -> _Entry | None:
        """Send an entry; returns what is left of it because the reader would have to be waited for."""
        line = entry.line
        while line and not self._closed:
            # So many bytes fit once a pipe, a socket or a terminal says that it is writable.
            if self._writable.poll(WAIT_SECONDS * 1000 if wait else 0):
                try:
                    line = line[os.write(STDERR, line[: select.PIPE_BUF]) :]
                except BlockingIOError:
                    if not wait:
                        break
                except OSError:
                    return None  # nobody reads it any more
            elif not wait:
                break
        return _Entry(b"", line) if line and not wait else None

    def _send_backlog(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._backlog or self._lost or self._closed)
                if self._closed:
                    return
                self._sending = True
                entry = self._backlog.popleft() if self._backlog else self._loss()
                self._backlog_bytes = self._backlog_bytes - len(entry.data) - len(entry.line)
                if not self._backlog:
                    self._backlog_bytes = 0
            self._send(entry, wait=True)

    def _loss(self) -> _Entry:
        number, self._lost = self._lost, 0
        return self._entry(_warning("%d log records are lost: nobody read the log", number))


class JournalHandler(StderrHandler):
    """Sends each record to the journal, with the fields it carries; to stderr while there is no journal."""

    def __init__(self, identifier: str, path: Path = SOCKET) -> None:
        """Raises OSError if no process listens at `path`."""
        self._identifier, self._path = identifier, str(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as tried:
            # Not kept connected: a restarted journal may have another socket at the same place.
            tried.connect(self._path)
        self._at_once = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._at_once.setblocking(False)
        self._waiting = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._waiting.settimeout(WAIT_SECONDS)
        super().__init__(StreamFormatter())
        self.setFormatter(LineFormatter())  # logging.basicConfig would give it one with level and name

    def close(self) -> None:
        """Wait briefly until all is sent, and close the sockets."""
        super().close()
        self._at_once.close()
        self._waiting.close()

    def _entry(self, record: logging.LogRecord) -> _Entry:
        return super()._entry(record)._replace(data=entry(self._values(record)))

    def _send(self, entry: _Entry, *, wait: bool) -> _Entry | None:
        while entry.data and not self._closed:
            try:
                _deliver(self._waiting if wait else self._at_once, entry.data, self._path)
                return None
            except (BlockingIOError, TimeoutError):
                if not wait:
                    return entry
            except OSError:
                break
        return super()._send(_Entry(b"", entry.line), wait=wait)

    def _values(self, record: logging.LogRecord) -> list[tuple[str, str]]:
        carried: Fields = getattr(record, ATTRIBUTE, {})
        return [
            ("MESSAGE", self.format(record)),
            ("PRIORITY", str(priority(record.levelno))),
            ("SYSLOG_IDENTIFIER", self._identifier),
            *((name, one_line(value)) for name, values in carried.items() for value in values),
        ]


def _deliver(opened: socket.socket, data: bytes, path: str) -> None:
    """Send an entry in a datagram. One that is larger goes as a sealed file in memory, whose descriptor is
    sent. Raises OSError."""
    try:
        opened.sendto(data, path)
    except OSError as error:
        if error.errno not in (EMSGSIZE, ENOBUFS):
            raise
        descriptor = os.memfd_create("vipd-journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor, not a path)
            file.write(data)
            file.flush()
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            handed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
            opened.sendmsg([], [handed], 0, path)


def stderr_handler(environment: Mapping[str, str], identifier: str, path: Path = SOCKET) -> logging.Handler:
    """The handler for a process that logs to stderr: with fields, with priorities, or for people."""
    if stream_is_journal(environment):
        try:
            return JournalHandler(identifier, path)
        except OSError:
            pass  # no process listens there: stderr leads to the journal all the same
    plain = LineFormatter("%(asctime)s %(levelname)s %(message)s")
    return StderrHandler(StreamFormatter() if "JOURNAL_STREAM" in environment else plain)
