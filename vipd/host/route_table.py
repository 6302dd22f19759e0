"""This host's routes as vipd requires them: which addresses have one, and which routes are vipd's own."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from sys import byteorder
from typing import NamedTuple

from vipd.host.facts import ADDRESS_BITS, address_number
from vipd.host.netlink import attribute, attributes, text
from vipd.host.rtnetlink import NEW_LINK, NEW_ROUTE, NEW_RULE, Message, listing
from vipd.model.service import family_of

PROTOCOL = 86
"""`proto 86` in `ip route`: it and the metric identify vipd's own routes."""
MAX_ROUTES = 10_000_000
"""The internet's routes are a tenth of that."""
MAX_LINKS = MAX_RULES = 1_000_000
METRIC = 0x7FFF0000
"""High enough that any other route to the same address takes precedence."""
LINK_SCOPE = 253
WRONG_DEVICE = "elsewhere"
"""In place of the source address of a route of vipd's that leads to a wrong device."""

SILENT_KINDS = ("dummy", "bridge")
"""Kinds of device that, with nothing attached, drop all packets."""

_IFF_UP = 0x1
_DEAD = 0x1
"""RTNH_F_DEAD: the route's device is down."""
_UNICAST, _LAST_THAT_DELIVERS, _THROW = 1, 5, 9
"""Route types: unicast, local, broadcast, anycast and multicast deliver; `throw` means no route."""
_MAIN_TABLE, _TO_TABLE = 254, 1
_INVERTED = 0x2
_UNLIMITED = 0xFFFFFFFF
_RTMSG = struct.Struct("=BBBBBBBBI")
"""struct rtmsg of include/uapi/linux/rtnetlink.h: family, lengths of destination and source, tos, table,
protocol, scope, type, flags."""
_DST, _OIF, _PRIORITY, _PREFSRC, _TABLE = 1, 4, 6, 7, 15
_IFINFOMSG = struct.Struct("=BxHiII")
"""struct ifinfomsg of the same file: family, type, index, flags, mask of flags."""
_IFNAME, _MASTER, _LINKINFO, _INFO_KIND = 3, 10, 18, 1
_RULE = struct.Struct("=BBBBBBBBI")
"""struct fib_rule_hdr of include/uapi/linux/fib_rules.h: family, lengths of destination and source, tos,
table, two reserved bytes, action, flags."""
_RULE_PRIORITY, _SUPPRESS_PREFIXLEN, _RULE_TABLE, _RULE_PAD, _RULE_PROTOCOL = 6, 14, 15, 18, 21
_HARMLESS = {_RULE_PRIORITY, _SUPPRESS_PREFIXLEN, _RULE_TABLE, _RULE_PAD, _RULE_PROTOCOL}
"""Attributes that do not limit a rule to some packets."""


class Route(NamedTuple):
    """A foreign route. `deliverable` is False for blackhole, unreachable and prohibit."""

    version: int
    network: int
    length: int
    metric: int = 0
    deliverable: bool = True
    table: int = 254


@dataclass(frozen=True, slots=True)
class Device:
    """The device for routes to VIPs."""

    index: int
    kind: str
    up: bool
    member: bool = False
    """It belongs to a bridge, bond or VRF."""
    ports: bool = False
    """Other devices belong to it."""

    @property
    def usable(self) -> bool:
        """Whether all packets to it end there."""
        return self.kind in SILENT_KINDS and not self.member and not self.ports

    @property
    def unusable_reason(self) -> str:
        """Why it is not usable, as an end of a sentence."""
        if self.kind not in SILENT_KINDS:
            return f"a {self.kind or 'hardware'} device"
        return "a bridge with ports" if self.ports else "part of another device"


class RouteTable:
    """Longest-prefix lookup in routes of both families."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._by_length: dict[tuple[int, int], dict[int, Route]] = {}
        for route in routes:
            same_length = self._by_length.setdefault((route.version, route.length), {})
            known = same_length.get(route.network)
            if known is None or route.metric < known.metric:
                same_length[route.network] = route
        self._lengths = sorted(self._by_length, reverse=True)

    def best(self, address: str) -> Route | None:
        """The route of an address; None if there is none."""
        family, number = family_of(address).value, address_number(address)
        for version, length in self._lengths:
            if version == family:
                host_bits = ADDRESS_BITS[version] - length
                network = number >> host_bits << host_bits
                if found := self._by_length[version, length].get(network):
                    return found
        return None

    def covers(self, address: str) -> bool:
        """Whether packets to an address leave by some route."""
        route = self.best(address)
        return route is not None and route.deliverable


@dataclass(frozen=True, slots=True)
class Routing:
    """The result of a reading."""

    table: RouteTable
    """Every route except vipd's own, in the tables in which all packets are looked up."""
    own_routes: Mapping[str, str] = field(default_factory=dict)
    """VIP -> the source address of vipd's route to it, empty for none; or ELSEWHERE."""
    device: Device | None = None


