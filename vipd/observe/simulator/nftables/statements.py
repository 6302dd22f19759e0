"""Statements of nftables rules: matches, changes of the packet, verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from vipd.observe.simulator.nftables.datatypes import PORT
from vipd.observe.simulator.nftables.expressions import (
    EvalContext,
    Expression,
    MapLookup,
    Numgen,
    SeededHash,
    look_up,
)
from vipd.observe.simulator.nftables.sets import NftSet, NftVerdict, Spans, within
from vipd.observe.simulator.outcome import RuleVerdict, Slots
from vipd.observe.simulator.packet_state import PROTOCOLS, Key, PacketState

DESTINATION_HOOKS = frozenset({"prerouting", "output"})
SOURCE_HOOKS = frozenset({"postrouting"})
REJECTING_HOOKS = frozenset({"prerouting", "input", "forward", "output"})


class Applied(NamedTuple):
    """The packet after a statement, and the verdict if the statement gives one."""

    packet: PacketState
    verdict: NftVerdict | RuleVerdict | None = None
    translated: bool = False


class Statement(Protocol):
    """One part of a rule."""

    @property
    def branches(self) -> int:
        """The number of equally likely random values; 1 if the statement is not random."""

    def apply(self, context: EvalContext) -> Applied | None:
        """The effect on a packet. None if the statement does not match: then the rule ends here."""


@dataclass(frozen=True, slots=True)
class Counter:
    """`counter`, which changes nothing."""

    branches: int = 1

    def apply(self, context: EvalContext) -> Applied | None:
        """Matches every packet and changes nothing."""
        return Applied(context.packet)


@dataclass(frozen=True, slots=True)
class Compare:
    """`EXPRESSION [OPERATOR] VALUE`: compares the expression with one literal or several."""

    left: Expression
    operator: str
    values: tuple[Spans, ...]
    elements: tuple[str, ...] = ()
    """The literals of an anonymous set, in their original spelling."""

    @property
    def branches(self) -> int:
        """Those of the expression."""
        return self.left.branches

    def apply(self, context: EvalContext) -> Applied | None:
        """The unchanged packet if the comparison is true, otherwise None."""
        value = self.left.value(context)
        if value is None:
            return None
        return Applied(context.packet) if self._holds(value) else None

    def _holds(self, value: Key) -> bool:
        if self.operator in ("==", "!="):
            return any(within(value, spans) for spans in self.values) is (self.operator == "==")
        bound, number = self.values[0][0][0], value[0]
        match self.operator:
            case "<":
                return number < bound
            case ">":
                return number > bound
            case "<=":
                return number <= bound
        return number >= bound


@dataclass(frozen=True, slots=True)
class InSet:
    """`EXPRESSION @SET` and `EXPRESSION != @SET`."""

    left: Expression
    nft_set: NftSet
    negated: bool = False

    @property
    def branches(self) -> int:
        """Those of the expression."""
        return self.left.branches

    def apply(self, context: EvalContext) -> Applied | None:
        """The unchanged packet if the value is in the set (`!=`: is not in it), otherwise None."""
        if self.left.value(context) is None:
            return None
        there = look_up(self.left, self.nft_set, context) is not None
        return Applied(context.packet) if there is not self.negated else None


@dataclass(frozen=True, slots=True)
class SetField:
    """`meta mark set`, `ct mark set`, `ip saddr set` and `ip daddr set`. By the last two, a rule passes a
    number to the next rule."""

    field: str
    value: Expression

    @property
    def branches(self) -> int:
        """Those of the value."""
        return self.value.branches

    def apply(self, context: EvalContext) -> Applied | None:
        """The packet with the new field; None if the value is a map lookup that finds no element."""
        found = self.value.value(context)
        if found is None:
            return None
        number, packet = found[0], context.packet
        match self.field.split():
            case ["meta", _]:
                packet = packet._replace(mark=number)
            case ["ct", _]:
                packet = packet._replace(connection_mark=number)
            case [_, "saddr"]:
                packet = packet._replace(source=number)
            case _:
                packet = packet._replace(destination=number)
        return Applied(packet)

    def slots(self, context: EvalContext) -> Slots | None:
        """The slot that the value's random number or hash chooses; None if it contains neither."""
        source = self.value.key if isinstance(self.value, MapLookup) else self.value
        if not isinstance(source, Numgen | SeededHash):
            return None
        found = source.value(context)
        return None if found is None else Slots((found[0] - source.offset,), source.modulus)


@dataclass(frozen=True, slots=True)
class VerdictStatement:
    """`accept`, `drop`, `return`, `continue`, `jump CHAIN` and `goto CHAIN`."""

    verdict: NftVerdict
    branches: int = 1

    def apply(self, context: EvalContext) -> Applied | None:
        """The verdict."""
        return Applied(context.packet, self.verdict)


