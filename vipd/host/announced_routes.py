"""The host routes that routing daemons announce, in a routing table of vipd's own.

No rule leads to the table: it is a list for BIRD, FRR and others to import, and no packet is looked up in it.
A route in it is `unicast dev vipd0`. Measured with BIRD 2.0.12 and FRR 8.4.4: both import that and
`blackhole`, neither imports `local`. FRR puts what it imports into the main table, too: a blackhole there
would fail every connection from this host to the address, and `dev lo` would send packets round in a loop.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import struct
from collections.abc import Collection, Iterator
from sys import byteorder

from vipd.host.host_changes import HostChanges
from vipd.host.netlink import ACKNOWLEDGE, CREATE, REQUEST, attribute, message
from vipd.host.netlink_socket import acknowledge, open_netlink
from vipd.host.route_table import LINK_SCOPE, PROTOCOL
from vipd.host.rtnetlink import NEW_ROUTE, SILENCE_SECONDS, Message, read_listing
from vipd.model.service import Family, family_of

log = logging.getLogger(__name__)

DEFAULT_TABLE = 86
"""As the setting `announce_table`; cleanup looks into it without a record, too."""
DELETE_ROUTE = 25
MAX_ROUTES = 1_000_000
ROUTE_GROUPS = 0x40 | 0x400
"""Netlink groups: routes of both families."""

_RTMSG = struct.Struct("=BBBBBBBBI")
"""struct rtmsg, as in `route_table`."""
_DST, _OIF, _TABLE = 1, 4, 15
_UNICAST = 1
_REPLACE = 0x100
_UNIVERSE = 0
_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


class AnnouncedRoutes:
    """Makes vipd's table equal to a set of addresses. It keeps no state of its own but the record for
    cleanup."""

    def __init__(self, table: int, device: str, record: HostChanges) -> None:
        """`device`: the one of the routes to VIPs, which drops what no rule has translated."""
        self._table, self._device, self._record = table, device, record

    async def read(self) -> frozenset[str]:
        """The addresses in the table. Raises OSError."""
        return await read_table(self._table)

    async def foreign(self) -> int:
        """Number of routes of others in the table. Raises OSError."""
        return await asyncio.to_thread(_foreign, self._table)

    async def ensure(self, addresses: Collection[str]) -> None:
        """Make the table equal to these addresses; the record of the host is written first. Raises
        OSError."""
        if addresses:
            self._record.record_announce_table(self._table)
        tables = self._record.read().announce_tables
        if self._table in tables:
            await asyncio.to_thread(self._make_equal, frozenset(addresses))
        for former in tables:
            if former != self._table:  # the setting was another one
                await asyncio.to_thread(_clear, former)
                self._record.forget_announce_table(former)

    def _make_equal(self, wanted: frozenset[str]) -> None:
        there = set(_listed(self._table))
        if there == wanted:
            return
        with open_netlink(socket.NETLINK_ROUTE) as opened:
            opened.settimeout(SILENCE_SECONDS)
            # First what is new: a host that replaces one address by another is never without both.
            if new := wanted - there:
                index = self._index()
                for address in sorted(new):
                    _request(opened, NEW_ROUTE, CREATE | _REPLACE, _route(self._table, address, index))
            for address in sorted(there - wanted):
                _delete(opened, self._table, address)

    def _index(self) -> int:
        if not self._device:
            raise OSError(errno.ENODEV, "routes cannot be announced: vip_device is empty")
        try:
            return socket.if_nametoindex(self._device)
        except OSError as error:
            what = f"routes cannot be announced: the device {self._device} is missing"
            raise OSError(error.errno, what) from None


async def read_table(table: int) -> frozenset[str]:
    """The addresses that vipd has in a routing table. Raises OSError."""
    return frozenset(await asyncio.to_thread(lambda: list(_listed(table))))


class RouteEvents:
    """Wakes a loop when any route of this host has changed, or disappeared with its device."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    async def wait(self) -> None:
        """Until routes have changed since the last call. Raises OSError."""
        if self._socket is None:
            self._socket = open_netlink(socket.NETLINK_ROUTE, ROUTE_GROUPS | 0x1)
            self._socket.setblocking(False)
            return
        try:
            await asyncio.get_running_loop().sock_recv(self._socket, 1)
        except OSError as error:
            _ignore_overrun(error)
        while True:
            try:
                self._socket.recv(1)  # the rest of the message is dropped
            except BlockingIOError:
                return
            except OSError as error:
                _ignore_overrun(error)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _ignore_overrun(error: OSError) -> None:
    """Raises the error unless it means more changes than the buffer held."""
    if error.errno != errno.ENOBUFS:
        raise error


