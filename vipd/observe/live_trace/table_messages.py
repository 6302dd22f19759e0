"""The table that marks packets for tracing and reports how they leave, as messages to the kernel. Pure.

It belongs to the socket that created it (Linux 5.12): when that is closed, however its process ended, the
kernel removes the table. Written as netlink messages because a socket of this process must own it.

    start-*     raw, before everything: the first packets of the flow are traced from here on
    tracked-*   after connection tracking: packets of flows that began earlier are not traced any further
    end-*       after everything else: shows the packet as it goes on, its translated addresses too
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from vipd.host.netlink import (
    ACKNOWLEDGE,
    APPEND,
    CREATE,
    FAMILY_NUMBERS,
    REQUEST,
    attribute,
    message,
    nested,
    nfgenmsg,
    string,
    u32,
    u64,
)
from vipd.model.service import Family, Protocol
from vipd.observe.live_trace.packets import PROTOCOL_NUMBERS, Flow

TABLE_PREFIX = "vipd-trace-"
EARLIER = "earlier"
"""The chain that packets of older flows are led to."""
STARTS = ("start-", "tracked-")
END = "end-"

UDP_STARTS_PER_SECOND = 100
"""Datagrams look alike, whether a flow is new or old. Up to this number are traced before connection tracking
decides; a new flow beyond that is traced from there on."""

_BEGIN, _END = 0x10, 0x11
_SUBSYSTEM = 10
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_INET = 1
_OWNED = 0x2
"""NFT_TABLE_F_OWNER."""
_PREROUTING, _INPUT, _OUTPUT, _POSTROUTING = 0, 1, 3, 4
_RAW, _TRACKED, _LAST = -300, -199, 0x7FFFFFFE
"""Before connection tracking (-200), behind it, and just before a flow is confirmed."""
_REGISTER = 1
_EQUAL, _UNEQUAL = 0, 1
_NETWORK, _TRANSPORT = 1, 2
_META_TRACE, _META_FAMILY, _META_PROTOCOL = 12, 15, 16
_JUMP = -3
_STATE_OLD, _STATE_NEW = 0x2 | 0x4, 0x8
"""Bits of a connection's state: established or related; new."""
_SYN_ACK, _SYN, _SCTP_INIT = 0x12, 0x02, 1
_ADDRESSES = {Family.IPV4: (12, 16, 4), Family.IPV6: (8, 24, 16)}
"""Offsets of source and destination in the header, and their length."""

Expression = bytes


def table_name(pid: int) -> str:
    """The table of one process, so that several can trace at the same time."""
    return f"{TABLE_PREFIX}{pid}"


def transaction(table: str, flows: Sequence[Flow]) -> list[bytes]:
    """The messages of one transaction that makes the table for these flows.

    Each but the first and the last is acknowledged by the kernel.
    """
    hooks = [("output", _OUTPUT)]
    if any(not flow.from_here for flow in flows):
        hooks.append(("prerouting", _PREROUTING))
    chains = [
        (f"{start}{name}", number, priority)
        for name, number in hooks
        for start, priority in zip(STARTS, (_RAW, _TRACKED), strict=True)
    ]
    chains += [(f"{END}input", _INPUT, _LAST), (f"{END}postrouting", _POSTROUTING, _LAST)]
    rules = [(EARLIER, _trace(0))]
    rules += [(name, rule) for name, _, _ in chains for rule in _rules(name, flows)]
    parts = [(_NEW_TABLE, CREATE, string(1, table) + u32(2, _OWNED))]
    parts.append((_NEW_CHAIN, CREATE, string(1, table) + string(3, EARLIER)))
    parts += [(_NEW_CHAIN, CREATE, _base_chain(table, *chain)) for chain in chains]
    parts += [(_NEW_RULE, CREATE | APPEND, _rule(table, *rule)) for rule in rules]
    return list(_messages(parts))


def _messages(parts: Sequence[tuple[int, int, bytes]]) -> Iterator[bytes]:
    yield message(_BEGIN, REQUEST, 0, nfgenmsg(resource=_SUBSYSTEM))
    for sequence, (kind, flags, body) in enumerate(parts, 1):
        flags |= REQUEST | ACKNOWLEDGE
        yield message(_SUBSYSTEM << 8 | kind, flags, sequence, nfgenmsg(_INET) + body)
    yield message(_END, REQUEST, len(parts) + 1, nfgenmsg(resource=_SUBSYSTEM))


