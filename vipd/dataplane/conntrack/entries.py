"""One entry of the connection tracking table, read from the kernel's message. Pure.

Source: the kernel's uAPI header linux/netfilter/nfnetlink_conntrack.h. Attribute headers are in the byte
order of the machine, values in network order.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from vipd.model.service import Family, Protocol

SocketAddress = tuple[str, int]
"""An address in canonical text, and a port."""

SEEN_REPLY = 1 << 1
"""Bit of an entry's status: packets went both ways."""
TCP_SYN_SENT = 1
"""TCP state: the client asked for a connection and nobody answered yet."""
TCP_TIME_WAIT, TCP_CLOSE = 7, 8
"""TCP states: both sides have closed; the connection was reset."""

PROTOCOL_NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132}
ADDRESS_FAMILIES = {Family.IPV4: 2, Family.IPV6: 10}
"""AF_INET and AF_INET6, as Linux numbers them."""

CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_STATUS, CTA_PROTOINFO, CTA_TIMEOUT, CTA_MARK = 1, 2, 3, 4, 7, 8
CTA_ID, CTA_ZONE = 12, 18
CTA_COUNTERS_ORIG, CTA_COUNTERS_REPLY, CTA_TIMESTAMP = 9, 10, 20
CTA_COUNTERS_PACKETS, CTA_COUNTERS_BYTES = 1, 2
CTA_TIMESTAMP_START = 1
CTA_TUPLE_IP, CTA_TUPLE_PROTO = 1, 2
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
CTA_PROTOINFO_TCP = CTA_PROTOINFO_TCP_STATE = 1
NESTED = 0x8000
"""Bit of an attribute's type: it holds attributes."""

MESSAGE_HEAD = struct.Struct("=IHHII")
"""Length, type, flags, sequence number, port id: nlmsghdr."""
FAMILY_HEAD = struct.Struct("=BBH")
"""Address family, version, resource id: nfgenmsg. It follows the message's head."""
ATTRIBUTES = MESSAGE_HEAD.size + FAMILY_HEAD.size
"""Where a message's attributes begin."""
ATTRIBUTE_HEAD = struct.Struct("=HH")
"""Length with this head, and type."""

_TYPE = 0x3FFF
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_FAMILIES = {number: family for family, number in ADDRESS_FAMILIES.items()}
PROTOCOLS = {number: protocol for protocol, number in PROTOCOL_NUMBERS.items()}


class MalformedEntryError(ValueError):
    """A message from the kernel that does not hold together, or lacks what every entry has."""


class Traffic(NamedTuple):
    """What has passed in a flow: `in` from the client, `out` to it."""

    packets_in: int
    bytes_in: int
    packets_out: int
    bytes_out: int


class Entry(NamedTuple):
    """A tracked flow. `reply_source` is where answers come from: the backend, if the flow was translated."""

    family: Family
    protocol: Protocol
    source: SocketAddress
    destination: SocketAddress
    """Where the client sends to, before translation."""
    reply_source: SocketAddress
    reply_destination: SocketAddress
    """Where answers go to: this host, if the flow was masqueraded."""
    status: int
    """The kernel's IPS_ bits."""
    tcp_state: int
    """The kernel's TCP state, 0 for other protocols."""
    timeout: int
    """Seconds until it is forgotten, if no packet comes."""
    mark: int
    identity: bytes
    """Attributes that name exactly this entry, also against a younger one between the same ends."""
    traffic: Traffic | None = None
    """None where the kernel did not count when the flow began (nf_conntrack_acct)."""
    began: int | None = None
    """Nanoseconds since 1970; None where the kernel did not note it (nf_conntrack_timestamp)."""

    @property
    def replied(self) -> bool:
        """Whether packets went both ways."""
        return bool(self.status & SEEN_REPLY)

    @property
    def translated(self) -> bool:
        """Whether somebody other than the original destination answers."""
        return self.reply_source != self.destination


class _Ends(NamedTuple):
    """One direction of a flow. The protocol is None unless it is one that vipd balances."""

    protocol: Protocol | None
    source: SocketAddress
    destination: SocketAddress


def parse(message: bytes) -> Entry | None:
    """The entry in a message with its heads; None for a protocol without balanced ports, such as ICMP.

    Raises MalformedEntryError.
    """
    try:
        return _parse(message)
    except (struct.error, IndexError) as error:
        raise MalformedEntryError(f"a value is cut short: {error}") from error


def _parse(message: bytes) -> Entry | None:
    family = _FAMILIES.get(message[MESSAGE_HEAD.size])
    if family is None:
        return None
    original, position = _leading_ends(message, ATTRIBUTES, family, CTA_TUPLE_ORIG)
    if original.protocol is None:
        return None
    identity = message[ATTRIBUTES:position]
    reply, position = _leading_ends(message, position, family, CTA_TUPLE_REPLY)
    rest = {kind: (start, end) for kind, start, end in attributes(message, position, len(message))}
    for kind in (CTA_ZONE, CTA_ID):
        if kind in rest:
            start, end = rest[kind]
            identity += message[start - ATTRIBUTE_HEAD.size : start + _padded(end - start)]
    return Entry(
        family,
        original.protocol,
        *original[1:],
        *reply[1:],
        status=_number(message, rest.get(CTA_STATUS)),
        tcp_state=_tcp_state(message, *rest[CTA_PROTOINFO]) if CTA_PROTOINFO in rest else 0,
        timeout=_number(message, rest.get(CTA_TIMEOUT)),
        mark=_number(message, rest.get(CTA_MARK)),
        identity=identity,
        traffic=_traffic(message, rest) if CTA_COUNTERS_ORIG in rest else None,
        began=_numbers(message, rest[CTA_TIMESTAMP]).get(CTA_TIMESTAMP_START)
        if CTA_TIMESTAMP in rest
        else None,
    )


