"""This host's addresses, gateways, subnets and neighbours, which services must not take from it, read from
the kernel. It blocks: use it from a thread."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface
from typing import NamedTuple

from vipd.host.facts import Subnet
from vipd.host.netlink import attributes
from vipd.host.route_table import Device
from vipd.host.rtnetlink import NEW_ADDRESS, NEW_LINK, NEW_NEIGHBOUR, NEW_ROUTE, Message, listing

MAX_ROUTES = 20_000
"""For each family. A default route comes first; the next hops of more routes than this are few."""
MAX_ADDRESSES = 20_000
MAX_DEVICES = 20_000
MAX_NEIGHBOURS = 5_000

FAMILIES = (socket.AF_INET, socket.AF_INET6)

_IFNAME, _MASTER, _LINKINFO, _INFO_KIND = 3, 10, 18, 1
_ADDRESS, _LOCAL, _BROADCAST = 1, 2, 4
_OIF, _GATEWAY, _MULTIPATH, _VIA = 4, 5, 9, 18
_DESTINATION, _HARDWARE = 1, 2
_UP, _LOOPBACK = 0x1, 0x8
_SCOPE_LINK = 253
_ANSWERED = 0x02 | 0x04 | 0x08 | 0x10 | 0x80
"""Neighbours that answered once, or that were configured: REACHABLE, STALE, DELAY, PROBE, PERMANENT."""
_NEXT_HOP = struct.Struct("=HBBi")
_LONGEST_WITH_EDGES = {4: 30, 6: 126}
"""In a longer prefix the first and the last address belong to hosts (RFC 3021, RFC 6164)."""


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """Facts that change only with the configuration of this host."""

    gateways: Mapping[str, str] = field(default_factory=dict)
    reserved_addresses: Mapping[str, str] = field(default_factory=dict)
    subnets: tuple[Subnet, ...] = ()
    peers: Mapping[str, str] = field(default_factory=dict)
    """The other ends of point-to-point devices, each with a description."""
    devices: Mapping[int, str] = field(default_factory=dict)
    """Names by number."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Every address of this host -> how `ip address` names it: `10.0.0.1/24 dev eth0`."""


class _Link(NamedTuple):
    name: str
    up: bool
    loopback: bool
    silent: bool
    """No other host is behind it."""


def read_network(vip_device: str) -> HostNetwork:
    """As the kernel has it now, without vipd's own device. Raises OSError and MalformedMessageError."""
    links = _links(listing(NEW_LINK, socket.AF_UNSPEC, MAX_DEVICES))
    edges, subnets, peers, own = dict[str, str](), dict[Subnet, None](), dict[str, str](), dict[str, str]()
    for message in _of_families(NEW_ADDRESS, MAX_ADDRESSES):
        link = links.get(_number(message.body, 4))
        if link is not None:
            address = str(ip_address(message.attributes.get(_LOCAL) or message.attributes[_ADDRESS]))
            own[address] = f"{address}/{message.body[1]} dev {link.name}"
        if link is None or link.loopback or link.name == vip_device or message.body[3] >= _SCOPE_LINK:
            continue
        network, peer = _network_of(message)
        edges.update(_edges(message, network, link.name))
        if peer:
            peers[peer] = f"the other end of {link.name}"
        elif link.up and not link.silent and network.network.prefixlen < network.max_prefixlen:
            subnets[_subnet(network, link.name)] = None
    names = {number: link.name for number, link in links.items()}
    gateways = {
        address: names.get(device, "a device that is gone")
        for message in _of_families(NEW_ROUTE, MAX_ROUTES)
        for address, device in _next_hops(message)
    }
    return HostNetwork(gateways, edges, tuple(subnets), peers, names, own)


def read_addresses() -> frozenset[str]:
    """Every address of this host in its network namespace, loopback included. Raises OSError."""
    found = (
        message.attributes.get(_LOCAL, message.attributes.get(_ADDRESS))
        for message in _of_families(NEW_ADDRESS, MAX_ADDRESSES)
    )
    try:
        return frozenset(str(ip_address(address)) for address in found if address)
    except ValueError as error:
        raise OSError(errno.EBADMSG, f"the kernel's answer is not understood: {error}") from error


