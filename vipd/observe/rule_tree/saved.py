"""What `iptables-save -c` prints, by table and chain, counters apart. Rules are not understood here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vipd.dataplane.iptables.names import TABLES, ChainId
from vipd.dataplane.iptables.words import target_of
from vipd.observe.rule_tree.tree import Count

MOST_SHOWN = 80
"""Characters of a line that is not understood."""


class SavedRule(NamedTuple):
    """One rule: its text after `-A CHAIN `, and what was counted (None where the text has none)."""

    text: str
    counted: Count | None

    @property
    def target(self) -> str:
        """The word after `-j` or `-g`: a chain or one of the kernel's targets; empty when it has none."""
        return target_of(self.text)


@dataclass(frozen=True, slots=True)
class SavedTables:
    """The chains of the tables nat and filter, with their rules in order."""

    chains: Mapping[ChainId, tuple[SavedRule, ...]]
    builtins: frozenset[ChainId]

    def rules(self, table: str, chain: str) -> tuple[SavedRule, ...] | None:
        """A chain's rules; None when there is no such chain."""
        return self.chains.get(ChainId(table, chain))


def read_tables(text: str) -> SavedTables:
    """The tables in a dump with or without counters. Other tables and comments are passed over.

    Raises ValueError for lines that are neither.
    """
    chains: dict[ChainId, list[SavedRule]] = {}
    builtins = set()
    for table, line in _lines(text):
        if line.startswith(":"):
            name, policy, *_ = [*line[1:].split(" ", 2), ""]
            if not (name and policy):
                raise ValueError(f"the line {line[:MOST_SHOWN]!r} cannot be read")
            chains[ChainId(table, name)] = []
            if policy != "-":
                builtins.add(ChainId(table, name))
            continue
        count, rest = _counted(line)
        if rest.startswith("-A "):
            name, _, rule = rest[3:].partition(" ")
            chains.setdefault(ChainId(table, name), []).append(SavedRule(rule, count))
        elif rest.strip() not in ("", "COMMIT") and not rest.startswith("#"):
            raise ValueError(f"the line {line[:MOST_SHOWN]!r} cannot be read")
    return SavedTables({chain: tuple(rules) for chain, rules in chains.items()}, frozenset(builtins))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif table in TABLES:
            yield table, line


def _counted(line: str) -> tuple[Count | None, str]:
    if not line.startswith("["):
        return None, line
    packets, _, rest = line[1:].partition(":")
    octets, _, rule = rest.partition("] ")
    if not (packets.isdigit() and octets.isdigit()):
        return None, line
    return Count(int(packets), int(octets)), rule
