"""Parses the kernel's messages about traced packets. Pure.

Layouts are those of the kernel's include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from vipd.dataplane.nftables.codec import FAMILIES, number
from vipd.host.netlink import ATTRIBUTES, CONTENT, attributes, split, text, unsigned
from vipd.observe.live_trace.packets import Headers, read_headers

GROUP_TRACE = 9
"""NFNLGRP_NFTRACE."""

_TRACE = 10 << 8 | 17
"""NFT_MSG_TRACE of NFNL_SUBSYS_NFTABLES."""


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
    """The kernel did not report it."""


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
    """A chain in its table. `family` is nft's word for it."""

    family: str
    table: str
    name: str


class KernelEvent(NamedTuple):
    """One thing that happened to a traced packet."""

    id: int
    """The kernel's number of the packet, which changes on the way over `lo`; 0 if there is none."""
    chain: Chain
    kind: EventKind
    rule: int
    """The rule's handle; 0 if it is no rule."""
    verdict: TraceVerdict
    jump_target: str
    """The chain that a jump or goto leads to."""
    mark: int
    """The packet's mark after it."""
    headers: Headers | None
    """Contained in the first event of each base chain."""
    inbound: int
    """Number of the incoming interface; 0 for none."""
    outbound: int


def trace_events(datagram: bytes) -> Iterator[KernelEvent]:
    """The events of nf_tables in a datagram. Raises MalformedMessageError."""
    for kind, _, _, _, start, end in split(datagram):
        if kind == _TRACE and end - start >= ATTRIBUTES:
            family, found = datagram[start + CONTENT], attributes(datagram[start + ATTRIBUTES : end])
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
