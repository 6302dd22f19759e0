"""A connection tracking table without a kernel, behind a socket that answers as netlink does."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable
from enum import Enum, auto
from typing import cast

from tests.dataplane.conntrack.kernel import new_request
from vipd.dataplane.conntrack.entries import CTA_ID, Entry
from vipd.dataplane.conntrack.messages import DELETE, GET, NEW
from vipd.host.netlink import (
    CONTENT,
    DONE,
    ERROR,
    FAMILY_NUMBERS,
    HEADER,
    INTERRUPTED,
    attribute,
    attributes,
    message,
    split,
)

AT_ONCE = 3
"""Entries for each answer to a dump."""


class Fault(Enum):
    """What may go wrong with the answers to one sending."""

    NO_ROOM = auto()
    """The socket was full: answers are lost and reading says ENOBUFS."""
    INTERRUPTED = auto()
    """A dump lost its place."""
    CUT = auto()
    """The last answer ends within a message."""
    TOO_LONG = auto()
    """An answer did not fit into the reader's buffer."""
    REFUSED = auto()
    """EPERM."""
    SILENCE = auto()
    MALFORMED = auto()
    """An entry without a reply direction."""
    FORGED = auto()
    """Another process sends too."""
    LATE = auto()
    """An answer to an earlier request comes first."""


class FakeTable:
    """Entries by id, and the faults of the next sendings, one each."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = dict(enumerate(entries, 1))
        self.faults: list[Fault] = []
        self.dumps = 0
        self.reads = 0
        """Answers taken."""

    def connect(self) -> socket.socket:
        """A new socket of this table."""
        return cast("socket.socket", FakeSocket(self))


class FakeSocket:
    """Only what the client uses of a netlink socket."""

    def __init__(self, table: FakeTable) -> None:
        self._table = table
        self._answers: list[bytes | OSError | tuple[int, int]] = []

    def settimeout(self, seconds: float) -> None:
        """Time passes at once here."""

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Answers never repeat requests here."""

    def close(self) -> None:
        """Nothing is held."""

    def sendto(self, data: bytes, address: tuple[int, int]) -> None:
        """Take one or more requests."""
        fault = self._table.faults.pop(0) if self._table.faults else None
        answers: list[bytes] = []
        for kind, _, sequence, _, start, end in split(data):
            body = data[start + CONTENT : end]
            if kind == GET:
                self._table.dumps += 1
                answers += self._dump(sequence, fault, body[0])
            elif kind == DELETE and fault is Fault.REFUSED:
                answers.append(message(ERROR, 0, sequence, bytes(4)))
            elif kind == DELETE:
                answers.append(self._delete(sequence, body))
        self._queue(answers, fault)

    def recvmsg(self, size: int) -> tuple[bytes, list[object], int, tuple[int, int]]:
        """The next answer; TimeoutError when there is none."""
        self._table.reads += 1
        answer = self._answers.pop(0) if self._answers else TimeoutError()
        if isinstance(answer, OSError):
            raise answer
        if isinstance(answer, tuple):
            return bytes(16), [], answer[0], (answer[1], 0)
        return answer, [], 0, (0, 0)

    def _queue(self, answers: list[bytes], fault: Fault | None) -> None:
        queue: list[bytes | OSError | tuple[int, int]] = list(answers)
        if fault is Fault.NO_ROOM:
            # A dump goes on after the gap; what was acknowledged in the gap is lost.
            lost = OSError(errno.ENOBUFS, "")
            queue = [lost, *answers[1:]]
        elif fault is Fault.CUT:
            queue[-1] = answers[-1][:-2]
        elif fault is Fault.TOO_LONG:
            queue.insert(0, (socket.MSG_TRUNC, 0))
        elif fault is Fault.FORGED:
            queue.insert(0, (0, 4711))
        elif fault is Fault.REFUSED:
            queue = [message(ERROR, 0, sequence_of(answers[0]), struct.pack("=i", -errno.EPERM))]
        elif fault is Fault.SILENCE:
            queue = []
        elif fault is Fault.LATE:
            queue.insert(0, message(DONE, 0, 0xFFFF, bytes(4)))
        self._answers += queue

    def _dump(self, sequence: int, fault: Fault | None, family: int) -> list[bytes]:
        flags = 2 | (INTERRUPTED if fault is Fault.INTERRUPTED else 0)
        messages = []
        for number, entry in self._table.entries.items():
            if FAMILY_NUMBERS[entry.family] != family:
                continue
            body = new_request(entry, 0)[16:] + attribute(CTA_ID, struct.pack(">I", number))
            body = body[:60] if fault is Fault.MALFORMED else body
            messages.append(message(NEW, flags, sequence, body))
        chunks = [b"".join(messages[at : at + AT_ONCE]) for at in range(0, len(messages), AT_ONCE)]
        return [*chunks, message(DONE, flags, sequence, bytes(4))]

    def _delete(self, sequence: int, body: bytes) -> bytes:
        values = attributes(body, 4)
        found = self._table.entries.pop(int.from_bytes(values[CTA_ID], "big"), None)
        error = 0 if found else -errno.ENOENT
        return message(ERROR, 0, sequence, struct.pack("=i", error))


def sequence_of(data: bytes) -> int:
    """The sequence number of the first of some messages."""
    return int(HEADER.unpack_from(data)[3])
