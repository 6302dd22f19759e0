"""Values that rules compute from a packet. None: the kernel cannot tell, and the rule does not match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vipd.observe.tracer.nftables.branch import Branch, Key
from vipd.observe.tracer.nftables.holders import Ending, Holder
from vipd.observe.tracer.nftables.jenkins import jhash, scaled
from vipd.observe.tracer.nftables.kinds import NUMBER, Kind, packed


@dataclass(slots=True)
class Look:
    """A rule looking at a packet, and what it found."""

    branch: Branch
    drawn: int = 0
    """What the dice of the rule gave, where it has any."""
    elements: list[str] = field(default_factory=list)
    """Elements of maps and sets that were found, as they are spelled."""


class Expression(Protocol):
    """Something that has a value."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The types of its fields."""

    @property
    def dice(self) -> int:
        """How many equally likely values chance decides between; 1: none."""

    def value(self, look: Look) -> Key | None:
        """The value for a packet."""


@dataclass(frozen=True, slots=True)
class Field:
    """Something of the packet, its flow or this host's routes."""

    name: str
    kind: Kind
    read: Callable[[Branch], int | None]
    dice: int = 1

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One."""
        return (self.kind,)

    def value(self, look: Look) -> Key | None:
        """As it is now."""
        found = self.read(look.branch)
        return None if found is None else (found,)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A literal."""

    kinds: tuple[Kind, ...]
    fixed: Key
    dice: int = 1

    def value(self, look: Look) -> Key | None:
        """Always the same."""
        return self.fixed


@dataclass(frozen=True, slots=True)
class Bits:
    """`EXPRESSION & NUMBER`, and with `|` and `^`."""

    left: Expression
    operator: str
    right: int

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of the expression."""
        return self.left.kinds

    @property
    def dice(self) -> int:
        """Those of the expression."""
        return self.left.dice

    def value(self, look: Look) -> Key | None:
        """The expression's value with these bits."""
        found = self.left.value(look)
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
class Joined:
    """`A . B`: a concatenation."""

    parts: tuple[Expression, ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of all parts."""
        return tuple(kind for part in self.parts for kind in part.kinds)

    @property
    def dice(self) -> int:
        """Those of the part that has any."""
        return max(part.dice for part in self.parts)

    def value(self, look: Look) -> Key | None:
        """All parts, if each has a value."""
        found: list[int] = []
        for part in self.parts:
            value = part.value(look)
            if value is None:
                return None
            found.extend(value)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Drawn:
    """`numgen`, `symhash`, and `jhash` with a seed of the kernel's own: nobody can say which value comes.

    In turn (`numgen inc`) counts as by chance: whose turn it is nobody can say.
    """

    how: str
    modulus: int
    offset: int = 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """A number."""
        return (NUMBER,)

    @property
    def dice(self) -> int:
        """All values are equally likely."""
        return self.modulus

    def value(self, look: Look) -> Key | None:
        """What was drawn."""
        return (look.drawn + self.offset,)


@dataclass(frozen=True, slots=True)
class Hashed:
    """`jhash` with a seed: the same value for the same packet, on every host."""

    of: Expression
    modulus: int
    seed: int
    offset: int = 0
    how: str = "jhash"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """A number."""
        return (NUMBER,)

    @property
    def dice(self) -> int:
        """Those of what is hashed."""
        return self.of.dice

    def value(self, look: Look) -> Key | None:
        """The kernel's own value."""
        found = self.of.value(look)
        if found is None:
            return None
        return (scaled(jhash(packed(found, self.of.kinds), self.seed), self.modulus) + self.offset,)


@dataclass(frozen=True, slots=True)
class Mapped:
    """`EXPRESSION map @NAME` or `map { ... }`; a missing element ends the rule."""

    key: Expression
    holder: Holder

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of the map's values."""
        return self.holder.values

    @property
    def dice(self) -> int:
        """Those of the key."""
        return self.key.dice

    def value(self, look: Look) -> Key | None:
        """What is found there."""
        content = asked(self.key, self.holder, look)
        return None if content is None or isinstance(content, Ending) else content


def asked(key: Expression, holder: Holder, look: Look) -> Key | Ending | None:
    """What a key's value finds in a map or set, which is noted."""
    value = key.value(look)
    if value is None:
        return None
    found = holder.find(value, look.branch)
    if found is None:
        return None
    if found.element:
        look.elements.append(found.element)
    return found.value
