"""Parses one entry of the connection tracking table from the kernel's message. Pure.

Source: the kernel's uAPI header linux/netfilter/nfnetlink_conntrack.h. Attribute headers are in the byte
order of the machine, values in network order.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from vipd.host.netlink import (
    ATTRIBUTE_HEADER,
    ATTRIBUTES,
    CONTENT,
    FAMILIES,
    NESTED,
    MalformedMessageError,
    attribute,
    attributes,
    unsigned,
    walk,
)
from vipd.model.service import Family, Protocol

SocketAddress = tuple[str, int]
"""An address in canonical text, and a port."""

SEEN_REPLY = 1 << 1
"""Bit of an entry's status: packets went both ways."""
SOURCE_TRANSLATED, DESTINATION_TRANSLATED = 1 << 4, 1 << 5
"""The same: which end of the first packet was translated."""
TCP_SYN_SENT = 1
"""TCP state: the client requested a connection, and no answer has arrived yet."""
TCP_ESTABLISHED = 3
"""TCP state of every offloaded flow: one that closes leaves its flowtable."""
OFFLOADED = 1 << 14
"""IPS_OFFLOAD, a bit of an entry's status: the flow is in a flowtable. The kernel reports neither its TCP
state nor its timeout."""
TCP_TIME_WAIT, TCP_CLOSE = 7, 8
"""TCP states: both sides have closed; the connection was reset."""

TCP_STATES = (
    "NONE",
    "SYN_SENT",
    "SYN_RECV",
    "ESTABLISHED",
    "FIN_WAIT",
    "CLOSE_WAIT",
    "LAST_ACK",
    "TIME_WAIT",
    "CLOSE",
    "SYN_SENT2",
)
"""By the kernel's number, in the kernel's words (enum tcp_conntrack)."""

PROTOCOL_NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132}

CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_STATUS, CTA_PROTOINFO, CTA_TIMEOUT, CTA_MARK = 1, 2, 3, 4, 7, 8
CTA_ID, CTA_ZONE = 12, 18
CTA_COUNTERS_ORIG, CTA_COUNTERS_REPLY, CTA_TIMESTAMP = 9, 10, 20
CTA_COUNTERS_PACKETS, CTA_COUNTERS_BYTES = 1, 2
CTA_TIMESTAMP_START = 1
CTA_TUPLE_IP, CTA_TUPLE_PROTO = 1, 2
CTA_IP_V4_SRC = 1
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
CTA_PROTOINFO_TCP = CTA_PROTOINFO_TCP_STATE = 1

PROTOCOLS = {number: protocol for protocol, number in PROTOCOL_NUMBERS.items()}


class Traffic(NamedTuple):
    """Traffic of a flow: `in` from the client, `out` to it."""

    packets_in: int
    bytes_in: int
    packets_out: int
    bytes_out: int


class Entry(NamedTuple):
    """A tracked flow. `reply_source` is the source of answers: the backend, if the flow was translated."""

    family: Family
    protocol: Protocol
    source: SocketAddress
    destination: SocketAddress
    """Destination of the client's packets, before translation."""
    reply_source: SocketAddress
    reply_destination: SocketAddress
    """Destination of answers: this host, if the flow was masqueraded."""
    status: int
    """The kernel's IPS_ bits."""
    tcp_state: int
    """The kernel's TCP state, 0 for other protocols."""
    timeout: int
    """Seconds until it expires, if no packet arrives; 0 for an offloaded flow, of which the kernel does not
    report it."""
    mark: int
    identity: bytes
    """Attributes that name exactly this entry, also against a younger one between the same ends."""
    traffic: Traffic | None = None
    """None if the kernel did not count when the flow began (nf_conntrack_acct)."""
    began: int | None = None
    """Nanoseconds since 1970; None if the kernel did not record it (nf_conntrack_timestamp)."""

    @property
    def replied(self) -> bool:
        """Whether packets passed in both directions."""
        return bool(self.status & SEEN_REPLY)

    @property
    def translated(self) -> bool:
        """Whether a host other than the original destination answers."""
        return self.reply_source != self.destination

    @property
    def from_client(self) -> Entry:
        """The same flow as its client began it. Of a flow of another host this one may see a reply first
        (`flow_takeover`): then the entry begins at the backend, and the client is its destination."""
        translated = self.status & (SOURCE_TRANSLATED | DESTINATION_TRANSLATED)
        if translated != SOURCE_TRANSLATED or self.protocol is not Protocol.TCP:
            return self
        return self._replace(
            source=self.reply_source,
            destination=self.reply_destination,
            reply_source=self.source,
            reply_destination=self.destination,
        )


class _Ends(NamedTuple):
    """One direction of a flow. The protocol is None unless it is one that vipd balances."""

    protocol: Protocol | None
    source: SocketAddress
    destination: SocketAddress


def flow_state(entry: Entry) -> str:
    """TCP's state; for other flows whether they were answered."""
    if entry.protocol is Protocol.TCP and entry.tcp_state < len(TCP_STATES):
        return TCP_STATES[entry.tcp_state]
    return "REPLIED" if entry.replied else "UNREPLIED"


