"""The effect of the rules of one base chain, and of all chains that it calls, on a packet.

A rule whose lookup fails ends there, and the next rule follows; its earlier changes stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vipd.observe.simulator.errors import RulesetError
from vipd.observe.simulator.nftables.expressions import EvalContext
from vipd.observe.simulator.nftables.rules import Rule
from vipd.observe.simulator.nftables.sets import NftVerdict
from vipd.observe.simulator.nftables.statements import (
    Applied,
    Masquerade,
    Redirect,
    Reject,
    SetField,
    Statement,
    Translate,
)
from vipd.observe.simulator.outcome import RuleVerdict, Slots, Step
from vipd.observe.simulator.packet_state import PacketState
from vipd.observe.simulator.walk import DECIDES

_FINAL = {"accept": RuleVerdict.ACCEPT, "drop": RuleVerdict.DROP}


@dataclass(frozen=True, slots=True)
class Position:
    """The next rule, and where to continue when its chain ends: None at the end of the base chain. Within a
    rule with a random choice, the statement that chooses, and its value in this branch."""

    chain: Chain
    index: int
    caller: Position | None
    statement: int = 0
    chosen: int | None = None
    elements: tuple[str, ...] = ()

    def next(self) -> Position:
        """The rule after this one."""
        return Position(self.chain, self.index + 1, self.caller)


NextStep = Position | RuleVerdict | None


@dataclass(frozen=True, slots=True)
class Hook:
    """Where and how the kernel calls a base chain."""

    type: str
    name: str
    priority: int
    policy: RuleVerdict = RuleVerdict.ACCEPT


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain; a base chain has a hook."""

    table: str
    """With its family: `ip vipd`."""
    name: str
    rules: tuple[Rule, ...]
    hook: Hook | None = None


@dataclass(frozen=True, slots=True)
class BaseChain:
    """A chain with a hook."""

    chain: Chain
    hook: Hook
    chains: Mapping[tuple[str, str], Chain]
    """All chains, by table and name."""

    @property
    def table(self) -> str:
        """With its family."""
        return self.chain.table

    @property
    def name(self) -> str:
        """As it is written."""
        return self.chain.name

    @property
    def nat(self) -> bool:
        """Whether the kernel runs it only once for a flow."""
        return self.hook.type == "nat"

    @property
    def policy(self) -> RuleVerdict:
        """The verdict for a packet that no rule decided on."""
        return self.hook.policy

    def first(self) -> Position:
        """The first rule."""
        return Position(self.chain, 0, None)

    def follow(self, packet: PacketState, position: Position) -> Sequence[tuple[PacketState, NextStep]]:
        """The effect of one rule, statement by statement; with a random choice in it, the rest of the rule
        once for each value. Raises RulesetError."""
        if position.index == len(position.chain.rules):
            return [(packet, position.caller)]
        rule, elements = position.chain.rules[position.index], list(position.elements)
        slots: Slots | None = None
        applied = Applied(packet)
        for index in range(position.statement, len(rule.statements)):
            statement = rule.statements[index]
            if statement.branches > 1 and position.chosen is None:
                return _branched(
                    applied.packet, replace(position, statement=index, elements=tuple(elements)), statement
                )
            self._require_allowed(rule, statement)
            context = EvalContext(applied.packet, position.chosen or 0, elements)
            found = statement.apply(context)
            if found is None:
                return [(applied.packet, position.next())]
            slots = statement.slots(context) or slots if isinstance(statement, SetField) else slots
            applied = found
        step = Step(
            position.chain.table, position.chain.name, rule.text, rule.comment, ", ".join(elements), slots
        )
        packet = applied.packet.with_step(step)
        if applied.translated:
            packet = packet._replace(decided=packet.decided | {DECIDES[self.hook.name]})
        return [(packet, self._onward(applied.verdict, position))]

    def _require_allowed(self, rule: Rule, statement: Statement) -> None:
        if not isinstance(statement, Translate | Redirect | Masquerade | Reject):
            return
        if self.hook.name not in statement.hooks:
            what = f"{type(statement).__name__.lower()} is reached from {self.hook.name}"
            raise RulesetError(rule.text, what)

    def _onward(self, end: NftVerdict | RuleVerdict | None, position: Position) -> NextStep:
        match end:
            case RuleVerdict():
                return end
            case None | NftVerdict("continue"):
                return position.next()
            case NftVerdict("return"):
                return position.caller
            case NftVerdict(word) if word in _FINAL:
                return _FINAL[word]
        chain = self.chains[position.chain.table, end.chain]
        return Position(chain, 0, position.next() if end.word == "jump" else position.caller)


def _branched(
    packet: PacketState, position: Position, statement: Statement
) -> Sequence[tuple[PacketState, NextStep]]:
    packet = packet.less_likely(1 / statement.branches)
    return [(packet, replace(position, chosen=value)) for value in range(statement.branches)]
