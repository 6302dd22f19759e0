"""Parses the kernel's messages about traced packets. Pure.

Layouts are those of the kernel's include/uapi/linux/netfilter/nf_tables.h and nfnetlink_log.h.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from vipd.dataplane.nftables.codec import FAMILIES, number
from vipd.host.netlink import ATTRIBUTES, CONTENT, attributes, split, text, unsigned
from vipd.observe.live_trace.packets import Headers, read_headers, read_packet

GROUP_TRACE = 9
"""NFNLGRP_NFTRACE."""

LEGACY = "legacy"
"""Replaces the family of a table for rules of legacy iptables."""

_TRACE = 10 << 8 | 17
"""NFT_MSG_TRACE of NFNL_SUBSYS_NFTABLES."""
_LOGGED = 4 << 8
"""NFULNL_MSG_PACKET of NFNL_SUBSYS_ULOG."""
_LINE = re.compile(
    r"TRACE: (?P<table>[^:]+):(?P<chain>.+):(?P<kind>rule|return|policy):(?P<number>\d{1,18}) ?"
)


class EventKind(StrEnum):
    """Kind of an event."""

    RULE = "rule"
    """A rule matched."""
    RETURN = "return"
    """A chain ended, and the packet continues in the calling one."""
    POLICY = "policy"
    """A base chain ended."""


class TraceVerdict(StrEnum):
    """The decision of a rule or policy."""

    DROP = "drop"
    ACCEPT = "accept"
    STOLEN = "stolen"
    """Taken away by something that handles it otherwise."""
    QUEUE = "queue"
    CONTINUE = "continue"
    JUMP = "jump"
    GOTO = "goto"
    RETURN = "return"
    UNSAID = ""
    """Legacy iptables does not report it."""


_KINDS = {1: EventKind.POLICY, 2: EventKind.RETURN, 3: EventKind.RULE}
_VERDICTS = {
    0: TraceVerdict.DROP,
    1: TraceVerdict.ACCEPT,
    2: TraceVerdict.STOLEN,
    3: TraceVerdict.QUEUE,
    -1: TraceVerdict.CONTINUE,
    -3: TraceVerdict.JUMP,
    -4: TraceVerdict.GOTO,
    -5: TraceVerdict.RETURN,
}


class Chain(NamedTuple):
    """A chain in its table. `family` is nft's word for it, or LEGACY with a 6 behind it for IPv6."""

    family: str
    table: str
    name: str

    @property
    def legacy(self) -> bool:
        """It is one of legacy iptables."""
        return self.family.startswith(LEGACY)


class KernelEvent(NamedTuple):
    """One thing that happened to a traced packet."""

    id: int
    """The kernel's number of the packet, which changes on the way over `lo`; 0 if there is none."""
    chain: Chain
    kind: EventKind
    rule: int
    """The rule's handle; 0 if it is no rule. In legacy tables its number in the chain, from 1; a rule that
    always accepts, drops or returns is reported as the chain's end, and the end itself as one rule more."""
    verdict: TraceVerdict
    jump_target: str
    """The chain that a jump or goto leads to."""
    mark: int
    """The packet's mark after it (legacy: before it)."""
    headers: Headers | None
    """Contained in the first event of each base chain."""
    inbound: int
    """Number of the incoming interface; 0 for none."""
    outbound: int


def trace_events(datagram: bytes) -> Iterator[KernelEvent]:
    """The events of nf_tables in a datagram. Raises MalformedMessageError."""
    for kind, family, body in _messages(datagram):
        if kind == _TRACE:
            found = attributes(body)
            verdict = attributes(found.get(5, b""))
            decided = (
                _VERDICTS.get(number(verdict.get(1)), TraceVerdict.UNSAID) if verdict else TraceVerdict.UNSAID
            )
            if 16 in found:
                decided = _VERDICTS.get(number(found[16]), TraceVerdict.UNSAID)
            rule = unsigned(found.get(3))
            what = _KINDS.get(number(found.get(4)), EventKind.RETURN)
            yield KernelEvent(
                unsigned(found.get(6)),
                Chain(FAMILIES.get(family, str(family)), text(found.get(1)), text(found.get(2))),
                # Kernels report the end of a chain as of a rule that has no handle.
                EventKind.RETURN if what is EventKind.RULE and not rule else what,
                rule,
                decided,
                text(verdict.get(2)),
                unsigned(found.get(14)),
                read_headers(found.get(8, b""), found.get(9, b"")),
                unsigned(found.get(10)),
                unsigned(found.get(12)),
            )


def logged_events(datagram: bytes) -> Iterator[KernelEvent]:
    """The traces of legacy iptables in a datagram of nfnetlink_log; other logs are left out.

    Raises MalformedMessageError.
    """
    for kind, family, body in _messages(datagram):
        if kind != _LOGGED:
            continue
        found = attributes(body)
        line = _LINE.fullmatch(text(found.get(10)))
        if line is not None:
            chain = Chain(LEGACY + ("6" if family == 10 else ""), line["table"], line["chain"])
            yield KernelEvent(
                0,
                chain,
                EventKind(line["kind"]),
                int(line["number"]),
                TraceVerdict.UNSAID,
                "",
                unsigned(found.get(2)),
                read_packet(found.get(9, b"")),
                unsigned(found.get(4)),
                unsigned(found.get(5)),
            )


def _messages(datagram: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, family and attributes of each message. Raises MalformedMessageError."""
    for kind, _, _, _, start, end in split(datagram):
        if end - start >= ATTRIBUTES:
            yield kind, datagram[start + CONTENT], datagram[start + ATTRIBUTES : end]
