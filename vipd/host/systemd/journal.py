"""Log records as entries of the journal with fields, by its native protocol
(systemd.io/JOURNAL_NATIVE_PROTOCOL).

Without libsystemd, which takes 0.8 MB of memory.
Entries that the journal rejects go to stderr without fields; the journal reads that as well.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from array import array
from collections.abc import Iterable, Mapping
from errno import EMSGSIZE, ENOBUFS
from pathlib import Path

from vipd.host.systemd.fields import ATTRIBUTE, Fields
from vipd.model.text import one_line

SOCKET = Path("/run/systemd/journal/socket")
SEND_SECONDS = 1.0
"""A journal that takes nothing for so long is done without."""
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


class JournalHandler(logging.Handler):
    """Sends each record to the journal, with the fields it carries."""

    def __init__(self, identifier: str, path: Path = SOCKET) -> None:
        """Raises OSError if no process listens at `path`."""
        super().__init__()
        self.setFormatter(LineFormatter())  # logging.basicConfig would give it one with level and name
        self._identifier, self._path = identifier, str(path)
        self._otherwise = logging.StreamHandler()
        self._otherwise.setFormatter(StreamFormatter())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.connect(self._path)
            # Not kept connected: a restarted journal may have another socket at the same place.
            self._socket.close()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(SEND_SECONDS)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        try:
            self._send(entry(self._values(record)))
        except OSError:
            self._otherwise.handle(record)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def _values(self, record: logging.LogRecord) -> list[tuple[str, str]]:
        carried: Fields = getattr(record, ATTRIBUTE, {})
        return [
            ("MESSAGE", self.format(record)),
            ("PRIORITY", str(priority(record.levelno))),
            ("SYSLOG_IDENTIFIER", self._identifier),
            *((name, one_line(value)) for name, values in carried.items() for value in values),
        ]

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendto(data, self._path)
        except OSError as error:
            if error.errno not in (EMSGSIZE, ENOBUFS):
                raise
            self._send_as_file(data)

    def _send_as_file(self, data: bytes) -> None:
        """An entry larger than a datagram goes as a sealed file in memory, whose descriptor is sent."""
        descriptor = os.memfd_create("vipd-journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor, not a path)
            file.write(data)
            file.flush()
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            handed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
            self._socket.sendmsg([], [handed], 0, self._path)


def stderr_handler(environment: Mapping[str, str], identifier: str, path: Path = SOCKET) -> logging.Handler:
    """The handler for a process that logs to stderr: with fields, with priorities, or for people."""
    if stream_is_journal(environment):
        try:
            return JournalHandler(identifier, path)
        except OSError:
            pass  # no process listens there: stderr leads to the journal all the same
    handler = logging.StreamHandler()
    plain = LineFormatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(StreamFormatter() if "JOURNAL_STREAM" in environment else plain)
    return handler
