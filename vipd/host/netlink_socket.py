"""Netlink sockets: opens, queries and reads them. They block, except those of a multicast group.

Separate from `vipd.host.netlink`, which pure modules import.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count
from typing import NamedTuple, TypeVar

from vipd.host import netlink
from vipd.host.netlink import DONE, ERROR

OpenSocket = Callable[[], socket.socket]

T = TypeVar("T")

NETLINK_NETFILTER = 12
RECEIVE_BYTES = 1 << 16
"""The kernel sends at most 32 KiB at once."""
MULTICAST_BUFFER_BYTES = 32 << 20
"""Room for some 50,000 notifications; used only while it is needed. Beyond it they are lost."""

_SOL_NETLINK, _ADD_MEMBERSHIP, _CAP_ACK = 270, 1, 10
_SO_ATTACH_FILTER, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 26, 32, 33
"""The kernel's include/uapi/asm-generic/socket.h; the socket module does not name them."""
_INSTRUCTION_BYTES = 8

ATTEMPTS = 10
"""How often a listing is read that changes meanwhile."""
_sequence_numbers = count(1)


def open_netlink(protocol: int = NETLINK_NETFILTER, groups: int = 0) -> socket.socket:
    """A socket of the network namespace that the calling thread is in. Raises OSError.

    `groups`: a bit for each multicast group that it is a member of.
    """
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        opened.bind((0, groups))
    except BaseException:
        opened.close()
        raise
    return opened


class Sockets(NamedTuple):
    """Open netlink sockets of one network namespace."""

    reading: OpenSocket = open_netlink
    writing: OpenSocket = open_netlink
    """Those that change rules."""


def open_multicast(group: int, program: bytes = b"") -> socket.socket:
    """A socket that does not block, of a multicast group of netfilter in this thread's network namespace.

    `program`: instructions of classic BPF that filter its messages. Raises OSError.
    """
    opened = open_netlink()
    try:
        opened.setblocking(False)
        enlarge_buffer(opened, MULTICAST_BUFFER_BYTES)
        if program:
            address, length = (held := array("B", program)).buffer_info()
            fprog = struct.pack("@HP", length // _INSTRUCTION_BYTES, address)
            opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
            del held  # the kernel has its own copy
        # Only now: no message arrives before the filter is in place.
        opened.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
    except BaseException:
        opened.close()
        raise
    return opened


def enlarge_buffer(opened: socket.socket, size: int) -> None:
    """Room for so many bytes that wait to be read, or as many as is allowed. Raises OSError."""
    try:
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
    except PermissionError:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def allow_large_requests(opened: socket.socket, size: int) -> None:
    """Allow requests of so many bytes in one datagram. Raises OSError."""
    opened.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, size)


def shorten_answers(opened: socket.socket) -> None:
    """No answer repeats its request, which may be larger than RECEIVE_BYTES. Raises OSError before Linux 4.3,
    where answers are longer but equivalent."""
    opened.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)


def receive(opened: socket.socket) -> bytes:
    """The next datagram from the kernel. Raises OSError: ENOBUFS when messages were lost."""
    while True:
        datagram, _, flags, (sender, _) = opened.recvmsg(RECEIVE_BYTES)
        if flags & socket.MSG_TRUNC:
            raise OSError(errno.EMSGSIZE, f"an answer of more than {RECEIVE_BYTES} bytes")
        if sender == 0:  # otherwise another process sent it
            return datagram


def dump(
    opened: socket.socket, request: bytes, sequence: int
) -> Generator[tuple[bytes, list[tuple[int, int, int]]], None, bool]:
    """Sends a request, and yields each datagram of the answer with its messages, as type, start and end.

    Returns whether the answer is complete: the table did not change meanwhile and no datagram was lost.
    Raises OSError with the kernel's error number, TimeoutError, and MalformedMessageError.
    """
    opened.sendto(request, (0, 0))
    complete, done = True, False
    while not done:
        try:
            datagram = receive(opened)
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            complete = False
            continue
        answers = []
        for kind, flags, number, _, start, end in netlink.split(datagram):
            if number != sequence:
                continue  # an answer to an earlier request
            complete = complete and not flags & netlink.INTERRUPTED
            if kind >= netlink.MIN_MESSAGE_TYPE:
                answers.append((kind, start, end))
            elif kind in (ERROR, DONE):
                raise_error(datagram, start, end)
                done = done or kind == DONE
        yield datagram, answers
    return complete


def read_whole(
    opened: socket.socket,
    request: Callable[[int], bytes],
    read: Callable[[bytes, Sequence[tuple[int, int, int]]], Iterable[T]],
    most: int | None = None,
) -> list[T]:
    """The items of a listing: what `read` makes of each datagram and its messages (type, start and end).

    `request` makes the request with a sequence number. A reading that the kernel marks as interrupted is
    dropped and repeated. With more than `most` items only those are read, and `opened` is of no use any more.
    Raises OSError, also when every reading was interrupted, and MalformedMessageError.
    """
    for _ in range(ATTEMPTS):
        number = next(_sequence_numbers) & 0xFFFFFFFF
        items, answers = list[T](), dump(opened, request(number), number)
        try:
            while True:
                items += read(*next(answers))
                if most is not None and len(items) >= most:
                    return items[:most]
        except StopIteration as ended:
            if ended.value:
                return items
    raise OSError(errno.EBUSY, f"the kernel's list changed during each of {ATTEMPTS} readings")


def acknowledge(opened: socket.socket) -> None:
    """Waits for the acknowledgement of a request. Raises OSError when the kernel refuses it."""
    while True:
        datagram = receive(opened)
        for kind, _, _, _, start, end in netlink.split(datagram):
            if kind == ERROR:
                raise_error(datagram, start, end)
                return


def raise_error(datagram: bytes, start: int, end: int) -> None:
    """Raises OSError when an ERROR or DONE message carries an error number."""
    if number := netlink.error_number(datagram, start, end):
        raise OSError(number, os.strerror(number))
