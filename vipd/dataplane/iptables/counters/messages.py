"""The counters in the kernel's messages about rules. Pure.

Read with `struct` and by the order in which the kernel puts a rule's attributes (table, chain, handle), as
10,000 services have some 100,000 rules in nat. Layouts are those of the kernel's include/uapi/linux/netlink.h
and include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from vipd.dataplane.iptables.names import Names
from vipd.model.service import Family

FAMILY_NUMBERS = {Family.IPV4: 2, Family.IPV6: 10}
TABLE_DELETED, RULE_ADDED, RULE_LISTED, RULE_DELETED = 0x0A02, 0x0A06, 0x0A07, 0x0A08
"""NFT_MSG_DELTABLE, NEWRULE, GETRULE and DELRULE, with the number of the subsystem."""

HEAD = struct.Struct("=IHHII")
"""nlmsghdr. nfgenmsg, four bytes beginning with the family, follows."""
_ATTRIBUTES = 20
_ATTRIBUTE = struct.Struct("=HH")
_NUMBER = struct.Struct(">Q")
_TYPE_MASK = 0x3FFF
_FAMILIES = {number: family for family, number in FAMILY_NUMBERS.items()}
_TABLE, _CHAIN, _HANDLE, _PACKETS = 1, 2, 3, 2
_HASH_LENGTH = 16


def attribute(kind: int, value: bytes) -> bytes:
    """An attribute with its padding."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


class Counted(NamedTuple):
    """What one rule has counted."""

    family: Family
    chain: str
    handle: int
    """Names the rule in its table as long as that exists; 0 where the kernel names no rules."""
    packets: int


class TableGone(NamedTuple):
    """A family's nat table was deleted: handles begin anew."""

    family: Family


class RuleMessages:
    """Reads messages about the rules by which endpoints' chains translate."""

    def __init__(self, names: Names) -> None:
        self._table = attribute(_TABLE, b"nat\0")
        name = f"{names.prefix}-SEP-".encode()
        size = len(name) + _HASH_LENGTH
        self._chain = self._table + _ATTRIBUTE.pack(_ATTRIBUTE.size + size + 1, _CHAIN) + name
        self._name_at = _ATTRIBUTES + len(self._table) + _ATTRIBUTE.size
        self._name_end = self._name_at + size
        self._handle_at = _ATTRIBUTES + len(self._table) + len(attribute(_CHAIN, bytes(size + 1)))
        # An endpoint's chain has one rule besides: the mark for flows of the endpoint to itself.
        mark = names.fixed("MARK-MASQ").encode() + b"\0"
        self._mark_jump = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(mark), _CHAIN) + mark
        self._counter = attribute(1, b"counter\0")

    def ended(self, datagram: bytes) -> Iterator[Counted | TableGone]:
        """The last counts that notifications carry. Raises ValueError when they are cut short."""
        for kind, start, end in self._split(datagram):
            if kind == RULE_DELETED:
                if counted := self._counted(datagram, start, end):
                    yield counted
            elif kind == TABLE_DELETED and (family := self._family_without_nat(datagram, start)):
                yield TableGone(family)

    def listed(self, datagram: bytes) -> Iterator[Counted]:
        """The counts in a part of a dump. Raises ValueError when it is cut short."""
        for kind, start, end in self._split(datagram):
            if kind == RULE_ADDED and (counted := self._counted(datagram, start, end)):
                yield counted

    def _split(self, datagram: bytes) -> Iterator[tuple[int, int, int]]:
        place, total, unpack = 0, len(datagram), HEAD.unpack_from
        while place + HEAD.size <= total:
            length, kind, _, _, _ = unpack(datagram, place)
            if length < HEAD.size or place + length > total:
                raise ValueError(f"message of {length} bytes at byte {place} of {total}")
            yield kind, place, place + length
            place += (length + 3) & ~3
        if place < total:
            raise ValueError(f"{total - place} stray bytes after the last message")

    def _family_without_nat(self, datagram: bytes, start: int) -> Family | None:
        nat = datagram.startswith(self._table, start + _ATTRIBUTES)
        return _FAMILIES.get(datagram[start + HEAD.size]) if nat else None

    def _counted(self, datagram: bytes, start: int, end: int) -> Counted | None:
        """What a message says of a translating rule; None for any other rule."""
        if not datagram.startswith(self._chain, start + _ATTRIBUTES):
            return None
        family = _FAMILIES.get(datagram[start + HEAD.size])
        at = datagram.find(self._counter, start + self._handle_at, end)
        if family is None or at < 0 or datagram.find(self._mark_jump, at, end) >= 0:
            return None
        chain = datagram[start + self._name_at : start + self._name_end].decode(errors="replace")
        try:
            (handle,) = _NUMBER.unpack_from(datagram, start + self._handle_at + _ATTRIBUTE.size)
            return Counted(family, chain, handle, _packets(datagram, at + len(self._counter)))
        except struct.error as error:
            raise ValueError(f"a rule of {chain}: {error}") from None


def _packets(datagram: bytes, at: int) -> int:
    """The number of packets in a counter's data, which begins at a place."""
    length, _ = _ATTRIBUTE.unpack_from(datagram, at)
    end, at = at + length, at + _ATTRIBUTE.size
    while at < end:
        length, kind = _ATTRIBUTE.unpack_from(datagram, at)
        if kind & _TYPE_MASK == _PACKETS:
            return int(_NUMBER.unpack_from(datagram, at + _ATTRIBUTE.size)[0])
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    raise ValueError("a counter without packets")