Listing = Callable[[int, int, int], Iterable[Message]]
"""Lists the items of a type and address family, up to a number of them."""


async def read_routing(device: str, listing: Listing = listing) -> Routing:
    """The routes, and the device of a name. Raises OSError, also for messages that are not understood."""
    try:
        return await asyncio.to_thread(_read_routing, device, listing)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        what = f"the kernel's routes are not understood: {type(error).__name__}: {error}"
        raise OSError(errno.EBADMSG, what) from error


def _read_routing(name: str, listing: Listing) -> Routing:
    device = device_of(listing(NEW_LINK, 0, MAX_LINKS), name)
    rules = (rule for family in (2, 10) for rule in listing(NEW_RULE, family, MAX_RULES))
    tables = {table for rule in rules if (table := table_for_all(rule))}
    foreign, ours = [], {}
    for message in listing(NEW_ROUTE, 0, MAX_ROUTES):
        if is_own(message):
            here = device is not None and _number(message, _OIF) == device.index
            source = message.attributes.get(_PREFSRC)
            given = str(ipaddress.ip_address(source)) if source else ""
            ours[str(ipaddress.ip_address(message.attributes[_DST]))] = given if here else WRONG_DEVICE
        elif (route := route_of(message)) and route.table in tables:
            foreign.append(route)
    return Routing(RouteTable(foreign), ours, device)


def is_own(message: Message) -> bool:
    """Whether a route is one of vipd's."""
    protocol = _RTMSG.unpack(message.body)[5]
    return bool(protocol == PROTOCOL and _number(message, _PRIORITY) == METRIC)


def device_of(links: Iterable[Message], name: str) -> Device | None:
    """The device of a name among link messages."""
    known = {_IFINFOMSG.unpack(link.body)[2]: link for link in links}
    masters = {_number(link, _MASTER) for link in known.values()}
    for index, link in known.items():
        if name and text(link.attributes.get(_IFNAME)) == name:
            about = attributes(link.attributes.get(_LINKINFO, b""))
            up = bool(_IFINFOMSG.unpack(link.body)[3] & _IFF_UP)
            return Device(
                index, text(about.get(_INFO_KIND)), up, bool(_number(link, _MASTER)), index in masters
            )
    return None


def table_for_all(rule: Message) -> int | None:
    """The table to which a policy rule sends every packet; None if it is for some packets only.

    A VIP that has a route only under such a rule counts as without one: an unnecessary route does no
    harm, since rules translate every packet for a VIP before it is sent.
    """
    _, destination, source, tos, table, _, _, action, flags = _RULE.unpack(rule.body)
    limited = destination or source or tos or flags & _INVERTED
    if _SUPPRESS_PREFIXLEN in rule.attributes:
        limited = limited or _number(rule, _SUPPRESS_PREFIXLEN) != _UNLIMITED
    if action != _TO_TABLE or limited or not _HARMLESS.issuperset(rule.attributes):
        return None
    return _number(rule, _RULE_TABLE) or int(table)


def route_of(message: Message) -> Route | None:
    """A route message as a Route; None for one that packets skip."""
    family, length, _, _, table, _, _, kind, flags = _RTMSG.unpack(message.body)
    if family not in (2, 10) or kind == _THROW or flags & _DEAD:
        return None
    destination = message.attributes.get(_DST)
    return Route(
        4 if family == 2 else 6,
        int.from_bytes(destination, "big") if destination else 0,
        length,
        _number(message, _PRIORITY),
        kind <= _LAST_THAT_DELIVERS,
        _number(message, _TABLE) or table,
    )


def route_content(vip: str, device: int, source: str) -> bytes:
    """The content of the message for a route of vipd's to a VIP; `source`: the source address of its packets,
    empty for the kernel's choice."""
    version, address = family_of(vip), ipaddress.ip_address(vip).packed
    family, scope = (2, LINK_SCOPE) if version == 4 else (10, 0)
    head = _RTMSG.pack(family, len(address) * 8, 0, 0, _MAIN_TABLE, PROTOCOL, scope, _UNICAST, 0)
    numbers = attribute(_OIF, device.to_bytes(4, byteorder)) + attribute(
        _PRIORITY, METRIC.to_bytes(4, byteorder)
    )
    preferred = attribute(_PREFSRC, ipaddress.ip_address(source).packed) if source else b""
    return head + attribute(_DST, address) + numbers + preferred


def _number(message: Message, kind: int) -> int:
    """A number of 32 bits, or 0."""
    return int.from_bytes(message.attributes.get(kind, b""), byteorder)
