"""Lists the kernel's routes, addresses, devices and neighbours. The functions block: use them from a thread.

Without pyroute2, which takes longer for each message than the kernel for a hundred. A separate module
because two readers, `network` and `route_table`, use it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import NamedTuple

from vipd.host.netlink import CONTENT, DUMP, REQUEST, MalformedMessageError, attributes, message
from vipd.host.netlink_socket import dump, open_netlink

NEW_LINK, NEW_ADDRESS, NEW_ROUTE, NEW_NEIGHBOUR = 16, 20, 24, 28
_LISTING = 2
"""The type of a request is that of its answers, plus two."""
_PROXY = 0x08
_SEQUENCE = 1
SILENCE_SECONDS = 5.0

BODIES = {NEW_LINK: 16, NEW_ADDRESS: 8, NEW_ROUTE: 12, NEW_NEIGHBOUR: 12}
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


def message_of(kind: int, content: bytes) -> Message:
    """A message's content as an item. Raises MalformedMessageError."""
    size = BODIES[kind]
    return Message(content[:size], attributes(content, size))
