"""Expressions of nftables rules and their values. None: there is no value, and the rule does not match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vipd.observe.simulator.nftables.datatypes import NUMBER, Datatype, packed
from vipd.observe.simulator.nftables.jhash import jhash, reciprocal_scale
from vipd.observe.simulator.nftables.sets import NftSet, NftVerdict
from vipd.observe.simulator.packet_state import Key, PacketState


@dataclass(slots=True)
class EvalContext:
    """The packet that a rule is evaluated for, and the elements that its lookups have found."""

    packet: PacketState
    chosen: int = 0
    """The random value in this branch, if the rule uses one."""
    elements: list[str] = field(default_factory=list)
    """Of maps and sets, in their original spelling."""


class Expression(Protocol):
    """The operands of a rule's statements."""

    @property
    def types(self) -> tuple[Datatype, ...]:
        """The types of its fields."""

    @property
    def branches(self) -> int:
        """The number of equally likely values that chance chooses from; 1: chance has no part in it."""

    def value(self, context: EvalContext) -> Key | None:
        """The value for a packet, one number for each field."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the packet, its flow, or the route to one of its addresses."""

    name: str
    datatype: Datatype
    read: Callable[[PacketState], int | None]
    branches: int = 1

    @property
    def types(self) -> tuple[Datatype, ...]:
        """One type."""
        return (self.datatype,)

    def value(self, context: EvalContext) -> Key | None:
        """The field's value at this point."""
        found = self.read(context.packet)
        return None if found is None else (found,)


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal."""

    types: tuple[Datatype, ...]
    fixed: Key
    branches: int = 1

    def value(self, context: EvalContext) -> Key | None:
        """Always the same."""
        return self.fixed


@dataclass(frozen=True, slots=True)
class BitOperation:
    """`EXPRESSION & NUMBER`, and with `|` and `^`."""

    left: Expression
    operator: str
    right: int

    @property
    def types(self) -> tuple[Datatype, ...]:
        """Those of the expression."""
        return self.left.types

    @property
    def branches(self) -> int:
        """Those of the expression."""
        return self.left.branches

    def value(self, context: EvalContext) -> Key | None:
        """The expression's value with these bits."""
        found = self.left.value(context)
        if found is None:
            return None
        number = found[0]
        match self.operator:
            case "&":
                return (number & self.right,)
            case "|":
                return (number | self.right,)
        return (number ^ self.right,)


@dataclass(frozen=True, slots=True)
class Concatenation:
    """`A . B`: a concatenation."""

    parts: tuple[Expression, ...]

    @property
    def types(self) -> tuple[Datatype, ...]:
        """Those of all parts."""
        return tuple(datatype for part in self.parts for datatype in part.types)

    @property
    def branches(self) -> int:
        """Those of the part that has any."""
        return max(part.branches for part in self.parts)

    def value(self, context: EvalContext) -> Key | None:
        """The values of all parts; None where one has none."""
        found: list[int] = []
        for part in self.parts:
            value = part.value(context)
            if value is None:
                return None
            found.extend(value)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Numgen:
    """`numgen`, `symhash`, and `jhash` with a seed of the kernel's: the value is not predictable.

    `numgen inc` returns values in turn, from an unknown start: it counts as random.
    """

    how: str
    modulus: int
    offset: int = 0

    @property
    def types(self) -> tuple[Datatype, ...]:
        """A number."""
        return (NUMBER,)

    @property
    def branches(self) -> int:
        """One for each value."""
        return self.modulus

    def value(self, context: EvalContext) -> Key | None:
        """The chosen value."""
        return (context.chosen + self.offset,)


@dataclass(frozen=True, slots=True)
class SeededHash:
    """`jhash` with a seed: the same value for the same packet, on every host."""

    of: Expression
    modulus: int
    seed: int
    offset: int = 0
    how: str = "jhash"

    @property
    def types(self) -> tuple[Datatype, ...]:
        """A number."""
        return (NUMBER,)

    @property
    def branches(self) -> int:
        """The branches of the hashed expression."""
        return self.of.branches

    def value(self, context: EvalContext) -> Key | None:
        """The kernel's own value."""
        found = self.of.value(context)
        if found is None:
            return None
        return (reciprocal_scale(jhash(packed(found, self.of.types), self.seed), self.modulus) + self.offset,)


@dataclass(frozen=True, slots=True)
class MapLookup:
    """`EXPRESSION map @NAME` or `map { ... }`; a missing element ends the rule."""

    key: Expression
    nft_set: NftSet

    @property
    def types(self) -> tuple[Datatype, ...]:
        """Those of the map's values."""
        return self.nft_set.values

    @property
    def branches(self) -> int:
        """Those of the key."""
        return self.key.branches

    def value(self, context: EvalContext) -> Key | None:
        """The result of the lookup."""
        content = look_up(self.key, self.nft_set, context)
        return None if content is None or isinstance(content, NftVerdict) else content


def look_up(key: Expression, nft_set: NftSet, context: EvalContext) -> Key | NftVerdict | None:
    """Looks a key's value up in a map or set, and records the element."""
    value = key.value(context)
    if value is None:
        return None
    found = nft_set.find(value, context.packet)
    if found is None:
        return None
    if found.element:
        context.elements.append(found.element)
    return found.value
