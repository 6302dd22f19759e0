"""Where the shared chains lead: every rule in them that is for one service port, and the way to it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from vipd.dataplane.iptables.names import ChainId
from vipd.observe.rules.forms import Forms, Role, Told
from vipd.observe.rules.saved import SavedRule, SavedTables
from vipd.observe.rules.tree import Key

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
    """A jump within the dispatch: where it stands, what it says, and the group that it leads to."""

    chain: ChainId
    rule: SavedRule
    told: Told

    @property
    def group(self) -> ChainId:
        """The chain of the group."""
        return ChainId(self.chain.table, self.rule.target)


class Entry(NamedTuple):
    """A rule for one service port, or for an address as a whole."""

    path: tuple[Hop, ...]
    chain: ChainId
    rule: SavedRule
    told: Told


class Dispatch:
    """The rules in the shared chains, by service port."""

    def __init__(self, tables: SavedTables, forms: Forms, prefix: str) -> None:
        self._tables, self._forms = tables, forms
        self.by_key: dict[Key, list[Entry]] = defaultdict(list)
        self._by_address: dict[str, list[Entry]] = defaultdict(list)
        self._health: dict[str, list[Entry]] = defaultdict(list)
        self.foreign: dict[ChainId, list[SavedRule]] = defaultdict(list)
        """Rules in the shared chains that vipd does not write."""
        self.reached: set[ChainId] = set()
        for table, kind in SHARED:
            for entry in self._entries(ChainId(table, f"{prefix}-{kind}"), ()):
                self._take(entry, health=(table, kind) == ("filter", "NODEPORTS"))

    def of(self, key: Key) -> list[Entry]:
        """The rules of a service port, then those for its addresses as a whole, by shared chain."""
        own = [*self.by_key.get(key, ()), *self._health.get(key.service_port, ())]
        addresses = dict.fromkeys(entry.told.parts.get("address", "") for entry in own)
        return [*own, *(entry for a in addresses if a for entry in self._by_address.get(a, ()))]

    def _entries(self, chain: ChainId, path: tuple[Hop, ...]) -> Iterator[Entry]:
        self.reached.add(chain)
        for rule in self._tables.chains.get(chain, ()):
            told = self._forms.tell(chain, rule.text)
            if told is None:
                self.foreign[chain].append(rule)
            elif told.role is Role.GROUP:
                hop = Hop(chain, rule, told)
                yield from self._entries(hop.group, (*path, hop))
            else:
                yield Entry(path, chain, rule, told)

    def _take(self, entry: Entry, *, health: bool) -> None:
        told = entry.told
        if health:
            self._health[told.service_port].append(entry)
        elif told.role is Role.FRONTEND and told.service_port:
            self.by_key[Key(told.service_port, told.parts["protocol"])].append(entry)
        elif told.role is Role.ADDRESS:
            self._by_address[told.parts["address"]].append(entry)
