"""A client of the kernel's connection tracking table over netlink. It blocks: use it from a thread."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from vipd.dataplane.conntrack.entries import MESSAGE_HEAD, Entry, MalformedEntryError, parse
from vipd.dataplane.conntrack.messages import DUMP_INTERRUPTED, NEW, Query, delete_request, dump_request

NETLINK_NETFILTER = 12
SOL_NETLINK, NETLINK_CAP_ACK = 270, 10
ANSWER_ERROR, ANSWER_DONE = 2, 3

RECEIVE_BYTES = 1 << 16
"""The kernel sends at most 32 KiB at once, however large the table."""
SILENCE_SECONDS = 10.0
"""The kernel answers at once; this is for one that never does."""
ATTEMPTS = 4
"""How often a reading that was disturbed, or a deletion whose answers were lost, is begun."""
BATCH = 128
"""Deletions for each send: their answers fit into a socket's receive buffer of default size."""

_HINTS = {
    errno.EPERM: "connection tracking needs CAP_NET_ADMIN in this network namespace",
    errno.EACCES: "connection tracking needs CAP_NET_ADMIN in this network namespace",
    errno.EPROTONOSUPPORT: "the kernel lacks nfnetlink; load it: modprobe nfnetlink",
    errno.EINVAL: "the kernel may lack nf_conntrack_netlink; load it: modprobe nf_conntrack_netlink",
}


