"""Entries by which the kernel answers ARP and neighbour discovery for an address that this host does not
have (proxy entries), and by which it asks for and announces one. They block: use them from a thread.

A proxy entry rather than an address of this host: VIPs exist only as translation rules. An address would be
offered to every local listener, be chosen as a source, be listed and deleted by network managers, and in
IPv6 has to stand on the LAN's own device. What a proxy entry needs is in `vipd.host.lan.interfaces`.

No socket sends ARP or ICMPv6 here. The kernel itself asks three times, a second apart, for a neighbour
that is to be used; the answer gate turns that query into an announcement where this host holds the address.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import NamedTuple

from vipd.host.netlink import ACKNOWLEDGE, CREATE, REQUEST, attribute, message
from vipd.host.netlink_socket import acknowledge, open_netlink
from vipd.host.route_table import PROTOCOL
from vipd.host.rtnetlink import NEW_NEIGHBOUR, SILENCE_SECONDS, listing

MAX_ENTRIES = 20_000
_DELETE_NEIGHBOUR = 29
_NEIGHBOUR = struct.Struct("=BBHiHBB")
"""ndmsg: family, padding, device, state, flags, type."""
_DESTINATION, _HARDWARE, _PROTOCOL = 1, 2, 12
_USE, _PROXY = 0x01, 0x08
_FAILED = 0x20
_ANSWERED = 0x02 | 0x04 | 0x08 | 0x10
"""REACHABLE, STALE, DELAY, PROBE."""
_REPLACE = 0x100


class Place(NamedTuple):
    """An address on a LAN, known by the number of this host's device there."""

    address: str
    device: int


def add_proxies(places: Iterable[Place]) -> None:
    """Answer for these addresses. Raises OSError."""
    with _kernel() as send:
        for place in places:
            protocol = attribute(_PROTOCOL, bytes([PROTOCOL]))
            send(NEW_NEIGHBOUR, place, _PROXY, protocol, CREATE | _REPLACE)


def delete_proxies(places: Iterable[Place]) -> None:
    """Answer for these no more; those that do not exist count as deleted. Raises OSError."""
    with _kernel() as send:
        for place in places:
            _unless_absent(send, place, _PROXY)


def own_proxies() -> frozenset[Place]:
    """The entries that vipd made, known by their protocol. Raises OSError."""
    found = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in listing(NEW_NEIGHBOUR, family, MAX_ENTRIES, proxies=True):
            packed = each.attributes.get(_DESTINATION)
            if packed and each.attributes.get(_PROTOCOL) == bytes([PROTOCOL]):
                found.add(Place(str(ip_address(packed)), _NEIGHBOUR.unpack(each.body)[3]))
    return frozenset(found)


def ask(places: Iterable[Place]) -> None:
    """Make the kernel ask each LAN for an address, now and twice more; or announce it, if it is held.
    `answers` has the answers. Raises OSError."""
    with _kernel() as send:
        for place in places:
            _unless_absent(send, place, 0)  # the kernel does not ask again for a neighbour that it knows
            send(NEW_NEIGHBOUR, place, _USE, b"", CREATE | _REPLACE)


def answers(places: Iterable[Place]) -> dict[Place, str]:
    """The hardware addresses of those that answered, as `aa:bb:cc:dd:ee:ff`. Raises OSError."""
    asked, found = frozenset(places), {}
    for family in {socket.AF_INET6 if ":" in place.address else socket.AF_INET for place in asked}:
        for each in listing(NEW_NEIGHBOUR, family, MAX_ENTRIES):
            packed, hardware = each.attributes.get(_DESTINATION), each.attributes.get(_HARDWARE, b"")
            _, _, _, device, state, _, _ = _NEIGHBOUR.unpack(each.body)
            if packed and any(hardware) and state & _ANSWERED:
                place = Place(str(ip_address(packed)), device)
                found.update({place: hardware.hex(":")} if place in asked else {})
    return found


def forget(places: Iterable[Place]) -> None:
    """Delete what was learnt by `ask`. Raises OSError."""
    with _kernel() as send:
        for place in places:
            _unless_absent(send, place, 0)


class _Sender:
    def __init__(self, opened: socket.socket) -> None:
        self._opened = opened

    def __call__(self, kind: int, place: Place, flags: int, more: bytes = b"", request: int = 0) -> None:
        packed = ip_address(place.address).packed
        family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
        body = _NEIGHBOUR.pack(family, 0, 0, place.device, 0, flags, 0)
        content = body + attribute(_DESTINATION, packed) + more
        self._opened.send(message(kind, REQUEST | ACKNOWLEDGE | request, 1, content))
        acknowledge(self._opened)


@contextmanager
def _kernel() -> Iterator[_Sender]:
    with open_netlink(socket.NETLINK_ROUTE) as opened:
        opened.settimeout(SILENCE_SECONDS)
        yield _Sender(opened)


def _unless_absent(send: _Sender, place: Place, flags: int) -> None:
    try:
        send(_DELETE_NEIGHBOUR, place, flags)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            raise