def _rules(chain: str, flows: Sequence[Flow]) -> Iterator[Expression]:
    """The rules of a base chain; those at the end have none."""
    start, tracked = STARTS
    wanted = [flow for flow in flows if chain.endswith("output") or not flow.from_here]
    if chain.startswith(tracked):
        yield _state(_STATE_OLD) + _jump(EARLIER)
        # Here the limit does not apply: connection tracking has found that the flow is new.
        yield from (_state(_STATE_NEW) + _matches(flow) + _trace(1) for flow in wanted)
    elif chain.startswith(start):
        limited = {flow: _limit() if flow.protocol is Protocol.UDP else b"" for flow in wanted}
        yield from (_matches(flow) + limit + _trace(1) for flow, limit in limited.items())


def _matches(flow: Flow) -> Expression:
    """A packet of the flow that may be its first."""
    family, protocol = flow.family, flow.protocol
    source_at, destination_at, length = _ADDRESSES[family]
    found = _meta(_META_FAMILY) + _compare(_EQUAL, bytes([FAMILY_NUMBERS[family]]))
    if flow.source:
        found += _payload(_NETWORK, source_at, length) + _compare(_EQUAL, ip_address(flow.source).packed)
    found += _payload(_NETWORK, destination_at, length)
    found += _compare(_EQUAL, ip_address(flow.destination).packed)
    found += _meta(_META_PROTOCOL) + _compare(_EQUAL, bytes([PROTOCOL_NUMBERS[protocol]]))
    if flow.source_port:
        found += _payload(_TRANSPORT, 0, 2) + _compare(_EQUAL, flow.source_port.to_bytes(2, "big"))
    found += _payload(_TRANSPORT, 2, 2) + _compare(_EQUAL, flow.port.to_bytes(2, "big"))
    if protocol is Protocol.TCP:
        found += _payload(_TRANSPORT, 13, 1) + _masked(bytes([_SYN_ACK])) + _compare(_EQUAL, bytes([_SYN]))
    if protocol is Protocol.SCTP:
        found += _payload(_TRANSPORT, 12, 1) + _compare(_EQUAL, bytes([_SCTP_INIT]))
    return found


def _base_chain(table: str, name: str, hook: int, priority: int) -> bytes:
    place = u32(1, hook) + u32(2, priority & 0xFFFFFFFF)
    return string(1, table) + string(3, name) + nested(4, place) + string(7, "filter")


def _rule(table: str, chain: str, expressions: Expression) -> bytes:
    return string(1, table) + string(2, chain) + nested(4, expressions)


def _expression(name: str, *parts: bytes) -> Expression:
    return nested(1, string(1, name) + nested(2, *parts))


def _meta(key: int) -> Expression:
    return _expression("meta", u32(1, _REGISTER), u32(2, key))


def _payload(base: int, offset: int, length: int) -> Expression:
    fields = (_REGISTER, base, offset, length)
    return _expression("payload", *(u32(kind, value) for kind, value in enumerate(fields, 1)))


def _masked(mask: bytes) -> Expression:
    fields = (u32(1, _REGISTER), u32(2, _REGISTER), u32(3, len(mask)))
    nothing = bytes(len(mask))
    return _expression("bitwise", *fields, _data(4, mask), _data(5, nothing))


def _compare(how: int, value: bytes) -> Expression:
    return _expression("cmp", u32(1, _REGISTER), u32(2, how), _data(3, value))


def _state(bits: int) -> Expression:
    """The connection's state is one of these. Such numbers are in the host's byte order."""
    load = _expression("ct", u32(1, _REGISTER), u32(2, 0))
    return load + _masked(struct.pack("=I", bits)) + _compare(_UNEQUAL, bytes(4))


def _limit() -> Expression:
    rate = u64(1, UDP_STARTS_PER_SECOND)
    return _expression("limit", rate, u64(2, 1), u32(3, 5), u32(4, 0))


def _trace(on: int) -> Expression:
    load = _expression("immediate", u32(1, _REGISTER), _data(2, bytes([on])))
    return load + _expression("meta", u32(2, _META_TRACE), u32(3, _REGISTER))


def _jump(chain: str) -> Expression:
    verdict = nested(2, u32(1, _JUMP & 0xFFFFFFFF) + string(2, chain))
    return _expression("immediate", u32(1, 0), nested(2, verdict))


def _data(kind: int, value: bytes) -> bytes:
    return nested(kind, attribute(1, value))
