"""Reads the kernel's nf_tables notifications: names and kinds only, not the content of rules. Pure.

Read without pyroute2, as a load of 10,000 services is some 110,000 of these messages: 0.23 s of CPU. For the
names alone pyroute2 takes 3.9 s. Layouts are those of the kernel's include/uapi/linux/netlink.h and
include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from vipd.host.netlink import APPEND, ATTRIBUTES, CONTENT, FAMILIES, HEADER, attributes, split, text, walk
from vipd.model.service import Family

GROUP_NFTABLES = 7
"""NFNLGRP_NFTABLES."""

INET = 1
"""The nf_tables family whose tables see packets of both families."""

_SUBSYSTEM = 10
"""NFNL_SUBSYS_NFTABLES, the upper byte of a message's type."""
_NEW_GENERATION = 15
_TABLE_ATTRIBUTE = 1
"""NFTA_TABLE_NAME, NFTA_CHAIN_TABLE and NFTA_RULE_TABLE alike."""
_CHAIN_ATTRIBUTE = {3: 3, 5: 3, 6: 2, 8: 2, 9: 2, 11: 2, 12: 2, 14: 2}
"""NFTA_CHAIN_NAME of a chain's messages, NFTA_RULE_CHAIN of a rule's, and the names of sets."""
_SET_KINDS = frozenset({9, 11, 12, 14})
_CHAIN_HOOK = 4
_HOOK_NUMBER = 1
_FORWARD_HOOK = 2
_RULE_EXPRESSIONS = 4
_RULE_POSITION = 6
"""NFTA_RULE_POSITION: set for a rule with others both before and behind it."""


class MessageKind(Enum):
    """Kind of change and object; the values are NFT_MSG_*."""

    TABLE_DELETED = 2
    CHAIN_ADDED = 3
    CHAIN_DELETED = 5
    RULE_ADDED = 6
    RULE_DELETED = 8


KINDS = {kind.value: kind for kind in MessageKind}
"""Changes of tables, chains and rules."""
KINDS_WITH_SETS = KINDS | {
    9: MessageKind.CHAIN_ADDED,
    11: MessageKind.CHAIN_DELETED,
    12: MessageKind.RULE_ADDED,
    14: MessageKind.RULE_DELETED,
}
"""With NFT_MSG_NEWSET, DELSET, NEWSETELEM and DELSETELEM: sets count as chains, and elements as rules."""


class Change(NamedTuple):
    """One message: an object was added or deleted. A replaced rule is two of them."""

    kind: MessageKind
    family: Family
    """IPv4 for a table of the family inet, which has both."""
    table: str
    """A table of the family inet has the name `inet NAME`."""
    chain: str
    """Empty: the whole table."""
    flags: int
    attributes: bytes
    """The raw attributes, for `rule_facts`."""
    port: int
    """Netlink address of the socket that sent the change."""
    of_set: bool = False
    """It is about a set or its elements."""


class Generation(NamedTuple):
    """The end of one transaction, and its author."""

    port: int
    pid: int
    """A pid of the first pid namespace. 0: unknown (kernels before 4.12)."""
    name: str
    """The process's name, at most 15 characters."""


class RuleFacts(NamedTuple):
    """The content of one rule's message beyond its chain."""

    appended: bool
    """It is the last one of its chain, by `-A`; the only one it may be too."""
    expressions: bytes | None
    """The rule's expressions, raw; a name that it jumps to appears unchanged in it. None: missing."""


def read_messages(datagram: bytes, kinds: Mapping[int, MessageKind] = KINDS) -> Iterator[Change | Generation]:
    """The messages of a datagram that are of these kinds, or end a transaction, in the tables of IPv4, IPv6
    and inet. Raises MalformedMessageError."""
    for kind, flags, _, port, start, end in split(datagram):
        if kind >> 8 != _SUBSYSTEM:
            continue
        kind &= 0xFF
        family = datagram[start + CONTENT] if end - start >= ATTRIBUTES else 0
        if kind in kinds and (family in FAMILIES or family == INET):
            body = datagram[start + ATTRIBUTES : end]
            table, chain = _names(body, _CHAIN_ATTRIBUTE.get(kind, _TABLE_ATTRIBUTE))
            table = f"inet {table}" if family == INET else table
            of = FAMILIES.get(family, Family.IPV4)
            yield Change(kinds[kind], of, table, chain, flags, body, port, kind in _SET_KINDS)
        elif kind == _NEW_GENERATION:
            yield _generation(port, datagram[start + ATTRIBUTES : end])


def sender_and_end(datagram: bytes) -> tuple[int, bool]:
    """The netlink address of a datagram's sender, and whether its first message is a Generation.

    Enough to skip a datagram: the kernel never mixes two transactions in one, nor a Generation with changes.
    """
    if len(datagram) < ATTRIBUTES:
        return 0, False
    _, kind, _, _, port = HEADER.unpack_from(datagram)
    return port, kind & 0xFF == _NEW_GENERATION


def rule_facts(change: Change) -> RuleFacts:
    """Parse a rule's message further. Raises MalformedMessageError."""
    found = attributes(change.attributes)
    # Kernels that do not repeat the flag in notifications cause only an unnecessary read.
    appended = bool(change.flags & APPEND) and _RULE_POSITION not in found
    return RuleFacts(appended, found.get(_RULE_EXPRESSIONS))


def adds_chain_at_hook(change: Change) -> bool:
    """Whether a message declares a chain that forwarded packets enter. Raises MalformedMessageError."""
    if change.kind is not MessageKind.CHAIN_ADDED or change.of_set:
        return False
    hook = attributes(change.attributes).get(_CHAIN_HOOK, b"")
    return attributes(hook).get(_HOOK_NUMBER) == _FORWARD_HOOK.to_bytes(4, "big")


def _names(body: bytes, wanted: int) -> tuple[str, str]:
    """The names of table and chain; the chain's is the attribute with the number `wanted`."""
    table = chain = ""
    for number, value in walk(body):
        if number == _TABLE_ATTRIBUTE:
            table = _name(value)
        elif number == wanted:
            chain = _name(value)
        if table and (chain or wanted == _TABLE_ATTRIBUTE):
            break
    return table, chain


@lru_cache(maxsize=1024)
def _name(value: bytes) -> str:
    """A name. Most are those of the messages before."""
    return text(value)


def _generation(port: int, body: bytes) -> Generation:
    pid, name = 0, ""
    for number, value in walk(body):
        if number == 2 and len(value) == 4:
            pid = int.from_bytes(value, "big")
        elif number == 3:
            name = _name(value)
    return Generation(port, pid, name)