class ConntrackError(RuntimeError):
    """The table could not be read or changed: what was tried, why not, and what to do. Worth another try."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(f"{what}: {why}" + (f"; hint: {hint}" if hint else ""))
        self.what, self.why, self.hint = what, why, hint

    @classmethod
    def of(cls, what: str, number: int) -> ConntrackError:
        """From the error number that the kernel gave."""
        return cls(what, os.strerror(number), _HINTS.get(number, ""))


class _Answer(NamedTuple):
    kind: int
    flags: int
    sequence: int
    message: bytes

    @property
    def error(self) -> int:
        """The error number that an ERROR or DONE carries; 0 for none."""
        if len(self.message) < MESSAGE_HEAD.size + 4:
            return 0
        (number,) = struct.unpack_from("=i", self.message, MESSAGE_HEAD.size)
        return -int(number)


def open_socket() -> socket.socket:
    """A netlink socket of the network namespace that the calling thread is in. Raises ConntrackError."""
    try:
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        made.bind((0, 0))
    except OSError as error:
        raise ConntrackError.of("cannot open a netlink socket", error.errno or 0) from error
    return made


class Conntrack:
    """The table of one network namespace. Every method may raise ConntrackError.

    After a `dump` that was not read to its end, only `close` is allowed.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(SILENCE_SECONDS)
        with contextlib.suppress(OSError):
            # Without it, before Linux 4.3, every answer repeats its request: longer, but the same.
            self._socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
        self._buffer = bytearray(RECEIVE_BYTES)
        self._sequence = 0

    def __enter__(self) -> Conntrack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the socket back; safe to call twice."""
        self._socket.close()

    def dump(self, query: Query) -> Iterator[list[Entry]]:
        """The entries of a query, as many at a time as the kernel sends at once: some hundred.

        An entry may come twice: when the kernel lost its place, the reading begins again. One that is made
        or ends meanwhile may come or not.
        """
        for _ in range(ATTEMPTS):
            if (yield from self._dump_once(query)):
                return
        raise ConntrackError(
            "cannot read the conntrack table", f"disturbed {ATTEMPTS} times by changes to the table"
        )

    def delete(self, found: Sequence[Entry]) -> int:
        """End these entries; how many still were there. Others between the same ends are left alone."""
        return sum(self._delete_batch(found[at : at + BATCH]) for at in range(0, len(found), BATCH))

    def _dump_once(self, query: Query) -> Generator[list[Entry], None, bool]:
        """Read once; whether nothing disturbed it."""
        what, undisturbed, done = f"cannot read the {query.family} conntrack table", True, False
        sequence = self._next_sequence()
        self._send(what, dump_request(query, sequence))
        while not done:
            found = list[Entry]()
            for answer in self._receive(what):
                # Answers to an earlier request may still be under way.
                if answer is None:
                    undisturbed = False
                elif answer.sequence == sequence:
                    undisturbed = undisturbed and not answer.flags & DUMP_INTERRUPTED
                    done = done or answer.kind == ANSWER_DONE
                    found += _entries(what, answer, query)
            yield found
        return undisturbed

    def _delete_batch(self, batch: Sequence[Entry]) -> int:
        what, deleted = "cannot delete conntrack entries", 0
        waiting = dict[int, bytes]()
        for entry in batch:
            sequence = self._next_sequence()
            waiting[sequence] = delete_request(entry, sequence)
        for _ in range(ATTEMPTS):
            self._send(what, b"".join(waiting.values()))
            lost = False
            while waiting and not lost:
                for answer in self._receive(what):
                    lost = lost or answer is None
                    if answer is not None and waiting.pop(answer.sequence, b""):
                        deleted += _deleted(what, answer)
            if not waiting:
                return deleted
        raise ConntrackError(what, f"the kernel's answers were lost {ATTEMPTS} times")

    def _next_sequence(self) -> int:
        self._sequence = self._sequence % 0xFFFFFFFF + 1
        return self._sequence

    def _send(self, what: str, data: bytes) -> None:
        try:
            self._socket.sendto(data, (0, 0))
        except OSError as error:
            raise ConntrackError.of(what, error.errno or 0) from error

    def _receive(self, what: str) -> list[_Answer | None]:
        """What the kernel sent at once; None stands for answers that found no room in the socket."""
        try:
            size, _, flags, sender = self._socket.recvmsg_into([self._buffer])
        except TimeoutError:
            raise ConntrackError(what, f"no answer from the kernel in {SILENCE_SECONDS:g} s") from None
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return [None]
            raise ConntrackError.of(what, error.errno or 0) from error
        if sender[0] != 0:
            return []  # not the kernel
        if flags & socket.MSG_TRUNC:
            raise ConntrackError(what, f"an answer of more than {RECEIVE_BYTES} bytes")
        return list(_split(what, bytes(memoryview(self._buffer)[:size])))


def _split(what: str, data: bytes) -> Iterator[_Answer]:
    """The messages that came at once."""
    position = 0
    while position + MESSAGE_HEAD.size <= len(data):
        length, kind, flags, sequence, _ = MESSAGE_HEAD.unpack_from(data, position)
        if length < MESSAGE_HEAD.size or position + length > len(data):
            break
        yield _Answer(kind, flags, sequence, data[position : position + length])
        position += (length + 3) & ~3
    if position < len(data):
        raise ConntrackError(what, f"the kernel's answer ends within a message, at byte {position}")


def _entries(what: str, answer: _Answer, query: Query) -> list[Entry]:
    """The entry in an answer to a dump, if it is one that was asked for."""
    if answer.kind in (ANSWER_ERROR, ANSWER_DONE) and answer.error:
        raise ConntrackError.of(what, answer.error)
    if answer.kind != NEW:
        return []
    try:
        entry = parse(answer.message)
    except MalformedEntryError as error:
        raise ConntrackError(what, f"cannot understand an entry: {error}") from error
    return [entry] if entry is not None and query.fits(entry) else []


def _deleted(what: str, answer: _Answer) -> bool:
    """Whether a deletion ended an entry. One that is gone, or has a successor, needs none."""
    # EBUSY: the flow was handed to a flow table or to hardware, and the kernel keeps such entries.
    if answer.error not in (0, errno.ENOENT, errno.EBUSY):
        raise ConntrackError.of(what, answer.error)
    return not answer.error
