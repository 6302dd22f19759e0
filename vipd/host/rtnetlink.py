"""Lists the kernel's routes, rules, addresses, devices and neighbours, and writes routes. The functions
block: use them from a thread.

Without pyroute2, which takes longer for each message than the kernel for a hundred. A separate module
because two readers, `network` and `route_table`, use it.
"""

from __future__ import annotations

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
from vipd.host.netlink_socket import dump, open_netlink, receive, shorten_answers

NEW_LINK, NEW_ADDRESS, NEW_ROUTE, NEW_NEIGHBOUR, NEW_RULE = 16, 20, 24, 28, 32
_LISTING = 2
"""The type of a request is that of its answers, plus two."""
_PROXY = 0x08
_REPLACE = 0x100
_WRITTEN_AT_ONCE = 100
"""Routes: that many refusals fit into the buffer of answers."""
_SEQUENCE = 1
SILENCE_SECONDS = 5.0

BODIES = {NEW_LINK: 16, NEW_ADDRESS: 8, NEW_ROUTE: 12, NEW_NEIGHBOUR: 12, NEW_RULE: 12}
"""Bytes of each type's fixed part, after which its attributes begin."""


class Message(NamedTuple):
    """One item of a listing."""

    body: bytes
    attributes: dict[int, bytes]


def listing(kind: int, family: int, most: int, *, proxies: bool = False) -> Iterator[Message]:
    """The items of a type and address family, up to `most`. Raises OSError.

    `proxies`: only neighbours for which this host answers.
    """
    body = bytes([family]) + bytes(9) + bytes([_PROXY if proxies else 0]) + bytes(5)
    request = message(kind + _LISTING, REQUEST | DUMP, _SEQUENCE, body)
    number = 0
    with open_netlink(socket.NETLINK_ROUTE) as opened:
        opened.settimeout(SILENCE_SECONDS)
        try:
            for datagram, answers in dump(opened, request, _SEQUENCE):
                for answer, start, end in answers:
                    if number == most:
                        return
                    if answer == kind:
                        number += 1
                        yield message_of(kind, datagram[start + CONTENT : end])
        except MalformedMessageError as error:
            raise OSError(errno.EBADMSG, f"the kernel's answer is not understood: {error}") from error


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
                raise OSError(errno.EBADMSG, f"the kernel's answer is not understood: {error}") from error
    return errors


def message_of(kind: int, content: bytes) -> Message:
    """A message's content as an item. Raises MalformedMessageError."""
    size = BODIES[kind]
    return Message(content[:size], attributes(content, size))