def parse(message: bytes) -> Entry | None:
    """The entry in a message with its headers; None for a protocol without balanced ports, such as ICMP.

    Raises MalformedMessageError.
    """
    if len(message) < ATTRIBUTES:
        raise MalformedMessageError(f"an entry of {len(message)} bytes")
    family = FAMILIES.get(message[CONTENT])
    if family is None:
        return None
    original, position = _leading_ends(message, ATTRIBUTES, family, CTA_TUPLE_ORIG)
    if original.protocol is None:
        return None
    identity = message[ATTRIBUTES:position]
    reply, position = _leading_ends(message, position, family, CTA_TUPLE_REPLY)
    rest = attributes(message, position)
    for kind in (CTA_ZONE, CTA_ID):
        if kind in rest:
            identity += attribute(kind, rest[kind])
    status = unsigned(rest.get(CTA_STATUS))
    offloaded = status & OFFLOADED and original.protocol is Protocol.TCP
    unreported = TCP_ESTABLISHED if offloaded else 0
    return Entry(
        family,
        original.protocol,
        *original[1:],
        *reply[1:],
        status=status,
        tcp_state=_tcp_state(rest[CTA_PROTOINFO]) if CTA_PROTOINFO in rest else unreported,
        timeout=unsigned(rest.get(CTA_TIMEOUT)),
        mark=unsigned(rest.get(CTA_MARK)),
        identity=identity,
        traffic=_traffic(rest) if CTA_COUNTERS_ORIG in rest else None,
        began=_numbers(rest[CTA_TIMESTAMP]).get(CTA_TIMESTAMP_START) if CTA_TIMESTAMP in rest else None,
    )


class _Layout:
    """The kernel's layout of the ends of a flow with ports in no zone: read in one step, and checked.

    Walking through the attributes has the same result; this takes a fifth of the time.
    """

    def __init__(self, family: Family) -> None:
        size = family.bits // 8
        self.struct = struct.Struct(f">4s 4s 4s {size}s 4s {size}s 4s 4s B3x 4s H2x 4s H2x".replace(" ", ""))
        head = ATTRIBUTE_HEADER.pack
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
    """The ends at the start of an entry's message, and where they end. The kernel keeps this order."""
    layout = _LAYOUTS[family]
    if position + layout.struct.size <= len(message):
        h0, h1, h2, src, h3, dst, h4, h5, number, h6, sport, h7, dport = layout.struct.unpack_from(
            message, position
        )
        if (h0, h1, h2, h3, h4, h5, h6, h7) == layout.heads[outer - 1]:
            ends = _Ends(PROTOCOLS.get(number), (address_text(src), sport), (address_text(dst), dport))
            return ends, position + layout.struct.size
    for kind, value in walk(message, position):
        if kind == outer:
            return _walk_ends(value), position + 4 + _padded(len(value))
        break
    raise MalformedMessageError(f"an entry without attribute {outer} in its place")


def _walk_ends(value: bytes) -> _Ends:
    found = attributes(value)
    addresses = attributes(found.get(CTA_TUPLE_IP, b""))
    numbers = attributes(found.get(CTA_TUPLE_PROTO, b""))
    if set(addresses) not in ({1, 2}, {3, 4}) or CTA_PROTO_NUM not in numbers:
        raise MalformedMessageError("ends of a flow without addresses or protocol")
    source, destination = (address_text(addresses[which]) for which in sorted(addresses))
    protocol = PROTOCOLS.get(unsigned(numbers[CTA_PROTO_NUM]))
    if protocol and not {CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT} <= numbers.keys():
        raise MalformedMessageError(f"a {protocol} flow without ports")
    ports = (unsigned(numbers.get(which)) for which in (CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT))
    return _Ends(protocol, (source, next(ports)), (destination, next(ports)))


def _tcp_state(value: bytes) -> int:
    tcp = attributes(value).get(CTA_PROTOINFO_TCP, b"")
    return unsigned(attributes(tcp).get(CTA_PROTOINFO_TCP_STATE))


def _traffic(rest: Mapping[int, bytes]) -> Traffic:
    ways = (_numbers(rest.get(kind, b"")) for kind in (CTA_COUNTERS_ORIG, CTA_COUNTERS_REPLY))
    return Traffic(*(way.get(of, 0) for way in ways for of in (CTA_COUNTERS_PACKETS, CTA_COUNTERS_BYTES)))


def _numbers(value: bytes) -> dict[int, int]:
    """The 64-bit values in a nested attribute, by their type."""
    return {kind: unsigned(number) for kind, number in walk(value) if len(number) == 8}


def _padded(length: int) -> int:
    """Attributes begin at multiples of four."""
    return (length + 3) & ~3


@lru_cache(maxsize=65536)
def address_text(address: bytes) -> str:
    """Canonical text of a packed address. Raises MalformedMessageError."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError as error:
        raise MalformedMessageError(str(error)) from None