@dataclass(frozen=True, slots=True)
class VerdictMap:
    """`EXPRESSION vmap @NAME`: looks up a verdict."""

    key: Expression
    nft_set: NftSet

    @property
    def branches(self) -> int:
        """Those of the key."""
        return self.key.branches

    def apply(self, context: EvalContext) -> Applied | None:
        """The verdict that the lookup finds; None if it finds none."""
        found = look_up(self.key, self.nft_set, context)
        return Applied(context.packet, found) if isinstance(found, NftVerdict) else None


@dataclass(frozen=True, slots=True)
class Reject:
    """`reject`, with an ICMP error or, for TCP alone, `with tcp reset`."""

    reset: bool = False
    branches: int = 1
    hooks: ClassVar[frozenset[str]] = REJECTING_HOOKS

    def apply(self, context: EvalContext) -> Applied | None:
        """Rejects the packet. `with tcp reset` matches TCP packets only."""
        if self.reset and context.packet.protocol != PROTOCOLS["tcp"]:
            return None
        return Applied(context.packet, RuleVerdict.REJECT)


@dataclass(frozen=True, slots=True)
class Translate:
    """`dnat to VALUE`: an address, or an address and a port. Ends the chain."""

    to: Expression
    hooks: ClassVar[frozenset[str]] = DESTINATION_HOOKS

    @property
    def branches(self) -> int:
        """Those of the value."""
        return self.to.branches

    def apply(self, context: EvalContext) -> Applied | None:
        """The packet with the new destination."""
        found = self.to.value(context)
        if found is None:
            return None
        with_port = self.to.types[-1] is PORT
        packet = context.packet.translated(found[0], found[1] if with_port else None)
        return Applied(packet, RuleVerdict.ACCEPT, True)


@dataclass(frozen=True, slots=True)
class SourceTranslate:
    """`snat to VALUE`: an address and a port. Ends the chain. The simulated first packet of a flow is never
    translated so: only flows of other hosts are."""

    to: Expression
    hooks: ClassVar[frozenset[str]] = SOURCE_HOOKS

    @property
    def branches(self) -> int:
        """Those of the value."""
        return self.to.branches

    def apply(self, context: EvalContext) -> Applied | None:
        """The packet with the new source."""
        found = self.to.value(context)
        if found is None:
            return None
        packet = context.packet._replace(source=found[0], source_port=found[1])
        return Applied(packet, RuleVerdict.ACCEPT, True)


@dataclass(frozen=True, slots=True)
class Redirect:
    """`redirect` and `redirect to :PORT`: the destination becomes this host. Ends the chain."""

    port: int | None = None
    branches: int = 1
    hooks: ClassVar[frozenset[str]] = DESTINATION_HOOKS

    def apply(self, context: EvalContext) -> Applied | None:
        """The packet with this host as its destination."""
        return Applied(context.packet.redirected(self.port), RuleVerdict.ACCEPT, True)


@dataclass(frozen=True, slots=True)
class Masquerade:
    """`masquerade`: the address of the outgoing device becomes the source. Ends the chain."""

    branches: int = 1
    hooks: ClassVar[frozenset[str]] = SOURCE_HOOKS

    def apply(self, context: EvalContext) -> Applied | None:
        """The packet with this host's address as its source."""
        return Applied(context.packet.masquerade(), RuleVerdict.ACCEPT, True)


@dataclass(frozen=True, slots=True)
class SetUpdate:
    """`add`, `update` and `delete @NAME { KEY : VALUE }`: a packet changes a map or a set.

    With `limited` the statement matches only if the packet exceeds the limit in the element. The kernel's
    counts are unknown here: the packet counts as within every limit.
    """

    verb: str
    nft_set: NftSet
    key: Expression
    data: Expression | None = None
    limited: bool = False

    @property
    def branches(self) -> int:
        """Those of key and value."""
        return max(self.key.branches, self.data.branches if self.data else 1)

    def apply(self, context: EvalContext) -> Applied | None:
        """The packet, with the update noted in it. A key that exists keeps its value:
        `update` renews only its timeout (nft_rhash_update)."""
        key = self.key.value(context)
        value: Key | None = () if self.data is None else self.data.value(context)
        if key is None or value is None or self.limited:
            return None
        if self.verb == "delete":
            return Applied(context.packet.with_update(self.nft_set.name, key, None))
        if self.nft_set.find(key, context.packet) is not None:
            return Applied(context.packet)
        return Applied(context.packet.with_update(self.nft_set.name, key, value))
