"""Computes the growth of counters that are read repeatedly, while rules are added and removed. Pure.

A rule is identified by its handle, so a reading and the notification of the rule's end may arrive in any
order: each holds a value of the same counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vipd.dataplane.iptables.counters.messages import Counted
from vipd.model.service import Family

KEPT_ROUNDS = 3
"""Complete readings for which a deleted rule is still known, in case its end is reported late."""

MAX_ENDED = 100_000
"""Maximum number of deleted rules that are known while readings fail."""

MAX_RULES_OF_CHAIN = 100
"""Maximum number of known rules of one chain, which are searched one by one; the oldest are dropped."""

ChainName = tuple[Family, str]


@dataclass(slots=True)
class _Rule:
    handle: int
    packets: int = 0
    ended: bool = False
    seen: int = 0
    """The last complete reading that it was in."""


class CounterDeltas:
    """Adds up, for each chain, the growth of its rules' counters."""

    def __init__(self) -> None:
        self._rules: dict[ChainName, tuple[_Rule, ...]] = {}
        """The rules that count: one in each chain, besides those that were deleted a moment ago. None as long
        as it is only expected."""
        self._new: dict[ChainName, int] = {}
        self._round: dict[Family, int] = {}
        self._ended = 0
        """Rules that have ended since the last complete reading."""

    def expect(self, chains: Iterable[ChainName]) -> None:
        """These chains will have rules. Their names are then in memory once, not in a reading's copy, too."""
        for chain in chains:
            self._rules.setdefault(chain, ())

    def read(self, counts: Iterable[Counted]) -> None:
        """Process a reading of existing rules. It may be older than values given to `ended` since."""
        following = {family: self._round.get(family, 0) + 1 for family in Family}  # one number for all rules
        for counted in counts:
            rule = self._rule(counted)
            rule.seen = following[counted.family]
            if not rule.ended:
                self._grow(counted, rule)

    def read_all(self, family: Family) -> list[ChainName]:
        """The readings since the last call covered all rules of the family. Returns the chains for
        `drop_unseen`."""
        self._round[family] = self._round.get(family, 0) + 1
        self._ended = 0
        return list(self._rules)

    def drop_unseen(self, family: Family, chains: Iterable[ChainName]) -> None:
        """Drop the rules of these chains that were in none of the last complete readings of the family."""
        now = self._round[family]
        old = [
            chain
            for chain in chains
            if chain[0] is family
            and not all(now - rule.seen < KEPT_ROUNDS for rule in self._rules.get(chain, ()))
        ]
        self._keep(old, lambda rule: now - rule.seen < KEPT_ROUNDS)

    def ended(self, counted: Counted) -> None:
        """A rule was deleted, with this final count."""
        rule = self._rule(counted)
        if not rule.ended:
            self._grow(counted, rule)
            rule.ended = True
            self._ended += 1
            if self._ended > MAX_ENDED:
                self._drop_ended()

    def _drop_ended(self) -> None:
        """Drop deleted rules: no reading has been complete for very long."""
        self._ended = 0
        self._keep(list(self._rules), lambda rule: not rule.ended)

    def _keep(self, chains: Iterable[ChainName], kept: Callable[[_Rule], bool]) -> None:
        """Keep only such rules of these chains, and only chains that have rules."""
        for chain in chains:
            self._rules[chain] = tuple(filter(kept, self._rules[chain]))
            if not self._rules[chain]:
                del self._rules[chain]

    def reset(self, family: Family, chains: Iterable[str] | None = None) -> None:
        """The rules of these chains were replaced, whatever their handles; None: all of the family."""
        gone = [c for c in self._rules if c[0] is family] if chains is None else [(family, c) for c in chains]
        for chain in gone:
            self._rules.pop(chain, None)

    def grown(self) -> list[ChainName]:
        """The chains whose counters have grown."""
        return list(self._new)

    def take(self, known: Callable[[ChainName], bool], grown: Iterable[ChainName]) -> dict[ChainName, int]:
        """Returns the growth in those of these chains that are known; the rest is kept while it has rules."""
        taken = {}
        for chain in grown:
            if known(chain):
                taken[chain] = self._new.pop(chain)
            elif not self.holds(chain):
                del self._new[chain]
        return taken

    def holds(self, chain: ChainName) -> bool:
        """Whether the chain has rules, or had a moment ago."""
        return bool(self._rules.get(chain))

    def forget(self, chain: ChainName) -> None:
        """The chain is not expected any more, and holds no rules."""
        self._rules.pop(chain, None)

    def saved_state(self) -> list[list[object]]:
        """The living rules that have counted, each as family, chain, handle and packets."""
        return [
            [int(family), chain, rule.handle, rule.packets]
            for (family, chain), rules in self._rules.items()
            for rule in rules
            if rule.packets and not rule.ended
        ]

    def restore(self, memory: object) -> None:
        """Set these counts as already counted. Raises ValueError or TypeError for invalid input."""
        for row in memory if isinstance(memory, list) else ():
            family, chain, handle, packets = row
            rule = self._rule(Counted(Family(family), str(chain), int(handle), 0))
            rule.packets = int(packets)

    def _rule(self, counted: Counted) -> _Rule:
        chain = (counted.family, counted.chain)
        rules = self._rules.get(chain, ())
        for rule in rules:
            if rule.handle == counted.handle:
                return rule
        rule = _Rule(counted.handle, seen=self._round.get(counted.family, 0))
        self._rules[chain] = (*rules[1 - MAX_RULES_OF_CHAIN :], rule)
        return rule

    def _grow(self, counted: Counted, rule: _Rule) -> None:
        if counted.packets == rule.packets:
            return
        # Less than before: another program has reset the counter since.
        grown = counted.packets - rule.packets
        chain = (counted.family, counted.chain)
        self._new[chain] = self._new.get(chain, 0) + (grown if grown > 0 else counted.packets)
        rule.packets = counted.packets
