"""A client of the kernel's connection tracking table over netlink. It blocks: use it from a thread."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TypeAlias, TypeVar

from vipd.dataplane.conntrack.entries import Entry, SocketAddress, parse
from vipd.dataplane.conntrack.messages import NEW, Query, delete_request, dump_request, get_request
from vipd.dataplane.conntrack.packed_entries import PackedEntry, PackedReader
from vipd.host import netlink_socket
from vipd.host.netlink import MalformedMessageError, error_number, split
from vipd.host.netlink_socket import dump, receive
from vipd.model.service import Family, Protocol

T = TypeVar("T")
_Answers: TypeAlias = Sequence[tuple[int, int, int]]
"""Type, start and end of each message of a datagram."""
_Read: TypeAlias = Callable[[bytes, _Answers], list[T]]

SILENCE_SECONDS = 10.0
"""The kernel answers at once; this is for one that never does."""
ATTEMPTS = 4
"""How often a disturbed reading, or a deletion whose answers were lost, is started."""
BATCH = 128
"""Deletions for each send: their answers fit into a socket's receive buffer of default size."""

_HARMLESS = (0, errno.ENOENT, errno.EBUSY)
"""Answers to a deletion that are no error: it was done; the entry is gone, or has a successor; the flow was
moved to a flow table or to hardware, and the kernel keeps such entries."""
_HINTS = {
    errno.EPERM: "connection tracking needs CAP_NET_ADMIN in this network namespace",
    errno.EACCES: "connection tracking needs CAP_NET_ADMIN in this network namespace",
    errno.EPROTONOSUPPORT: "the kernel lacks nfnetlink; load it: modprobe nfnetlink",
    errno.EINVAL: "the kernel may lack nf_conntrack_netlink; load it: modprobe nf_conntrack_netlink",
}


class ConntrackError(RuntimeError):
    """The table could not be read or changed: the operation, the reason, and a remedy. A retry may
    succeed."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(f"{what}: {why}" + (f"; hint: {hint}" if hint else ""))
        self.what, self.why, self.hint = what, why, hint

    @classmethod
    def of(cls, what: str, error: OSError) -> ConntrackError:
        """From the kernel's error."""
        number = error.errno or 0
        return cls(what, error.strerror or os.strerror(number), _HINTS.get(number, ""))


def open_socket() -> socket.socket:
    """A netlink socket of the network namespace that the calling thread is in. Raises ConntrackError."""
    with _named("cannot open a netlink socket"):
        return netlink_socket.open_netlink()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Within it, an error of the socket or of an answer is a ConntrackError."""
    try:
        yield
    except TimeoutError:
        raise ConntrackError(what, f"no answer from the kernel in {SILENCE_SECONDS:g} s") from None
    except MalformedMessageError as error:
        raise ConntrackError(what, f"the kernel's answer is not understood: {error}") from error
    except OSError as error:
        raise ConntrackError.of(what, error) from error


class Conntrack:
    """The table of one network namespace. Every method may raise ConntrackError.

    After a `dump` that was not read to its end, only `close` is allowed.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(SILENCE_SECONDS)
        with contextlib.suppress(OSError):
            netlink_socket.shorten_answers(self._socket)
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
        """The entries of a query, in batches as the kernel sends them: some hundred.

        An entry may appear twice: if the kernel loses its position, the reading restarts. An entry that is
        added or deleted meanwhile may or may not appear.
        """
        return self._dump(query, lambda datagram, answers: _entries(datagram, answers, query))

    def dump_packed(
        self, family: Family, protocol: Protocol, *, unreplied: bool = False, backend: str = ""
    ) -> Iterator[list[PackedEntry]]:
        """The same, of all entries of a protocol, as the kernel packs them. `unreplied`, `backend`: as in
        `Query`, but what an older kernel sends besides is not left out."""
        query = Query(family, protocol, unreplied=unreplied, backend=backend)
        return self._dump(query, PackedReader(protocol).read)

    def _dump(self, query: Query, read: _Read[T]) -> Iterator[list[T]]:
        for _ in range(ATTEMPTS):
            if (yield from self._dump_once(query, read)):
                return
        raise ConntrackError(
            "cannot read the conntrack table", f"disturbed {ATTEMPTS} times by changes to the table"
        )

    def get(self, protocol: Protocol, source: SocketAddress, destination: SocketAddress) -> Entry | None:
        """The entry of the flow between these ends, before translation; None if it is not tracked."""
        sequence = self._next_sequence()
        with _named("cannot read a conntrack entry"):
            self._socket.sendto(get_request(protocol, source, destination, sequence), (0, 0))
            while True:
                datagram = receive(self._socket)
                for kind, _, answered, _, start, end in split(datagram):
                    if answered != sequence:
                        continue
                    if kind == NEW:
                        return parse(datagram[start:end])
                    number = error_number(datagram, start, end)
                    if number not in (0, errno.ENOENT):
                        raise OSError(number, os.strerror(number))
                    return None

    def delete(self, found: Sequence[Entry]) -> int:
        """Delete these entries; returns how many still existed. Others between the same ends stay."""
        return sum(self._delete_batch(found[at : at + BATCH]) for at in range(0, len(found), BATCH))

    def _dump_once(self, query: Query, read: _Read[T]) -> Generator[list[T], None, bool]:
        """Reads once; returns whether nothing disturbed it."""
        sequence = self._next_sequence()
        with _named(f"cannot read the {query.family} conntrack table"):
            listing = dump(self._socket, dump_request(query, sequence), sequence)
            while True:
                try:
                    datagram, answers = next(listing)
                except StopIteration as ended:
                    return bool(ended.value)
                yield read(datagram, answers)

    def _delete_batch(self, batch: Sequence[Entry]) -> int:
        what, deleted = "cannot delete conntrack entries", 0
        waiting = dict[int, bytes]()
        for entry in batch:
            sequence = self._next_sequence()
            waiting[sequence] = delete_request(entry, sequence)
        with _named(what):
            for _ in range(ATTEMPTS):
                self._socket.sendto(b"".join(waiting.values()), (0, 0))
                deleted += self._deleted(waiting)
                if not waiting:
                    return deleted
        raise ConntrackError(what, f"the kernel's answers were lost {ATTEMPTS} times")

    def _deleted(self, waiting: dict[int, bytes]) -> int:
        """Reads the answers to deletions until all have arrived or some are lost; returns the number of
        deleted entries. Removes answered requests from `waiting`."""
        deleted = 0
        while waiting:
            try:
                datagram = receive(self._socket)
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    return deleted
                raise
            for _, _, sequence, _, start, end in split(datagram):
                if waiting.pop(sequence, b""):
                    number = error_number(datagram, start, end)
                    if number not in _HARMLESS:
                        raise OSError(number, os.strerror(number))
                    deleted += not number
        return deleted

    def _next_sequence(self) -> int:
        self._sequence = self._sequence % 0xFFFFFFFF + 1
        return self._sequence


def _entries(datagram: bytes, answers: _Answers, query: Query) -> list[Entry]:
    """The requested entries. Raises MalformedMessageError."""
    parsed = [parse(datagram[start:end]) for kind, start, end in answers if kind == NEW]
    return [entry for entry in parsed if entry is not None and query.fits(entry)]
