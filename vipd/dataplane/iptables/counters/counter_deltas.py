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

ChainName = tuple[Family, str]


@dataclass(slots=True)
class _Rule:
    packets: int = 0
    ended: bool = False
    seen: int = 0
    """The last complete reading that it was in."""


class CounterDeltas:
    """Adds up, for each chain, the growth of its rules' counters."""

    def __init__(self) -> None:
        self._rules: dict[ChainName, dict[int, _Rule]] = {}
        self._new: dict[ChainName, int] = {}
        self._round: dict[Family, int] = {}
        self._ended = 0
        """Rules that have ended since the last complete reading."""

    def read(self, counts: Iterable[Counted]) -> None:
        """Process a reading of existing rules. It may be older than values given to `ended` since."""
        for counted in counts:
            rule = self._rule(counted)
            rule.seen = self._round.get(counted.family, 0) + 1
            if not rule.ended:
                self._grow(counted, rule)

    def read_all(self, family: Family) -> None:
        """The readings since the last call covered all rules of the family."""
        now = self._round[family] = self._round.get(family, 0) + 1
        self._ended = 0
        for chain in [chain for chain in self._rules if chain[0] is family]:
            rules = self._rules[chain]
            for handle in [h for h, rule in rules.items() if now - rule.seen >= KEPT_ROUNDS]:
                del rules[handle]
            if not rules:
                del self._rules[chain]

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
        for chain, rules in list(self._rules.items()):
            self._rules[chain] = {handle: rule for handle, rule in rules.items() if not rule.ended}
            if not self._rules[chain]:
                del self._rules[chain]

    def reset(self, family: Family, chains: Iterable[str] | None = None) -> None:
        """The rules of these chains were replaced, whatever their handles; None: all of the family."""
        gone = [c for c in self._rules if c[0] is family] if chains is None else [(family, c) for c in chains]
        for chain in gone:
            self._rules.pop(chain, None)

    def take(self, known: Callable[[ChainName], bool]) -> dict[ChainName, int]:
        """Returns the growth in known chains; the rest is kept while it has rules."""
        taken = {chain: flows for chain, flows in self._new.items() if known(chain)}
        self._new = {c: flows for c, flows in self._new.items() if c not in taken and c in self._rules}
        return taken

    def holds(self, chain: ChainName) -> bool:
        """Whether the chain has rules, or had a moment ago."""
        return chain in self._rules

    def saved_state(self) -> list[list[object]]:
        """The living rules that have counted, each as family, chain, handle and packets."""
        return [
            [int(family), chain, handle, rule.packets]
            for (family, chain), rules in self._rules.items()
            for handle, rule in rules.items()
            if rule.packets and not rule.ended
        ]

    def restore(self, memory: object) -> None:
        """Set these counts as already counted. Raises ValueError or TypeError for invalid input."""
        for row in memory if isinstance(memory, list) else ():
            family, chain, handle, packets = row
            name = (Family(family), str(chain))
            self._rules.setdefault(name, {})[int(handle)] = _Rule(packets=int(packets))

    def _rule(self, counted: Counted) -> _Rule:
        rules = self._rules.setdefault((counted.family, counted.chain), {})
        rule = rules.get(counted.handle)
        if rule is None:
            rule = rules[counted.handle] = _Rule(seen=self._round.get(counted.family, 0))
        return rule

    def _grow(self, counted: Counted, rule: _Rule) -> None:
        if counted.packets == rule.packets:
            return
        # Less than before: another program has reset the counter since.
        grown = counted.packets - rule.packets
        chain = (counted.family, counted.chain)
        self._new[chain] = self._new.get(chain, 0) + (grown if grown > 0 else counted.packets)
        rule.packets = counted.packets