def attributes(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The attributes in a part of a message: type, where the value starts, where it ends.

    Raises MalformedEntryError when one reaches beyond the part.
    """
    while position < end:
        if end - position < ATTRIBUTE_HEAD.size:
            raise MalformedEntryError(f"{end - position} stray bytes after the last attribute")
        length, kind = ATTRIBUTE_HEAD.unpack_from(data, position)
        if length < ATTRIBUTE_HEAD.size or position + length > end:
            raise MalformedEntryError(f"attribute {kind & _TYPE} claims {length} of {end - position} bytes")
        yield kind & _TYPE, position + ATTRIBUTE_HEAD.size, position + length
        position += _padded(length)


class _Layout:
    """How the kernel lays out the ends of a flow with ports in no zone: read at one go, and checked.

    Walking through the attributes gives the same; this takes a fifth of the time.
    """

    def __init__(self, family: Family) -> None:
        size = family.bits // 8
        self.struct = struct.Struct(f">4s 4s 4s {size}s 4s {size}s 4s 4s B3x 4s H2x 4s H2x".replace(" ", ""))
        head = ATTRIBUTE_HEAD.pack
        addresses = 4 + 2 * (4 + size)
        self.heads = tuple(
            (
                head(self.struct.size, outer | NESTED),
                head(addresses, CTA_TUPLE_IP | NESTED),
                head(4 + size, 1 if family is Family.IPV4 else 3),
                head(4 + size, 2 if family is Family.IPV4 else 4),
                head(28, CTA_TUPLE_PROTO | NESTED),
                head(5, CTA_PROTO_NUM),
                head(6, CTA_PROTO_SRC_PORT),
                head(6, CTA_PROTO_DST_PORT),
            )
            for outer in (CTA_TUPLE_ORIG, CTA_TUPLE_REPLY)
        )


_LAYOUTS = {family: _Layout(family) for family in Family}


def _leading_ends(message: bytes, position: int, family: Family, outer: int) -> tuple[_Ends, int]:
    """The ends that an entry's message has first, and where they end. The kernel keeps to this order."""
    layout = _LAYOUTS[family]
    if position + layout.struct.size <= len(message):
        h0, h1, h2, src, h3, dst, h4, h5, number, h6, sport, h7, dport = layout.struct.unpack_from(
            message, position
        )
        if (h0, h1, h2, h3, h4, h5, h6, h7) == layout.heads[outer - 1]:
            ends = _Ends(PROTOCOLS.get(number), (address_text(src), sport), (address_text(dst), dport))
            return ends, position + layout.struct.size
    for kind, start, end in attributes(message, position, len(message)):
        if kind == outer:
            return _walk_ends(message, start, end), end
        break
    raise MalformedEntryError(f"an entry without attribute {outer} in its place")


def _walk_ends(message: bytes, start: int, end: int) -> _Ends:
    addresses = dict[int, str]()
    numbers = dict[int, int]()
    for kind, inner, inner_end in attributes(message, start, end):
        if kind == CTA_TUPLE_IP:
            for which, a, b in attributes(message, inner, inner_end):
                addresses[which] = address_text(message[a:b])
        elif kind == CTA_TUPLE_PROTO:
            for which, a, b in attributes(message, inner, inner_end):
                numbers[which] = int.from_bytes(message[a:b], "big")
    if set(addresses) not in ({1, 2}, {3, 4}) or CTA_PROTO_NUM not in numbers:
        raise MalformedEntryError("ends of a flow without addresses or protocol")
    source, destination = (addresses[which] for which in sorted(addresses))
    protocol = PROTOCOLS.get(numbers[CTA_PROTO_NUM])
    if protocol and not {CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT} <= numbers.keys():
        raise MalformedEntryError(f"a {protocol} flow without ports")
    ports = numbers.get(CTA_PROTO_SRC_PORT, 0), numbers.get(CTA_PROTO_DST_PORT, 0)
    return _Ends(protocol, (source, ports[0]), (destination, ports[1]))


def _tcp_state(message: bytes, start: int, end: int) -> int:
    for kind, inner, inner_end in attributes(message, start, end):
        if kind == CTA_PROTOINFO_TCP:
            for what, value, _ in attributes(message, inner, inner_end):
                if what == CTA_PROTOINFO_TCP_STATE:
                    return message[value]
    return 0


def _number(message: bytes, place: tuple[int, int] | None) -> int:
    """A 32-bit value, 0 where the kernel left it out."""
    return int(_U32.unpack_from(message, place[0])[0]) if place else 0


def _traffic(message: bytes, rest: Mapping[int, tuple[int, int]]) -> Traffic:
    ways = (_numbers(message, rest.get(kind)) for kind in (CTA_COUNTERS_ORIG, CTA_COUNTERS_REPLY))
    return Traffic(*(way.get(of, 0) for way in ways for of in (CTA_COUNTERS_PACKETS, CTA_COUNTERS_BYTES)))


def _numbers(message: bytes, place: tuple[int, int] | None) -> dict[int, int]:
    """The 64-bit values in an attribute that holds attributes, by their type."""
    if place is None:
        return {}
    found = attributes(message, *place)
    return {kind: int(_U64.unpack_from(message, at)[0]) for kind, at, end in found if end - at == _U64.size}


def _padded(length: int) -> int:
    """Attributes begin at multiples of four."""
    return (length + 3) & ~3


@lru_cache(maxsize=65536)
def address_text(address: bytes) -> str:
    """Canonical text of a packed address. Raises MalformedEntryError."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError as error:
        raise MalformedEntryError(str(error)) from None
