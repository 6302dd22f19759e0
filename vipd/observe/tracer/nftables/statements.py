"""What rules do: conditions, changes of the packet, verdicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

from vipd.observe.tracer.nftables.branch import Branch, Key
from vipd.observe.tracer.nftables.expressions import Drawn, Expression, Hashed, Look, Mapped, asked
from vipd.observe.tracer.nftables.holders import Ending, Holder, Spans, within
from vipd.observe.tracer.nftables.kinds import PORT
from vipd.observe.tracer.passing import PROTOCOLS
from vipd.observe.tracer.targets import Dnat, Ruling
from vipd.observe.tracer.targets import Masquerade as MasqueradeTarget
from vipd.observe.tracer.targets import Redirect as RedirectTarget
from vipd.observe.tracer.trace import Slots

DESTINATION_HOOKS = frozenset({"prerouting", "output"})
SOURCE_HOOKS = frozenset({"postrouting"})
REJECTING_HOOKS = frozenset({"prerouting", "input", "forward", "output"})


class Done(NamedTuple):
    """A statement that was carried out: the packet after it, and how the chain ends for it, if it does."""

    branch: Branch
    end: Ending | Ruling | None = None
    translated: bool = False


class Statement(Protocol):
    """One part of a rule."""

    @property
    def dice(self) -> int:
        """How many equally likely ways it can go."""

    def obey(self, look: Look) -> Done | None:
        """Carry it out; None: it does not match, and the rule ends here."""


@dataclass(frozen=True, slots=True)
class Count:
    """`counter`, which changes nothing."""

    dice: int = 1

    def obey(self, look: Look) -> Done | None:
        """Nothing."""
        return Done(look.branch)


@dataclass(frozen=True, slots=True)
class Compare:
    """`EXPRESSION [OPERATOR] VALUE`: the value is any of some literals."""

    left: Expression
    operator: str
    wanted: tuple[Spans, ...]
    elements: tuple[str, ...] = ()
    """As the literals of an anonymous set are spelled."""

    @property
    def dice(self) -> int:
        """Those of the expression."""
        return self.left.dice

    def obey(self, look: Look) -> Done | None:
        """Go on when it holds."""
        value = self.left.value(look)
        if value is None:
            return None
        return Done(look.branch) if self._holds(value) else None

    def _holds(self, value: Key) -> bool:
        if self.operator in ("==", "!="):
            return any(within(value, spans) for spans in self.wanted) is (self.operator == "==")
        bound, number = self.wanted[0][0][0], value[0]
        match self.operator:
            case "<":
                return number < bound
            case ">":
                return number > bound
            case "<=":
                return number <= bound
        return number >= bound


@dataclass(frozen=True, slots=True)
class Member:
    """`EXPRESSION @SET`, and with `!=`."""

    left: Expression
    holder: Holder
    negated: bool = False

    @property
    def dice(self) -> int:
        """Those of the expression."""
        return self.left.dice

    def obey(self, look: Look) -> Done | None:
        """Go on when the value is in the set."""
        if self.left.value(look) is None:
            return None
        there = asked(self.left, self.holder, look) is not None
        return Done(look.branch) if there is not self.negated else None


@dataclass(frozen=True, slots=True)
class Write:
    """`meta mark set`, `ct mark set`, and `ip saddr set` and `ip daddr set`, by which numbers are handed on
    to the next rule."""

    what: str
    value: Expression

    @property
    def dice(self) -> int:
        """Those of the value."""
        return self.value.dice

    def obey(self, look: Look) -> Done | None:
        """The packet with its new content; the value of a map that has no such element is none."""
        found = self.value.value(look)
        if found is None:
            return None
        number, branch = found[0], look.branch
        match self.what.split():
            case ["meta", _]:
                packet = replace(branch.packet, mark=number)
            case ["ct", _]:
                packet = replace(branch.packet, connection_mark=number)
            case [_, "saddr"]:
                packet = replace(branch.packet, source=number)
            case _:
                packet = replace(branch.packet, destination=number)
        return Done(branch.with_packet(packet))

    def slots(self, look: Look) -> Slots | None:
        """The slot that is chosen, if a slot is."""
        source = self.value.key if isinstance(self.value, Mapped) else self.value
        if not isinstance(source, Drawn | Hashed):
            return None
        found = source.value(look)
        return None if found is None else Slots((found[0] - source.offset,), source.modulus)


@dataclass(frozen=True, slots=True)
class Decide:
    """`accept`, `drop`, `return`, `continue`, `jump CHAIN` and `goto CHAIN`."""

    ending: Ending
    dice: int = 1

    def obey(self, look: Look) -> Done | None:
        """The verdict."""
        return Done(look.branch, self.ending)


@dataclass(frozen=True, slots=True)
class DecideByMap:
    """`EXPRESSION vmap @NAME`."""

    key: Expression
    holder: Holder

    @property
    def dice(self) -> int:
        """Those of the key."""
        return self.key.dice

    def obey(self, look: Look) -> Done | None:
        """The verdict that is found."""
        found = asked(self.key, self.holder, look)
        return Done(look.branch, found) if isinstance(found, Ending) else None


@dataclass(frozen=True, slots=True)
class Reject:
    """`reject`, with an ICMP error or, for TCP alone, `with tcp reset`."""

    reset: bool = False
    dice: int = 1
    hooks: ClassVar[frozenset[str]] = REJECTING_HOOKS

    def obey(self, look: Look) -> Done | None:
        """Refused; a reset matches TCP only."""
        if self.reset and look.branch.packet.protocol != PROTOCOLS["tcp"]:
            return None
        return Done(look.branch, Ruling.REJECT)


@dataclass(frozen=True, slots=True)
class Translate:
    """`dnat to VALUE`: an address, or an address and a port. Ends the chain."""

    to: Expression
    hooks: ClassVar[frozenset[str]] = DESTINATION_HOOKS

    @property
    def dice(self) -> int:
        """Those of the value."""
        return self.to.dice

    def obey(self, look: Look) -> Done | None:
        """The packet on its way there."""
        found = self.to.value(look)
        if found is None:
            return None
        with_port = self.to.kinds[-1] is PORT
        target = Dnat(found[0], found[1] if with_port else None)
        return Done(look.branch.with_packet(target.rewrite(look.branch.packet)), Ruling.ACCEPT, True)


@dataclass(frozen=True, slots=True)
class Redirect:
    """`redirect`, to this host itself, and with `to :PORT`. Ends the chain."""

    port: int | None = None
    dice: int = 1
    hooks: ClassVar[frozenset[str]] = DESTINATION_HOOKS

    def obey(self, look: Look) -> Done | None:
        """The packet on its way here."""
        found = RedirectTarget(self.port).rewrite(look.branch.packet)
        return Done(look.branch.with_packet(found), Ruling.ACCEPT, True)


@dataclass(frozen=True, slots=True)
class Masquerade:
    """`masquerade`: the address of the way out becomes the source. Ends the chain."""

    dice: int = 1
    hooks: ClassVar[frozenset[str]] = SOURCE_HOOKS

    def obey(self, look: Look) -> Done | None:
        """The packet with this host's address as its source."""
        found = MasqueradeTarget().rewrite(look.branch.packet)
        return Done(look.branch.with_packet(found), Ruling.ACCEPT, True)


@dataclass(frozen=True, slots=True)
class Learn:
    """`add`, `update` and `delete @NAME { KEY : VALUE }`: what packets themselves put into maps and sets."""

    verb: str
    holder: Holder
    key: Expression
    data: Expression | None = None

    @property
    def dice(self) -> int:
        """Those of key and value."""
        return max(self.key.dice, self.data.dice if self.data else 1)

    def obey(self, look: Look) -> Done | None:
        """The packet after it was remembered or forgotten. A key that is there keeps its value: of it
        `update` renews the timeout only (nft_rhash_update)."""
        key = self.key.value(look)
        value: Key | None = () if self.data is None else self.data.value(look)
        if key is None or value is None:
            return None
        if self.verb == "delete":
            return Done(look.branch.learning(self.holder.name, key, None))
        if self.holder.find(key, look.branch) is not None:
            return Done(look.branch)
        return Done(look.branch.learning(self.holder.name, key, value))
