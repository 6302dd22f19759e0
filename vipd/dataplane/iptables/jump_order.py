"""Where vipd's jumps stand in built-in chains. Pure.

As kube-proxy does, vipd makes sure that its jumps exist, and leaves the rest to the administrator: a rule
that he puts before a jump stays before it. Jumps to chains that refuse or translate are inserted at the head,
for they are about addresses of services alone. Those to chains that accept stand where
`vipd.dataplane.accept_order` says.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, field

from vipd.dataplane.accept_order import NEW, Effect, Neighbours, accept_index, is_misplaced
from vipd.dataplane.iptables.foreign_rules import ForeignChains, effect_of
from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.words import target_of

ACCEPTING = ("FORWARD", "NODEPORTS")
"""Kinds of vipd's chains in the table filter that accept: translated flows, and packets to health ports."""
JumpNeighbours = MutableMapping[tuple[ChainId, str], Neighbours]
"""By built-in chain and jump."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A built-in chain as it is to be, and the lines of a restore that make it so."""

    rules: Rules
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JumpOrder:
    """What decides where jumps stand in the built-in chains of one family."""

    names: Names
    foreign: ForeignChains = field(default_factory=dict)
    """Other programs' chains of the table filter."""
    neighbours: JumpNeighbours = field(default_factory=dict)
    first: Collection[ChainId] = ()
    """Built-in chains in which the jumps stay at the head."""

    def arranged(self, builtin: ChainId, rules: Rules, jumps: Rules) -> Arrangement:
        """The chain with these jumps of vipd's, and no others."""
        ours = [rule for rule in rules if self.owns(builtin, rule)]
        stay: Collection[str] = {jump for jump in jumps if ours.count(jump) == 1}
        if builtin in self.first:
            stay = jumps if tuple(ours) == jumps == rules[: len(jumps)] else ()
        kept = [rule for rule in rules if rule not in ours or rule in stay]
        for jump in stay:
            if builtin not in self.first and self._must_move(builtin, kept, jump):
                kept.remove(jump)
        lines = [f"-D {builtin.name} {rule}" for rule in ours if rule not in kept]
        for number, jump in enumerate(jumps):
            if jump not in kept:
                index = number if builtin in self.first else self._index(builtin, kept, jumps[:number], jump)
                # The end has no number: a rule that is deleted meanwhile makes no number invalid.
                at_end = index == len(kept) and not all(self.owns(builtin, rule) for rule in kept)
                verb = f"-A {builtin.name}" if at_end else f"-I {builtin.name} {index + 1}"
                kept.insert(index, jump)
                lines.append(f"{verb} {jump}")
        return Arrangement(tuple(kept), tuple(lines))

    def note(self, builtin: ChainId, rules: Rules) -> None:
        """Remember the rules around vipd's jumps in a chain as it was read or written."""
        for jump in {rule for rule in rules if self.owns(builtin, rule)}:
            index = rules.index(jump)
            others = [rule for rule in rules[:index] if self._stays_before(builtin, rule)]
            behind = [rule for rule in rules[index + 1 :] if not self.owns(builtin, rule)]
            key = (builtin, jump)
            self.neighbours[key] = self.neighbours.get(key, NEW).seen(others, behind)

    def _must_move(self, builtin: ChainId, rules: Sequence[str], jump: str) -> bool:
        if not self._accepts(builtin, jump):
            return False
        neighbours = self.neighbours.get((builtin, jump), NEW)
        return is_misplaced(rules, self._effects(builtin, rules), rules.index(jump), neighbours)

    def _index(self, builtin: ChainId, rules: Sequence[str], earlier: Rules, jump: str) -> int:
        """Where a jump is to be inserted; `earlier`: those that are before it in vipd's order."""
        neighbours = self.neighbours.get((builtin, jump), NEW)
        if self._accepts(builtin, jump):
            index = accept_index(rules, self._effects(builtin, rules), neighbours)
        else:
            refusals = [other for other in earlier if not self._accepts(builtin, other)]
            start = max([0, *(index + 1 for index, rule in enumerate(rules) if rule in refusals)])
            index = accept_index(rules, [Effect.PASSES] * len(rules), neighbours, start)
        while index < len(rules) and rules[index] in earlier:
            index += 1
        return index

    def _effects(self, builtin: ChainId, rules: Sequence[str]) -> list[Effect]:
        return [
            Effect.PASSES if self.owns(builtin, rule) else effect_of(rule, self.foreign) for rule in rules
        ]

    def _stays_before(self, builtin: ChainId, rule: str) -> bool:
        """Whether vipd's accept stays behind a rule of others."""
        own = self.owns(builtin, rule)
        return not own and effect_of(rule, self.foreign) is not Effect.ISOLATES

    def owns(self, builtin: ChainId, rule: str) -> bool:
        """Whether a rule of a built-in chain leads to a chain of vipd's."""
        return self.names.owns(ChainId(builtin.table, target_of(rule)))

    def _accepts(self, builtin: ChainId, rule: str) -> bool:
        return builtin.table == "filter" and target_of(rule) in map(self.names.fixed, ACCEPTING)