def remove_announced(record: HostChanges, *, dry_run: bool = False) -> list[str]:
    """Delete every route that vipd announces, and forget the tables; returns what was done, or would be.
    Raises OSError."""
    done = []
    for table in sorted({DEFAULT_TABLE, *record.read().announce_tables}):
        addresses = list(_listed(table))
        if addresses:
            number = "1 route" if len(addresses) == 1 else f"{len(addresses)} routes"
            done.append(f"{number} in table {table}")
        if not dry_run:
            _clear(table)
            record.forget_announce_table(table)
    return done


def _clear(table: int) -> None:
    """Delete every route of vipd in a table. Raises OSError."""
    addresses = list(_listed(table))
    with open_netlink(socket.NETLINK_ROUTE) as opened:
        opened.settimeout(SILENCE_SECONDS)
        for address in addresses:
            _delete(opened, table, address)


def _listed(table: int) -> Iterator[str]:
    """The addresses that vipd has in a table. Raises OSError."""
    for found in _routes(table):
        if _RTMSG.unpack(found.body)[5] == PROTOCOL and _DST in found.attributes:
            yield str(ipaddress.ip_address(found.attributes[_DST]))


def _foreign(table: int) -> int:
    return sum(_RTMSG.unpack(found.body)[5] != PROTOCOL for found in _routes(table))


def _routes(table: int) -> Iterator[Message]:
    for family, number in _FAMILIES.items():
        body = _RTMSG.pack(number, 0, 0, 0, table, 0, 0, 0, 0)
        try:
            for found in read_listing(NEW_ROUTE, body, MAX_ROUTES, strict=True):
                fields = _RTMSG.unpack(found.body)
                named = int.from_bytes(found.attributes.get(_TABLE, b""), byteorder) or fields[4]
                if fields[0] == number and named == table:
                    yield found
        except OSError as error:
            # A family that the kernel lacks, and with IPv6 a table that was never used.
            if error.errno not in (errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.ENOENT):
                what = f"the routes of table {table} ({family}) cannot be read: {error.strerror}"
                raise OSError(error.errno, what) from error


def _route(table: int, address: str, index: int = 0) -> bytes:
    """The route of an address; for a deletion without its device."""
    family = family_of(address)
    scope = LINK_SCOPE if family is Family.IPV4 else _UNIVERSE
    body = _RTMSG.pack(_FAMILIES[family], family.bits, 0, 0, table, PROTOCOL, scope, _UNICAST, 0)
    device = attribute(_OIF, struct.pack("=I", index)) if index else b""
    return body + attribute(_DST, ipaddress.ip_address(address).packed) + device


def _delete(opened: socket.socket, table: int, address: str) -> None:
    try:
        _request(opened, DELETE_ROUTE, 0, _route(table, address))
    except OSError as error:
        if error.errno != errno.ESRCH:  # already gone
            raise


def _request(opened: socket.socket, kind: int, flags: int, content: bytes) -> None:
    """Send a request, and wait for the kernel's answer. Raises OSError."""
    opened.send(message(kind, REQUEST | ACKNOWLEDGE | flags, 1, content))
    try:
        acknowledge(opened)
    except OSError as error:
        raise OSError(error.errno, f"an announced route cannot be changed: {error.strerror}") from None
