"""Requests to the kernel's connection tracking table, as bytes. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import ip_address

from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.entries import Entry, SocketAddress
from vipd.host.netlink import (
    ACKNOWLEDGE,
    DUMP,
    FAMILY_NUMBERS,
    REQUEST,
    attribute,
    attributes,
    message,
    nested,
    nfgenmsg,
    u32,
)
from vipd.model.service import Family, Protocol, family_of

NEW, GET, DELETE = 0x100, 0x101, 0x102
"""Message types of the subsystem ctnetlink. Each entry of a dump is a NEW."""

CTA_FILTER, CTA_STATUS_MASK = 25, 26
CTA_FILTER_ORIG_FLAGS, CTA_FILTER_REPLY_FLAGS = 1, 2
_FILTER_BY_SOURCE, _FILTER_BY_PROTOCOL = 1 << 0, 1 << 3


@dataclass(frozen=True, slots=True)
class Query:
    """Which entries to read.

    The kernel filters by protocol since Linux 5.8, by replies since 5.15. An older one sends
    all entries, so the reader must filter again.
    """

    family: Family
    protocol: Protocol | None = None
    unreplied: bool = False
    """Only entries that were never answered."""
    backend: str = ""
    """Only entries whose answers come from this IPv4 address; empty: from any. Linux up to 6.18 at least
    returns all others for an IPv6 address."""

    def fits(self, entry: Entry) -> bool:
        """Whether an entry matches."""
        wrong_protocol = self.protocol is not None and entry.protocol is not self.protocol
        wrong_backend = self.backend and entry.reply_source[0] != self.backend
        return not (wrong_protocol or wrong_backend or (self.unreplied and entry.replied))


def dump_request(query: Query, sequence: int) -> bytes:
    """Requests all entries of a query."""
    body = b""
    if query.protocol:
        number = attribute(entries.CTA_PROTO_NUM, bytes([entries.PROTOCOL_NUMBERS[query.protocol]]))
        body += nested(entries.CTA_TUPLE_ORIG, nested(entries.CTA_TUPLE_PROTO, number))
        flags = attribute(CTA_FILTER_ORIG_FLAGS, struct.pack("=I", _FILTER_BY_PROTOCOL))
        if query.backend:
            source = attribute(entries.CTA_IP_V4_SRC, ip_address(query.backend).packed)
            body += nested(entries.CTA_TUPLE_REPLY, nested(entries.CTA_TUPLE_IP, source))
            flags += attribute(CTA_FILTER_REPLY_FLAGS, struct.pack("=I", _FILTER_BY_SOURCE))
        body += nested(CTA_FILTER, flags)
    if query.unreplied:
        body += attribute(entries.CTA_STATUS, bytes(4))
        body += u32(CTA_STATUS_MASK, entries.SEEN_REPLY)
    return _message(GET, REQUEST | DUMP, sequence, query.family, body)


def get_request(
    protocol: Protocol, source: SocketAddress, destination: SocketAddress, sequence: int
) -> bytes:
    """Requests the entry of the flow between these ends, before translation."""
    family = family_of(source[0])
    first = 1 if family is Family.IPV4 else 3
    addresses = [
        attribute(first + number, ip_address(end[0]).packed)
        for number, end in enumerate((source, destination))
    ]
    ports = [
        attribute(kind, end[1].to_bytes(2, "big"))
        for kind, end in (
            (entries.CTA_PROTO_SRC_PORT, source),
            (entries.CTA_PROTO_DST_PORT, destination),
        )
    ]
    number = attribute(entries.CTA_PROTO_NUM, bytes([entries.PROTOCOL_NUMBERS[protocol]]))
    ends = nested(entries.CTA_TUPLE_IP, *addresses) + nested(entries.CTA_TUPLE_PROTO, number, *ports)
    return _message(GET, REQUEST, sequence, family, nested(entries.CTA_TUPLE_ORIG, ends))


def delete_request(entry: Entry, sequence: int) -> bytes:
    """Requests the deletion of exactly this entry. Raises ValueError if the entry is not fully identified.

    For the kernel a request without a flow's ends means the whole table.
    """
    if not {entries.CTA_TUPLE_ORIG, entries.CTA_ID} <= attributes(entry.identity).keys():
        raise ValueError("a deletion must name the ends of a flow and its id")
    return _message(DELETE, REQUEST | ACKNOWLEDGE, sequence, entry.family, entry.identity)


def _message(kind: int, flags: int, sequence: int, family: Family, body: bytes) -> bytes:
    return message(kind, flags, sequence, nfgenmsg(FAMILY_NUMBERS[family]) + body)
