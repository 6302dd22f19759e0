"""Where vipd's accept stands among other programs' rules of one chain of iptables. Pure.

The kernel asks the rules of a chain in order, so an accept overrules every later rule. vipd's overrules what
refuses everything (a policy, the last rule of a chain), and what container programs isolate; never a rule by
which an administrator refuses some flows. It is inserted once, restored where it was, and never moved before
a rule of an administrator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

MAX_REMEMBERED = 1000
"""Rules of one chain that are remembered after they are gone."""


class Effect(Enum):
    """What a rule of another program may do to a flow that vipd translated."""

    PASSES = "passes"
    """It refuses nothing."""
    FILTERS = "filters"
    """It may refuse some flows, now or when its chain gets rules: an administrator's decision."""
    ISOLATES = "isolates"
    """It refuses flows to containers or virtual machines, by the decision of the program that runs them."""
    CLOSES_PARTLY = "closes partly"
    """It refuses all of one protocol: part of the end of a chain if `CLOSES` follows, else a filter."""
    CLOSES = "closes"
    """It refuses everything that comes to it, as a policy does."""

    @property
    def filters(self) -> bool:
        """Whether it refuses by a condition."""
        return self in (Effect.FILTERS, Effect.CLOSES_PARTLY)


def effect_of_call(inner: Sequence[tuple[Effect, bool]]) -> Effect:
    """The effect of an unconditional jump to a chain with these rules: their effects, and whether each only
    returns (then `CLOSES`: without a condition).

    An empty chain, or one that only returns, filters: an administrator or fail2ban writes there.
    """
    if all(returns for _, returns in inner):
        return Effect.FILTERS
    effect, exempts = Effect.PASSES, False
    for rule, returns in inner:
        if returns and rule is Effect.CLOSES:
            break
        if returns:
            exempts = True  # what follows refuses all others
        elif rule is Effect.CLOSES:
            return Effect.FILTERS if exempts else Effect.CLOSES
        elif rule.filters:
            return Effect.FILTERS
        elif rule is Effect.ISOLATES:
            effect = rule
    return effect


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The rules of others around an accept, as texts that identify them."""

    preceding: frozenset[str] = frozenset()
    """Those that have ever been before it."""
    following: frozenset[str] = frozenset()
    """Those that were behind it when it was last seen."""

    def seen(self, before: Collection[str], after: Collection[str]) -> Neighbours:
        """With what is around it now."""
        known = self.preceding if len(self.preceding) < MAX_REMEMBERED else frozenset()
        preceding = known.union(before)
        return Neighbours(preceding, frozenset(after) - preceding)


NEW = Neighbours()
"""Of an accept that has not been in its chain."""


def accept_index(
    rules: Sequence[str], effects: Sequence[Effect], neighbours: Neighbours = NEW, start: int = 0
) -> int:
    """The index at which an accept is to be inserted: between its neighbours, as far as they are still there,
    and among rules that are new there behind those that filter, but before those that refuse everything.

    `start`: it is not inserted before this index.
    """
    start = max([start, *(index + 1 for index, rule in enumerate(rules) if rule in neighbours.preceding)])
    behind = (i for i in range(start, len(rules)) if rules[i] in neighbours.following)
    end = next(behind, len(rules))
    close = next((i for i in range(start, end) if effects[i] is Effect.CLOSES), None)
    if close is not None:
        end = close
        while end > start and effects[end - 1] is Effect.CLOSES_PARTLY:
            end -= 1
    return max([start, *(index + 1 for index in range(start, end) if effects[index].filters)])


def is_misplaced(
    rules: Sequence[str], effects: Sequence[Effect], index: int, neighbours: Neighbours = NEW
) -> bool:
    """Whether the accept at `index` has to move: behind filters that had been before it and were written
    anew, or before rules that isolate containers. `rules` and `effects` include the accept itself."""
    before = frozenset(rules[:index])
    for rule, effect in zip(rules[index + 1 :], effects[index + 1 :], strict=True):
        if effect.filters and rule in neighbours.preceding and rule not in before:
            return True
    for effect in reversed(effects[:index]):
        if effect is Effect.ISOLATES:
            return True
        if effect is not Effect.PASSES:
            return False
    return False
