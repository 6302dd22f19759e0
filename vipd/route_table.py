"""This host's routes as vipd must know them: which addresses have one, and which routes are vipd's own."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PROTOCOL = 86
"""`proto 86` in `ip route`: by it and the metric vipd knows its own routes."""
AT_ONCE = 50
"""Messages of routes between which the event loop gets its turn."""
METRIC = 0x7FFF0000
"""So high that any other route to the same address wins."""
LINK_SCOPE = 253
ELSEWHERE = "elsewhere"
"""In place of the source address of a route of vipd's that leads to another device than it should."""

SILENT_KINDS = ("dummy", "bridge")
"""Kinds of device that, with nothing attached, swallow what is sent to them."""

_IFF_UP = 0x1
_DEAD = 0x1
"""RTNH_F_DEAD: the route's device is down."""
_LAST_THAT_DELIVERS, _THROW = 5, 9
"""Route types: unicast, local, broadcast, anycast and multicast deliver; `throw` stands for no route."""
_TO_TABLE = 1
_INVERTED = 0x2
_UNLIMITED = 0xFFFFFFFF
_HARMLESS = {"FRA_TABLE", "FRA_PRIORITY", "FRA_PROTOCOL", "FRA_SUPPRESS_PREFIXLEN", "FRA_PAD"}


class Route(NamedTuple):
    """A foreign route. `delivers` is False for blackhole, unreachable and prohibit."""

    version: int
    network: int
    length: int
    metric: int = 0
    delivers: bool = True
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
        """Whether whatever is sent to it ends there."""
        return self.kind in SILENT_KINDS and not self.member and not self.ports

    @property
    def described(self) -> str:
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
        """The route of an address; None when there is none."""
        parsed = ipaddress.ip_address(address)
        for version, length in self._lengths:
            if version == parsed.version:
                host_bits = parsed.max_prefixlen - length
                network = int(parsed) >> host_bits << host_bits
                if found := self._by_length[version, length].get(network):
                    return found
        return None

    def covers(self, address: str) -> bool:
        """Whether packets to an address leave by some route."""
        route = self.best(address)
        return route is not None and route.delivers


@dataclass(frozen=True, slots=True)
class Routing:
    """What was read."""

    table: RouteTable
    """Every route but vipd's own, of the tables that all packets are looked up in."""
    ours: Mapping[str, str] = field(default_factory=dict)
    """VIP -> the source address of vipd's route to it, empty for none; or ELSEWHERE."""
    device: Device | None = None


async def read_routing(netlink: Any, device: str) -> Routing:
    """The routes by an `AsyncIPRoute`, and the device of a name. Raises NetlinkError and OSError, also
    for what is not understood."""
    try:
        return await _read_routing(netlink, device)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        what = f"the kernel's routes are not understood: {type(error).__name__}: {error}"
        raise OSError(errno.EBADMSG, what) from error


async def _read_routing(netlink: Any, device: str) -> Routing:
    links = [message async for message in await netlink.link("dump")]
    found = device_of(links, device)
    tables = {
        table
        for family in (2, 10)
        async for message in await netlink.rule("dump", family=family)
        if (table := table_for_all(message))
    }
    foreign, ours = [], {}
    number = 0
    async for message in await netlink.route("dump"):
        number += 1
        if not number % AT_ONCE:
            await asyncio.sleep(0)  # the library takes 0.2 ms a message
        if message["proto"] == PROTOCOL and message.get_attr("RTA_PRIORITY") == METRIC:
            here = found and message.get_attr("RTA_OIF") == found.index
            source = message.get_attr("RTA_PREFSRC") or ""
            ours[message.get_attr("RTA_DST")] = source if here else ELSEWHERE
        elif (route := route_of(message)) and route.table in tables:
            foreign.append(route)
    return Routing(RouteTable(foreign), ours, found)


def device_of(links: Iterable[Any], name: str) -> Device | None:
    """The device of a name among link messages."""
    links = list(links)
    for link in links:
        if name and link.get_attr("IFLA_IFNAME") == name:
            index, about = link["index"], link.get_attr("IFLA_LINKINFO")
            return Device(
                index,
                str(about.get_attr("IFLA_INFO_KIND") or "") if about else "",
                bool(link["flags"] & _IFF_UP),
                member=bool(link.get_attr("IFLA_MASTER")),
                ports=any(other.get_attr("IFLA_MASTER") == index for other in links),
            )
    return None


def table_for_all(rule: Any) -> int | None:
    """The table that a policy rule sends every packet to; None when it is for some packets only.

    A VIP that has a route only under such a rule counts as without one: a route more than needed harms
    nothing, for whatever reaches a VIP is translated by rules before it is sent.
    """
    attributes = dict(rule["attrs"])
    limited = rule["src_len"] or rule["dst_len"] or rule["tos"] or rule["flags"] & _INVERTED
    limited = limited or attributes.get("FRA_SUPPRESS_PREFIXLEN", _UNLIMITED) != _UNLIMITED
    if rule["action"] != _TO_TABLE or limited or not _HARMLESS.issuperset(attributes):
        return None
    return int(attributes.get("FRA_TABLE") or rule["table"])


def route_of(message: Any) -> Route | None:
    """A route message as a Route; None for one that packets pass by."""
    if message["family"] not in (2, 10) or message["type"] == _THROW or message["flags"] & _DEAD:
        return None
    version = 4 if message["family"] == 2 else 6
    destination = message.get_attr("RTA_DST")
    return Route(
        version,
        int(ipaddress.ip_address(destination)) if destination else 0,
        message["dst_len"],
        message.get_attr("RTA_PRIORITY") or 0,
        message["type"] <= _LAST_THAT_DELIVERS,
        message.get_attr("RTA_TABLE") or message["table"],
    )
