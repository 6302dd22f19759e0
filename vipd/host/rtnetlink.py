"""Lists the kernel's routes, rules, addresses, devices and neighbours, and writes routes. The functions
block: use them from a thread.

Without pyroute2, which takes longer for each message than the kernel for a hundred. A separate module
because two readers, `network` and `route_table`, use it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vipd.host.netlink import (
    ACKNOWLEDGE,
    CONTENT,
    CREATE,
    DUMP,
    ERROR,
    REQUEST,
    MalformedMessageError,
    attributes,
    error_number,
    message,
    split,
)
from vipd.host.netlink_socket import ATTEMPTS, open_netlink, read_whole, receive, shorten_answers

NEW_LINK, NEW_ADDRESS, NEW_ROUTE, NEW_NEIGHBOUR, NEW_RULE = 16, 20, 24, 28, 32
_LISTING = 2
"""The type of a request is that of its answers, plus two."""
_PROXY = 0x08
_REPLACE = 0x100
_WRITTEN_AT_ONCE = 100
"""Routes: that many refusals fit into the buffer of answers."""
_UNMARKED = {NEW_LINK: 0x1, NEW_ADDRESS: 0x10 | 0x100, NEW_ROUTE: 0x400, NEW_RULE: 0x80 | 0x40000}
"""Lists of which a reading may lack what stays without a mark, and the groups of their changes. IPv4's routes
are whole; neighbours change all the time, and little depends on them."""
_STRICT_CHECK = 12
"""NETLINK_GET_STRICT_CHK; before Linux 4.20 the kernel lists all of a type and family."""
_SOL_NETLINK = 270
SILENCE_SECONDS = 5.0

BODIES = {NEW_LINK: 16, NEW_ADDRESS: 8, NEW_ROUTE: 12, NEW_NEIGHBOUR: 12, NEW_RULE: 12}
"""Bytes of each type's fixed part, after which its attributes begin."""


class Message(NamedTuple):
    """One item of a listing."""

    body: bytes
    attributes: dict[int, bytes]


def listing(kind: int, family: int, most: int, *, proxies: bool = False) -> Iterator[Message]:
    """The items of a type and address family, up to `most`, after all of them were read. Raises OSError.

    `proxies`: only neighbours for which this host answers.
    """
    body = bytes([family]) + bytes(9) + bytes([_PROXY if proxies else 0]) + bytes(5)
    return read_listing(kind, body, most)


def read_listing(kind: int, body: bytes, most: int, *, strict: bool = False) -> Iterator[Message]:
    """The items of a type that a request with this content asks for, up to `most`, after all of them were
    read. Raises OSError, also if the list changes all the time.

    What stays meanwhile is in it; what goes or changes may be in its earlier form, too. `strict`: the kernel
    lists only what is asked for (since Linux 4.20); `body` must be exactly the type's fixed part.
    """

    def request(sequence: int) -> bytes:
        return message(kind + _LISTING, REQUEST | DUMP, sequence, body)

    def read(datagram: bytes, answers: Sequence[tuple[int, int, int]]) -> Iterator[bytes]:
        return (datagram[start + CONTENT : end] for answer, start, end in answers if answer == kind)

    with contextlib.ExitStack() as sockets:
        changes = None
        if kind in _UNMARKED and (kind, body[0]) != (NEW_ROUTE, socket.AF_INET):
            changes = sockets.enter_context(open_netlink(socket.NETLINK_ROUTE, _UNMARKED[kind]))
        opened = sockets.enter_context(open_netlink(socket.NETLINK_ROUTE))
        opened.settimeout(SILENCE_SECONDS)
        if strict:
            with contextlib.suppress(OSError):
                opened.setsockopt(_SOL_NETLINK, _STRICT_CHECK, 1)
        try:
            contents = read_whole(opened, request, read, most)
            # The kernel (6.18) continues a changed list after as many items as it has sent. If some of those
            # are gone it leaves out as many that stay. It marks no list of IPv6 routes, and not every other
            # one: measured, 16 to 26 of 100 readings of 3,000 routes. Which ones are missing differs.
            for _ in range(ATTEMPTS - 1):
                if changes is None or len(contents) >= most or not _changed(changes):
                    break
                again = read_whole(opened, request, read, most)
                contents = list(dict.fromkeys((*contents, *again)))[:most]
        except MalformedMessageError as error:
            raise _not_understood(error) from error
    return _messages(kind, contents)


def _messages(kind: int, contents: Sequence[bytes]) -> Iterator[Message]:
    """Decoded one by one: a million routes would take half a gigabyte."""
    try:
        for content in contents:
            yield message_of(kind, content)
    except MalformedMessageError as error:
        raise _not_understood(error) from error


def _not_understood(error: MalformedMessageError) -> OSError:
    return OSError(errno.EBADMSG, f"the kernel's answer is not understood: {error}")


def _changed(changes: socket.socket) -> bool:
    """Whether there was a notification since the last call."""
    seen = False
    while True:
        try:
            changes.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return seen
        except OSError as error:
            if error.errno != errno.ENOBUFS:  # more than there was room for
                raise
        seen = True


def write_routes(routes: Sequence[bytes]) -> list[int]:
    """Write routes, each as the content of its message, in place of those to the same destinations. Returns
    an error number for each: 0 if it is written. Raises OSError when that is unknown."""
    errors = [0] * len(routes)
    with open_netlink(socket.NETLINK_ROUTE) as opened:
        opened.settimeout(SILENCE_SECONDS)
        shorten_answers(opened)
        for start in range(0, len(routes), _WRITTEN_AT_ONCE):
            some = range(start, min(start + _WRITTEN_AT_ONCE, len(routes)))
            flags = dict.fromkeys(some, REQUEST | CREATE | _REPLACE)
            flags[some[-1]] |= ACKNOWLEDGE  # the kernel answers in order, and to all that it refuses
            opened.sendto(b"".join(message(NEW_ROUTE, flags[n], n, routes[n]) for n in some), (0, 0))
            try:
                answered = -1
                while answered < some[-1]:
                    datagram = receive(opened)
                    for kind, _, answered, _, begin, end in split(datagram):
                        if kind == ERROR:
                            errors[answered] = error_number(datagram, begin, end)
            except MalformedMessageError as error:
                raise _not_understood(error) from error
    return errors


def message_of(kind: int, content: bytes) -> Message:
    """A message's content as an item. Raises MalformedMessageError."""
    size = BODIES[kind]
    return Message(content[:size], attributes(content, size))