def read_neighbours(devices: Mapping[int, str]) -> dict[str, str]:
    """Addresses that other hosts answer for, each with where. Raises OSError."""
    found = {}
    for message in _of_families(NEW_NEIGHBOUR, MAX_NEIGHBOURS):
        (state,) = struct.unpack_from("=H", message.body, 8)
        hardware, address = message.attributes.get(_HARDWARE, b""), message.attributes.get(_DESTINATION)
        if state & _ANSWERED and address and any(hardware):
            where = devices.get(_number(message.body, 4), "a device")
            found[str(ip_address(address))] = f"{hardware.hex(':')} on {where}"
    return found


def read_proxied() -> frozenset[str]:
    """Addresses for which this host answers its neighbours though it does not have them. Raises OSError."""
    found = _of_families(NEW_NEIGHBOUR, MAX_NEIGHBOURS, proxies=True)
    return frozenset(
        str(ip_address(m.attributes[_DESTINATION])) for m in found if _DESTINATION in m.attributes
    )


def _of_families(kind: int, most: int, *, proxies: bool = False) -> Iterator[Message]:
    """A listing of both families. A kernel without one of them may answer with all that it has."""
    for family in FAMILIES:
        for message in listing(kind, family, most, proxies=proxies):
            if message.body[0] == family:
                yield message


def _links(messages: Iterable[Message]) -> dict[int, _Link]:
    known = [(_number(m.body, 4), _number(m.body, 8), m.attributes) for m in messages]
    masters = {found[_MASTER] for _, _, found in known if _MASTER in found}
    links = {}
    for number, flags, found in known:
        about = attributes(found.get(_LINKINFO, b""))
        kind = about.get(_INFO_KIND, b"").rstrip(b"\0").decode("ascii", "replace")
        ports = struct.pack("=i", number) in masters
        silent = Device(number, kind, bool(flags & _UP), _MASTER in found, ports).usable
        name = found.get(_IFNAME, b"").rstrip(b"\0").decode("utf-8", "replace")
        links[number] = _Link(name, bool(flags & _UP), bool(flags & _LOOPBACK), silent)
    return links


def _network_of(message: Message) -> tuple[IPv4Interface | IPv6Interface, str]:
    """The network of an address of this host, and the other end where there is one."""
    there = message.attributes.get(_ADDRESS) or message.attributes[_LOCAL]
    here = message.attributes.get(_LOCAL, there)
    interface = ip_interface((there, message.body[1]))
    return interface, str(ip_address(there)) if there != here else ""


def _edges(message: Message, interface: IPv4Interface | IPv6Interface, device: str) -> dict[str, str]:
    network = interface.network
    place = f"{network} on {device}"
    edges = {}
    if network.prefixlen <= _LONGEST_WITH_EDGES[network.version]:
        edges[str(network.network_address)] = f"the network address of {place}"
        if network.version == 4:
            edges[str(network.broadcast_address)] = f"the broadcast address of {place}"
    if broadcast := message.attributes.get(_BROADCAST) if network.version == 4 else None:
        edges[str(ip_address(broadcast))] = f"the broadcast address of {place}"
    return edges


def _subnet(interface: IPv4Interface | IPv6Interface, device: str) -> Subnet:
    network = interface.network
    number = int(network.network_address) >> (network.max_prefixlen - network.prefixlen)
    return Subnet(network.version, number, network.prefixlen, f"{network} on {device}")


def _next_hops(message: Message) -> Iterator[tuple[str, int]]:
    """The gateways of a route, each with its device's number."""
    given = message.attributes
    if found := _gateway(given):
        yield found, _number(given.get(_OIF, bytes(4)), 0)
    hops, at = given.get(_MULTIPATH, b""), 0
    while at + _NEXT_HOP.size <= len(hops):
        length, _, _, device = _NEXT_HOP.unpack_from(hops, at)
        if length < _NEXT_HOP.size:
            return
        if found := _gateway(attributes(hops[at + _NEXT_HOP.size : at + length])):
            yield found, device
        at += (length + 3) & ~3


def _gateway(given: Mapping[int, bytes]) -> str:
    packed = given.get(_GATEWAY) or given.get(_VIA, b"")[2:]
    return str(ip_address(packed)) if len(packed) in (4, 16) else ""


def _number(packed: bytes, at: int) -> int:
    (number,) = struct.unpack_from("=i", packed, at)
    return int(number)
