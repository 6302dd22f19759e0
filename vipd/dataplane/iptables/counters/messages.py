"""The counters in the kernel's messages about rules that translate to an endpoint, or refuse a flow. Pure.

Read with `struct` and by the order in which the kernel puts a rule's attributes (table, chain, handle), as
10,000 services have some 100,000 rules in nat. Layouts are those of the kernel's include/uapi/linux/netlink.h
and include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from vipd.dataplane.iptables.names import Names
from vipd.host.netlink import (
    ATTRIBUTE_HEADER,
    ATTRIBUTES,
    CONTENT,
    FAMILIES,
    MalformedMessageError,
    attribute,
    split,
    string,
    walk,
)
from vipd.model.flow_limits import Limit
from vipd.model.service import Family

_NUMBER = struct.Struct(">Q")
TABLE_DELETED, RULE_ADDED, RULE_LISTED, RULE_DELETED = 0x0A02, 0x0A06, 0x0A07, 0x0A08
"""NFT_MSG_DELTABLE, NEWRULE, GETRULE and DELRULE, with the number of the subsystem."""

_TABLE, _CHAIN, _HANDLE, _PACKETS = 1, 2, 3, 2
_PACKETS_HEADER = ATTRIBUTE_HEADER.pack(12, _PACKETS)
_HASH_LENGTH = 16


class Counted(NamedTuple):
    """The counters of one rule."""

    family: Family
    chain: str
    """Its chain; of a rule of a LIM chain: as `limit_rule` names it."""
    handle: int
    """Names the rule in its table as long as that exists; 0 where the kernel names no rules."""
    packets: int


class TableGone(NamedTuple):
    """A family's nat table was deleted: handles restart."""

    family: Family


def limit_rule(chain: str, limit: Limit) -> str:
    """A name for the rule of one limit in a LIM chain, unlike that of any chain."""
    return f"{chain} {limit}"


def limit_of(rule: str, end: str) -> Limit | None:
    """The limit that a rule of a LIM chain names in its comment, which `end` ends."""
    return next((limit for limit in Limit if f" over {limit}{end}" in rule), None)


class RuleMessages:
    """Reads messages about these rules: one in the chain of each endpoint, and those of LIM chains."""

    def __init__(self, names: Names) -> None:
        self._table = string(_TABLE, "nat")
        name, limits = (f"{names.prefix}-{kind}-".encode() for kind in ("SEP", "LIM"))
        size = len(name) + _HASH_LENGTH
        head = self._table + ATTRIBUTE_HEADER.pack(ATTRIBUTE_HEADER.size + size + 1, _CHAIN)
        self._limits, self._chains = head + limits, (head + name, head + limits)
        self._name_at = ATTRIBUTES + len(self._table) + ATTRIBUTE_HEADER.size
        self._name_end = self._name_at + size
        self._handle_at = ATTRIBUTES + len(self._table) + len(attribute(_CHAIN, bytes(size + 1)))
        # An endpoint's chain has one rule besides: the mark for flows of the endpoint to itself.
        mark = names.fixed("MARK-MASQ").encode() + b"\0"
        self._mark_jump = ATTRIBUTE_HEADER.pack(ATTRIBUTE_HEADER.size + len(mark), _CHAIN) + mark
        self._counter = string(1, "counter")

    def ended(self, datagram: bytes) -> Iterator[Counted | TableGone]:
        """The last counts that notifications carry. Raises MalformedMessageError."""
        for kind, _, _, _, start, end in split(datagram):
            if kind == RULE_DELETED:
                if counted := self.counted(datagram, start, end):
                    yield counted
            elif kind == TABLE_DELETED and (family := self._family_without_nat(datagram, start)):
                yield TableGone(family)

    def _family_without_nat(self, datagram: bytes, start: int) -> Family | None:
        nat = datagram.startswith(self._table, start + ATTRIBUTES)
        return FAMILIES.get(datagram[start + CONTENT]) if nat else None

    def counted(self, datagram: bytes, start: int, end: int, asked: str = "") -> Counted | None:
        """The counters in a message about such a rule; None for any other rule. `asked`: the chain that the
        kernel was asked for."""
        if not datagram.startswith(self._chains, start + ATTRIBUTES):
            return None
        family = FAMILIES.get(datagram[start + CONTENT])
        at = datagram.find(self._counter, start + self._handle_at, end)
        if family is None or at < 0 or datagram.find(self._mark_jump, at, end) >= 0:
            return None
        chain = asked or datagram[start + self._name_at : start + self._name_end].decode(errors="replace")
        if datagram.startswith(self._limits, start + ATTRIBUTES):
            # A comment ends with a zero, whether it is a match or the user data of the rule.
            limit = limit_of(datagram[start + self._handle_at : end].decode("latin-1"), "\0")
            if limit is None:
                return None
            chain = limit_rule(chain, limit)
        try:
            (handle,) = _NUMBER.unpack_from(datagram, start + self._handle_at + ATTRIBUTE_HEADER.size)
            return Counted(family, chain, handle, _packets(datagram, at + len(self._counter)))
        except struct.error as error:
            raise MalformedMessageError(f"a rule of {chain}: {error}") from None


def _packets(datagram: bytes, at: int) -> int:
    """The number of packets in a counter's data, which begins at a position."""
    if datagram[at + 16 : at + 20] == _PACKETS_HEADER:  # the kernel puts them behind the bytes
        return int(_NUMBER.unpack_from(datagram, at + 20)[0])
    length, _ = ATTRIBUTE_HEADER.unpack_from(datagram, at)
    for kind, value in walk(datagram[at : at + length], ATTRIBUTE_HEADER.size):
        if kind == _PACKETS:
            return int(_NUMBER.unpack(value)[0])
    raise MalformedMessageError("a counter without packets")
