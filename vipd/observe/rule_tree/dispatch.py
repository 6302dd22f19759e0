"""The dispatch of shared chains: every rule in them for one service port, and the way to it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from vipd.dataplane.iptables.descriptions import ParsedRule, Role, RuleParser
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.saved_rules import SavedRule, SavedTables
from vipd.observe.rule_tree.tree import ServicePortKey

SHARED = (
    ("nat", "SERVICES"),
    ("nat", "NODEPORTS"),
    ("filter", "PROXY-FIREWALL"),
    ("filter", "SERVICES"),
    ("filter", "EXTERNAL-SERVICES"),
    ("filter", "UNUSED"),
    ("filter", "NODEPORTS"),
)
"""Table and kind of the chains that have rules for every service, in the order of trees."""


class Hop(NamedTuple):
    """A jump within the dispatch: its chain, its text, and the group that it leads to."""

    chain: ChainId
    rule: SavedRule
    parsed: ParsedRule

    @property
    def group(self) -> ChainId:
        """The chain of the group."""
        return ChainId(self.chain.table, self.rule.target)


class Entry(NamedTuple):
    """A rule for one service port, or for an address as a whole."""

    path: tuple[Hop, ...]
    chain: ChainId
    rule: SavedRule
    parsed: ParsedRule


class Dispatch:
    """The rules in the shared chains, by service port."""

    def __init__(self, tables: SavedTables, parser: RuleParser, prefix: str) -> None:
        self._tables, self._parser = tables, parser
        self.by_key: dict[ServicePortKey, list[Entry]] = defaultdict(list)
        self._by_address: dict[str, list[Entry]] = defaultdict(list)
        self._health: dict[str, list[Entry]] = defaultdict(list)
        self.foreign: dict[ChainId, list[SavedRule]] = defaultdict(list)
        """Rules in the shared chains that vipd does not write."""
        self.reached: set[ChainId] = set()
        for table, kind in SHARED:
            for entry in self._entries(ChainId(table, f"{prefix}-{kind}"), ()):
                self._take(entry, health=(table, kind) == ("filter", "NODEPORTS"))

    def of(self, key: ServicePortKey) -> list[Entry]:
        """The rules of a service port, then those for its addresses as a whole, by shared chain."""
        own = [*self.by_key.get(key, ()), *self._health.get(key.service_port, ())]
        addresses = dict.fromkeys(entry.parsed.parts.get("address", "") for entry in own)
        return [*own, *(entry for a in addresses if a for entry in self._by_address.get(a, ()))]

    def _entries(self, chain: ChainId, path: tuple[Hop, ...]) -> Iterator[Entry]:
        self.reached.add(chain)
        for rule in self._tables.chains.get(chain, ()):
            parsed = self._parser.parse(chain, rule.text)
            if parsed is None:
                self.foreign[chain].append(rule)
            elif parsed.role is Role.GROUP:
                hop = Hop(chain, rule, parsed)
                yield from self._entries(hop.group, (*path, hop))
            else:
                yield Entry(path, chain, rule, parsed)

    def _take(self, entry: Entry, *, health: bool) -> None:
        parsed = entry.parsed
        if health:
            self._health[parsed.service_port].append(entry)
        elif parsed.role is Role.FRONTEND and parsed.service_port:
            self.by_key[ServicePortKey(parsed.service_port, parsed.parts["protocol"])].append(entry)
        elif parsed.role is Role.ADDRESS:
            self._by_address[parsed.parts["address"]].append(entry)
