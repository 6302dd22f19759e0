"""Parses the messages that the kernel sends when it deletes a conntrack entry: each is an ended flow. Pure.

A message contains one entry. Ten thousand flows may end in a second, so a socket filter in the kernel drops
messages that vipd does not need, and one `struct` call reads the layout that the kernel uses for flows in
no zone.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.entries import (
    PROTOCOLS,
    Entry,
    SocketAddress,
    Traffic,
    address_text,
    parse,
)
from vipd.host.netlink import (
    ATTRIBUTE_HEADER,
    ATTRIBUTES,
    CONTENT,
    FAMILY_NUMBERS,
    HEADER,
    NESTED,
    MalformedMessageError,
)
from vipd.model.service import Family, Protocol

GROUP_DESTROY = 3
"""NFNLGRP_CONNTRACK_DESTROY of the kernel's include/uapi/linux/netfilter/nfnetlink.h."""
CT_DELETE = 0x102
"""IPCTNL_MSG_CT_DELETE, with the number of the netlink subsystem in the high byte."""
DESTINATION_TRANSLATED = 1 << 5
"""IPS_DST_NAT, a bit of an entry's status."""

_Instruction = tuple[int, int, int, int]
"""A BPF instruction: code, instructions to skip if its condition is true, to skip if false, constant."""


class FlowTuple(NamedTuple):
    """What all flows from one frontend of a service to one of its backends have in common."""

    family: Family
    protocol: Protocol
    destination: SocketAddress
    """Destination of the client's packets before translation: the frontend."""
    backend: SocketAddress

    @classmethod
    def of(cls, entry: Entry) -> FlowTuple:
        """The tuple of a conntrack entry."""
        return cls(entry.family, entry.protocol, entry.destination, entry.reply_source)


class FlowEnd(NamedTuple):
    """A flow that has ended."""

    flow: FlowTuple
    traffic: Traffic
    """All packets and bytes of the flow."""
    identity: bytes
    """The same bytes as `Entry.identity`."""


def parse_flow_end(message: bytes) -> FlowEnd | None:
    """The flow that a message reports as ended; None for other messages, and for a flow whose traffic the
    kernel did not count.

    Raises MalformedMessageError.
    """
    if len(message) < ATTRIBUTES:
        raise MalformedMessageError(f"a message of {len(message)} bytes")
    if HEADER.unpack_from(message)[1] != CT_DELETE:
        return None
    layout = _LAYOUTS.get(message[CONTENT])
    if layout and (found := layout.read(message)):
        return found
    entry = parse(message)
    if entry is None or entry.traffic is None:
        return None
    return FlowEnd(FlowTuple.of(entry), entry.traffic, entry.identity)


def kernel_filter() -> bytes:
    """A classic BPF program for the socket. It passes messages about flows whose destination was translated
    and whose traffic was counted. The kernel drops all others before the listener reads them."""

    def find(kind: int) -> tuple[_Instruction, ...]:
        return (_LOAD, 0, 0, ATTRIBUTES), (_LOAD_X, 0, 0, kind), (_FIND, 0, 0, _NLATTR)

    program = (
        *find(entries.CTA_STATUS),
        (_JUMP_EQUAL, 8, 0, 0),
        (_A_TO_X, 0, 0, 0),
        (_LOAD_WORD_AT_X, 0, 0, ATTRIBUTE_HEADER.size),
        (_JUMP_BITS, 0, 5, DESTINATION_TRANSLATED),
        *find(entries.CTA_COUNTERS_ORIG),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    )
    return b"".join(_INSTRUCTION.pack(*each) for each in program)


class _Layout:
    """Reads the layout in which the kernel reports a flow with ports in no zone: the address tuples of both
    directions, the id, the status, in newer kernels the timeout, and the counters. `parse` reads every other
    layout, and takes several times as long.
    """

    def __init__(self, family: Family) -> None:
        size, head = family.bits // 8, ATTRIBUTE_HEADER.pack
        one_way = 44 + 2 * size
        self._family = family
        self._orig_head = head(one_way, entries.CTA_TUPLE_ORIG | NESTED)
        self._reply_head = head(one_way, entries.CTA_TUPLE_REPLY | NESTED)
        self._reply = ATTRIBUTES + one_way
        self._id = self._reply + one_way
        self._id_head = head(8, entries.CTA_ID)
        self._original_counters_head = head(28, entries.CTA_COUNTERS_ORIG | NESTED) + _PACKETS_HEAD
        self._counters = (self._id + 16, self._id + 24)
        self._reply_counters_head = head(28, entries.CTA_COUNTERS_REPLY | NESTED) + _PACKETS_HEAD
        self._unpack_tuples = struct.Struct(
            f">{16 + size}x{size}s8xB15xH2x12x{size}s{size + 20}xH"
        ).unpack_from

    def read(self, message: bytes) -> FlowEnd | None:
        """The flow; None if the message has another layout."""
        reply, at_id = self._reply, self._id
        if (
            message[ATTRIBUTES : ATTRIBUTES + 4] != self._orig_head
            or message[reply : reply + 4] != self._reply_head
        ):
            return None
        for at in self._counters:
            if message[at : at + 8] == self._original_counters_head:
                break
        else:
            return None
        if len(message) < at + 56 or message[at_id : at_id + 4] != self._id_head:
            return None
        packets_in, bytes_in, heads, packets_out, bytes_out = _NUMBERS(message, at + 8)
        if heads != self._reply_counters_head:
            return None
        destination, number, port, backend, backend_port = self._unpack_tuples(message, ATTRIBUTES)
        protocol = PROTOCOLS.get(number)
        if protocol is None:
            return None
        way = FlowTuple(
            self._family, protocol, (address_text(destination), port), (address_text(backend), backend_port)
        )
        traffic = Traffic(packets_in, bytes_in, packets_out, bytes_out)
        return FlowEnd(way, traffic, message[ATTRIBUTES:reply] + message[at_id : at_id + 8])


_PACKETS_HEAD = ATTRIBUTE_HEADER.pack(12, entries.CTA_COUNTERS_PACKETS)
_NUMBERS = struct.Struct(">Q4xQ8sQ4xQ").unpack_from
_LAYOUTS = {number: _Layout(family) for family, number in FAMILY_NUMBERS.items()}

_INSTRUCTION = struct.Struct("=HBBI")
"""struct sock_filter of the kernel's include/uapi/linux/filter.h."""
_LOAD, _LOAD_X, _FIND, _LOAD_WORD_AT_X, _A_TO_X = 0x00, 0x01, 0x30, 0x40, 0x07
_JUMP_EQUAL, _JUMP_BITS, _RETURN = 0x15, 0x45, 0x06
_NLATTR = 0xFFFFF000 + 12
"""SKF_AD_NLATTR: sets A to the offset of the first attribute, from offset A on, whose type is in X; to 0 if
there is none."""
