"""Changes that other programs made, and which of them concern vipd's rules. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vipd.dataplane.iptables.names import TABLES, ChainId, Names
from vipd.dataplane.iptables.watch.messages import Change, MessageKind, rule_facts
from vipd.model.service import Family

ENTRIES = frozenset(
    {
        *(ChainId("nat", name) for name in ("PREROUTING", "OUTPUT", "POSTROUTING")),
        *(ChainId("filter", name) for name in ("INPUT", "FORWARD", "OUTPUT")),
    }
)
"""The built-in chains that contain vipd's jumps."""

_TOOL = re.compile(r"^(ip6?tables|xtables|ebtables|arptables|nft$)")
"""Programs that others run to change rules; the caller is the one that matters."""


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


@dataclass(frozen=True, slots=True)
class Actor:
    """The process that changed rules, and its parent, as far as they could be observed."""

    name: str
    pid: int = 0
    """0: not known."""
    parent: str = ""
    """The nearest that is no mere wrapper. Empty: unknown; it may have ended before it was read."""
    parent_pid: int = 0
    guessed: bool = False
    """The parent had ended, and is the most probable one."""

    @property
    def offender(self) -> tuple[str, int]:
        """Name and pid of the cause: the program that runs an iptables or nft tool, else the process
        itself."""
        if self.parent and is_tool(self.name):
            return self.parent, self.parent_pid
        return self.name, self.pid

    def __str__(self) -> str:
        text = f"{self.name} (pid {self.pid})" if self.pid else self.name
        return f"{text}{_behind(self)}"


def is_tool(name: str) -> bool:
    """Whether it is a program that others run to change rules."""
    return _TOOL.match(name) is not None


def _behind(actor: Actor) -> str:
    if not actor.parent:
        return ""
    return f"{', probably' if actor.guessed else ''} of {actor.parent} (pid {actor.parent_pid})"


def named(actors: Iterable[Actor]) -> list[str]:
    """Each program once: `iptables (pid 812) of bash (pid 5)`, or, if it ran more than once, `iptables (14
    processes) of dockerd (pid 5)`. In order of their first change."""
    several: dict[tuple[str, str, int, bool], dict[Actor, None]] = {}
    for actor in actors:
        several.setdefault((actor.name, actor.parent, actor.parent_pid, actor.guessed), {})[actor] = None
    return [_counted(list(same)) for same in several.values()]


def _counted(same: Sequence[Actor]) -> str:
    first = same[0]
    if len(same) == 1:
        return str(first)
    return f"{first.name} ({len(same)} processes){_behind(first)}"


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
