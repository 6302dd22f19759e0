"""The types of values in nftables rules, and the syntax of their literals.

A value is a tuple of numbers, one for each field of a concatenation. A literal may denote many values: each
of its fields is a range.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from sys import byteorder

from vipd.model.service import Family
from vipd.observe.simulator.iptables.options import number
from vipd.observe.simulator.packet_state import PROTOCOLS

Span = tuple[int, int]
"""The lowest and the highest value, both included."""

_REGISTER = 4
"""Fields of a concatenation begin at multiples of this many bytes."""

LOCAL = 2
"""RTN_LOCAL of include/uapi/linux/rtnetlink.h."""


@dataclass(frozen=True, slots=True)
class Datatype:
    """One type, as `nft describe` names it."""

    name: str
    size: int
    """Bytes."""
    host_order: bool = False

    @property
    def max_value(self) -> int:
        """The highest value."""
        return (1 << 8 * self.size) - 1

    def packed(self, value: int) -> bytes:
        """In the form of the kernel's registers."""
        return value.to_bytes(self.size, byteorder if self.host_order else "big")


ADDRESS = {Family.IPV4: Datatype("ipv4_addr", 4), Family.IPV6: Datatype("ipv6_addr", 16)}
PROTOCOL = Datatype("inet_proto", 1)
PORT = Datatype("inet_service", 2)
MARK = Datatype("mark", 4, host_order=True)
NUMBER = Datatype("integer", 4, host_order=True)
ROUTE_TYPE = Datatype("fib_addrtype", 4, host_order=True)
ICMP_TYPE = {Family.IPV4: Datatype("icmp_type", 1), Family.IPV6: Datatype("icmpv6_type", 1)}
VERDICT = Datatype("verdict", 0)

DATATYPES = {
    datatype.name: datatype
    for datatype in (
        *ADDRESS.values(), PROTOCOL, PORT, MARK, NUMBER, ROUTE_TYPE, *ICMP_TYPE.values(), VERDICT
    )
}  # fmt: skip

_NAMES = {
    PROTOCOL: {name: value for name, value in PROTOCOLS.items() if name != "ipv6-icmp"} | {"ipv6-icmp": 58},
    ROUTE_TYPE: {"local": LOCAL},
    ICMP_TYPE[Family.IPV4]: {"echo-reply": 0, "echo-request": 8},
    ICMP_TYPE[Family.IPV6]: {"echo-request": 128, "echo-reply": 129},
}
"""Names of values. Route types have no other syntax."""


@lru_cache(maxsize=65536)
def span(word: str, datatype: Datatype) -> Span:
    """The values of a literal: one, a range `a-b`, or a prefix `a/length`.

    Raises:
        ValueError: it is no literal of this datatype.
    """
    if datatype in ADDRESS.values():
        return _addresses(word, datatype)
    names = _NAMES.get(datatype, {})
    if word in names:
        return names[word], names[word]
    if datatype is ROUTE_TYPE or datatype is VERDICT:
        raise ValueError(f"{word} is no {datatype.name} that is known")
    low, dash, high = word.partition("-")
    first = number(low, datatype.max_value)
    return _ordered(word, first, number(high, datatype.max_value) if dash else first)


def spelled(value: tuple[int, ...], types: tuple[Datatype, ...]) -> str:
    """A value as vipd writes it, and nft prints it: `10.96.0.10 . udp . 53`."""
    return " . ".join(map(_spelled, value, types))


@lru_cache(maxsize=4096)
def _spelled(field: int, datatype: Datatype) -> str:
    if datatype in ADDRESS.values():
        return str(IPv4Address(field) if datatype.size == _REGISTER else IPv6Address(field))
    names = _NAMES.get(datatype, {})
    return next((name for name, value in names.items() if value == field), str(field))


def packed(value: tuple[int, ...], types: tuple[Datatype, ...]) -> bytes:
    """A value as the kernel hashes it: fields of a concatenation are filled up to whole registers."""
    if len(types) == 1:
        return types[0].packed(value[0])
    parts = (datatype.packed(field) for datatype, field in zip(types, value, strict=True))
    return b"".join(part.ljust(-(-len(part) // _REGISTER) * _REGISTER, b"\0") for part in parts)


def _addresses(word: str, datatype: Datatype) -> Span:
    low, dash, high = word.partition("-")
    if dash:
        return _ordered(word, _address(low, datatype), _address(high, datatype))
    if "/" not in word:
        return (_address(word, datatype),) * 2
    network = ip_network(word, strict=False)
    _address(str(network.network_address), datatype)
    return int(network.network_address), int(network.broadcast_address)


def _address(word: str, datatype: Datatype) -> int:
    address = ip_address(word)
    if 8 * datatype.size != address.max_prefixlen:
        raise ValueError(f"{word} is no {datatype.name}")
    return int(address)


def _ordered(word: str, low: int, high: int) -> Span:
    if low > high:
        raise ValueError(f"{word} ends before it begins")
    return low, high
