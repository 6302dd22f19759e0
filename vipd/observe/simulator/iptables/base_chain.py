"""The effect of the rules of one built-in chain, and of all chains that it calls, on a packet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vipd.observe.simulator.errors import RulesetError
from vipd.observe.simulator.iptables.matches import Remember
from vipd.observe.simulator.iptables.rules import Rule
from vipd.observe.simulator.iptables.targets import End, Jump, Return
from vipd.observe.simulator.outcome import RuleVerdict, Step
from vipd.observe.simulator.packet_state import PacketState


@dataclass(frozen=True, slots=True)
class Position:
    """The next rule, and where to continue when its chain ends: None at the end of the built-in chain."""

    chain: str
    index: int
    caller: Position | None

    def next(self) -> Position:
        """The rule after this one."""
        return Position(self.chain, self.index + 1, self.caller)


NextStep = Position | RuleVerdict | None


@dataclass(frozen=True)
class BuiltInChain:
    """One built-in chain of one table."""

    table: str
    name: str
    policy: RuleVerdict
    chains: Mapping[str, tuple[Rule, ...]]
    """All chains of the table."""

    @property
    def nat(self) -> bool:
        """Whether the kernel runs it only once for a flow."""
        return self.table == "nat"

    def first(self) -> Position:
        """The first rule."""
        return Position(self.name, 0, None)

    def follow(self, packet: PacketState, position: Position) -> Sequence[tuple[PacketState, NextStep]]:
        """The effect of the next matching rule, and the way past it if it matches by chance. Raises
        RulesetError."""
        rule, index = self._matching(packet, position)
        if rule is None:
            return [(packet, position.caller)]
        position = replace(position, index=index)
        ways = [self._apply(rule, self._taken(packet, position, rule), position)]
        if rule.probability < 1:
            ways.append((packet.less_likely(1 - rule.probability), position.next()))
        return ways

    def _matching(self, packet: PacketState, position: Position) -> tuple[Rule | None, int]:
        rules = self.chains[position.chain]
        for index in range(position.index, len(rules)):
            rule = rules[index]
            for condition in rule.conditions:
                if not condition.accepts(packet):
                    break
            else:
                if rule.probability > 0:
                    return rule, index
        return None, 0

    def _taken(self, packet: PacketState, position: Position, rule: Rule) -> PacketState:
        names = {m.list_name for m in rule.conditions if isinstance(m, Remember)}
        packet = packet.less_likely(rule.probability)._replace(recent=packet.recent | names)
        return packet.with_step(Step(self.table, position.chain, rule.text, rule.comment))

    def _apply(self, rule: Rule, packet: PacketState, position: Position) -> tuple[PacketState, NextStep]:
        target = rule.target
        match target:
            case None:
                return packet, position.next()
            case End():
                return packet, target.verdict
            case Return():
                return packet, position.caller
            case Jump():
                return packet, Position(target.chain, 0, position.caller if target.goto else position.next())
        if target.hooks and self.name not in target.hooks:
            raise RulesetError(rule.text, f"{type(target).__name__.upper()} is reached from {self.name}")
        return target.rewrite(packet), RuleVerdict.ACCEPT if target.final else position.next()
