"""Changes that other programs made, and which of them concern vipd's rules. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from vipd.dataplane.iptables.names import TABLES, ChainId, Names
from vipd.dataplane.iptables.watch.messages import Change, Generation, MessageKind, rule_facts
from vipd.model.service import Family

ENTRIES = frozenset(
    {
        *(ChainId("nat", name) for name in ("PREROUTING", "OUTPUT", "POSTROUTING")),
        *(ChainId("filter", name) for name in ("INPUT", "FORWARD", "OUTPUT")),
    }
)
"""The built-in chains that contain vipd's jumps."""


class ChangeKind(StrEnum):
    """Kind of change, or how it was detected."""

    RULE_ADDED = "rule added"
    RULE_DELETED = "rule deleted"
    CHAIN_ADDED = "chain added"
    CHAIN_DELETED = "chain deleted"
    TABLE_DELETED = "table deleted"
    RULES_DIFFER = "rules differ"
    """A poll found it; its cause is not known."""
    EVENTS_LOST = "events were lost"
    """The kernel's buffer overflowed: possibly nothing has changed."""


_CHANGE_KINDS = {kind: ChangeKind[kind.name] for kind in MessageKind}


_WHOLE_NAMES = {"iptables-restor": "iptables-restore", "ip6tables-resto": "ip6tables-restore"}
"""Important names that the kernel truncates to 15 characters."""


@dataclass(frozen=True, slots=True)
class Actor:
    """The process that changed rules, as the kernel names it."""

    name: str
    pid: int = 0
    """0: not known."""

    @classmethod
    def of(cls, generation: Generation) -> Actor:
        """The author of a transaction."""
        return cls(_WHOLE_NAMES.get(generation.name, generation.name), generation.pid)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else self.name


def named(actors: Iterable[Actor]) -> list[str]:
    """Each program once: `iptables (pid 812)`, or, if it ran more than once, `iptables (14 processes)`. In
    order of their first change."""
    several: dict[str, dict[Actor, None]] = {}
    for actor in actors:
        several.setdefault(actor.name, {})[actor] = None
    return [
        f"{name} ({len(same)} processes)" if len(same) > 1 else str(next(iter(same)))
        for name, same in several.items()
    ]


@dataclass(frozen=True, slots=True)
class ExternalChange:
    """One burst of foreign changes that concern us."""

    families: frozenset[Family]
    chains: frozenset[tuple[Family, ChainId]]
    """vipd's and built-in chains that were touched. Not complete when `everything` is set."""
    kinds: frozenset[ChangeKind]
    actors: tuple[Actor, ...] = ()
    """In order of their first change. Empty: unknown."""
    everything: bool = False
    """Too much was touched, or too little is known: each of `families` must be read as a whole."""

    def __str__(self) -> str:
        """`iptables (pid 812): rule deleted in ipv4 nat VIPD-SERVICES`."""
        who = ", ".join(named(self.actors)) or "somebody"
        return f"{who}: {self.kind_of_change}"

    @property
    def kind_of_change(self) -> str:
        """`rule deleted in ipv4 nat VIPD-SERVICES`."""
        return f"{', '.join(sorted(self.kinds))} in {self._where()}"

    def _where(self) -> str:
        families = ", ".join(map(str, sorted(self.families)))
        if self.everything or not self.chains:
            return families
        first = min(self.chains)
        more = f" and {len(self.chains) - 1} chains more" if len(self.chains) > 1 else ""
        family = "" if " " in first[1].table else f"{first[0]} "
        return f"{family}{first[1].table} {first[1].name}{more}"


@dataclass(frozen=True, slots=True)
class OwnershipFilter:
    """Selects changes that affect vipd: of its chains, of its jumps, and rules around the jumps."""

    names: Names
    families: frozenset[Family]

    def classify(self, change: Change) -> ChangeKind | None:
        """The effect of a change on vipd's rules; None if it has none. Raises ValueError (malformed)."""
        if change.family not in self.families or change.table not in TABLES:
            return None
        if change.kind is not MessageKind.TABLE_DELETED and not self._concerns(change):
            return None
        return _CHANGE_KINDS[change.kind]

    def _concerns(self, change: Change) -> bool:
        chain = ChainId(change.table, change.chain)
        if chain not in ENTRIES:
            return self.names.owns(chain)
        if change.kind is MessageKind.CHAIN_DELETED:
            return True
        # A declaration of a built-in chain or its policy takes nothing from vipd.
        return change.kind is not MessageKind.CHAIN_ADDED and self._affects_jumps(change)

    def _affects_jumps(self, change: Change) -> bool:
        """Others add rules behind our jumps, and remove their own, all day long; Docker does in nat. Where
        vipd accepts, rules behind a jump are remembered, to put it back before them."""
        facts = rule_facts(change)
        mentions_us = facts.expressions is None or f"{self.names.prefix}-".encode() in facts.expressions
        remembered = change.table == "filter" and change.chain != "OUTPUT"
        return mentions_us or (change.kind is MessageKind.RULE_ADDED and (remembered or not facts.appended))
