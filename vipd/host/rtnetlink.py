"""Listings of the kernel's routes, addresses, devices and neighbours. They block: use them from a thread.

Read without pyroute2, which takes longer for each message than the kernel for a hundred.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

NEW_LINK, NEW_ADDRESS, NEW_ROUTE, NEW_NEIGHBOUR = 16, 20, 24, 28
_LISTING = 2
"""A listing's request is two more than what is answered."""
_ERROR, _DONE = 2, 3
_REQUEST_DUMP = 0x1 | 0x300
_HEAD = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF
_PROXY = 0x08
_RECEIVE_BYTES = 1 << 16
SILENCE_SECONDS = 5.0

BODIES = {NEW_LINK: 16, NEW_ADDRESS: 8, NEW_ROUTE: 12, NEW_NEIGHBOUR: 12}
"""Bytes of each kind's fixed part, after which its attributes begin."""


class Message(NamedTuple):
    """One item of a listing."""

    body: bytes
    attributes: dict[int, bytes]


def listing(kind: int, family: int, most: int, *, proxies: bool = False) -> Iterator[Message]:
    """The items of a kind and address family, `most` of them at the utmost. Raises OSError.

    `proxies`: of neighbours those that this host answers for.
    """
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    with opened:
        opened.settimeout(SILENCE_SECONDS)
        opened.bind((0, 0))
        body = bytes([family]) + bytes(9) + bytes([_PROXY if proxies else 0]) + bytes(5)
        opened.sendto(_HEAD.pack(_HEAD.size + len(body), kind + _LISTING, _REQUEST_DUMP, 1, 0) + body, (0, 0))
        number = 0
        while True:
            datagram, (sender, _) = opened.recvfrom(_RECEIVE_BYTES)
            for answer, content in _split(datagram) if sender == 0 else ():
                if answer == _DONE or number == most:
                    return
                if answer == kind:
                    number += 1
                    yield message_of(kind, content)


def _split(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """The kind and content of each message; raises OSError for the one that says what went wrong."""
    at = 0
    while at + _HEAD.size <= len(datagram):
        length, kind, _, _, _ = _HEAD.unpack_from(datagram, at)
        if length < _HEAD.size or at + length > len(datagram):
            raise OSError(0, "the kernel's answer ends within a message")
        content = datagram[at + _HEAD.size : at + length]
        if kind in (_ERROR, _DONE) and len(content) >= 4:
            number = -struct.unpack_from("=i", content)[0]
            if number:
                raise OSError(number, os.strerror(number))
        yield kind, content
        at += (length + 3) & ~3


def message_of(kind: int, content: bytes) -> Message:
    """A message's content; what is cut short is left out."""
    size = BODIES[kind]
    return Message(content[:size], dict(attributes_in(content, size)))


def attributes_in(content: bytes, at: int = 0) -> Iterator[tuple[int, bytes]]:
    """The attributes from a place on, by number."""
    while at + _ATTRIBUTE.size <= len(content):
        length, number = _ATTRIBUTE.unpack_from(content, at)
        if length < _ATTRIBUTE.size or at + length > len(content):
            return
        yield number & _TYPE_MASK, content[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
