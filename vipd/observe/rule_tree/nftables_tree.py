"""A table of the nftables dataplane, as trees of services. Pure.

Similar services share its chains; a service consists of its elements in the maps. So each frontend
is followed through the chains, and every rule with a lookup has the frontend's own elements below it.
The kernel has no names of services: the daemon supplies them; without it a frontend names its service.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from ipaddress import ip_address

from vipd.dataplane.iptables.saved_rules import Count
from vipd.dataplane.nftables.descriptions import describe, describe_element, describe_limit, socket_of
from vipd.dataplane.nftables.layout import LOCAL_OFFSET, allowed_sources_named
from vipd.model.service import Family
from vipd.observe.rule_tree.iptables_tree import EMPTY, NOT_OURS
from vipd.observe.rule_tree.nftables_table import FrontendKey, TableReading, TableRule
from vipd.observe.rule_tree.tree import Node, NodeKind, ServicePortKey, ServiceTree, SharedTree

HOOKS = ("prerouting", "output", "input", "postrouting")
ROOT = "dispatch"
_MAP_NAME = re.compile(r"@(\w+)")
_JUMP = re.compile(r"\b(?:goto|jump) (\S+)")
_SLOTS = re.compile(r"(?:random|round-robin|source-hash)-(\d+)")
_SLOT_MAPS = ("endpoints", "picks")
_NUMBERED = ("numbered", "local_numbered")


class NftablesRules:
    """The trees of one family's table. `names`: the service port of each frontend, from the daemon."""

    def __init__(self, reading: TableReading, names: Mapping[str, ServicePortKey]) -> None:
        self.reading, self.family, self.place = reading, reading.family, reading.location
        self._names = names

    def service_ports(self) -> list[ServicePortKey]:
        """Every service port."""
        return sorted(self._frontends)

    def keys_named(self, name: str) -> list[ServicePortKey]:
        """Those of a service or service port, or with this frontend."""
        return [
            key
            for key, places in sorted(self._frontends.items())
            if key.service_port == name
            or key.service_port.startswith(f"{name}:")
            or any(str(place.frontend) == name for place in places)
        ]

    @cached_property
    def _frontends(self) -> dict[ServicePortKey, list[FrontendKey]]:
        found: dict[ServicePortKey, list[FrontendKey]] = defaultdict(list)
        for map_name in ("frontends", "node_ports"):
            for key in self.reading.elements.get(map_name, ()):
                place = FrontendKey(key)
                text = str(place.frontend)
                found[self._names.get(text) or ServicePortKey(text, str(place.frontend.protocol))].append(
                    place
                )
        return found

    @cached_property
    def _users(self) -> Counter[str]:
        """Number of frontends that lead to a chain directly."""
        values = (self.reading.elements.get(map_name, {}) for map_name in ("frontends", "node_ports"))
        return Counter(self.reading.chain_of(value) for elements in values for value in elements.values())

    def tree(self, key: ServicePortKey) -> ServiceTree:
        """One service port: its part of the dispatch, then its backends that may connect to themselves."""
        places = sorted(self._frontends.get(key, ()), key=lambda place: (place.is_node_port, place.key))
        work = _ServiceTreeBuilder(self.reading, self._users, places, key)
        return ServiceTree(key, self.family, self.place, tuple(work.build()))

    def shared(self) -> SharedTree:
        """The chains that every flow passes, and those that services share, with the number of their
        users."""
        reading = self.reading
        shown: set[str] = set()
        fixed = [self._chain(name, shown) for name in HOOKS if name in reading.chains]
        rest = [
            Node(NodeKind.CHAIN, _shared_by(self._users[name]), name, children=tuple(_plain(name, rules)))
            for name, rules in sorted(reading.chains.items())
            if name not in _below(reading, HOOKS)
        ]
        sizes = [
            Node(NodeKind.RULE, f"{number} in {map_name}", map_name)
            for map_name, number in reading.sizes()
            if number
        ]
        return SharedTree(self.family, self.place, (*fixed, *rest, *sizes))

    def single(self, name: str) -> SharedTree:
        """One chain by its name; empty when there is none."""
        rules = self.reading.chains.get(name)
        text = _shared_by(self._users[name])
        if rules is None:
            return SharedTree(self.family, self.place, ())
        chain = Node(NodeKind.CHAIN, text, name, children=tuple(_plain(name, rules)))
        return SharedTree(self.family, self.place, (chain,))

    def _chain(self, name: str, shown: set[str]) -> Node:
        rules = self.reading.chains.get(name, ())
        if name in shown:
            return Node(NodeKind.CHAIN, "", name, repeated=True)
        shown.add(name)
        children = []
        for rule, node in zip(rules, _plain(name, rules), strict=True):
            targets = [t for t in _JUMP.findall(rule.text) if t in self.reading.chains]
            below = tuple(self._chain(target, shown) for target in targets)
            children.append(_rule(name, rule, below) if below else node)
        empty = not rules and name in ("prerouting", "output", "postrouting", ROOT)
        return Node(NodeKind.CHAIN, "", name, fault=EMPTY if empty else "", children=tuple(children))


class _ServiceTreeBuilder:
    """The work on the frontends of one service port."""

    def __init__(
        self,
        reading: TableReading,
        users: Mapping[str, int],
        places: Sequence[FrontendKey],
        key: ServicePortKey,
    ) -> None:
        self._reading, self._users, self._places, self._key = reading, users, places, key
        self._shown: set[tuple[str, str]] = set()

    def build(self) -> Iterator[Node]:
        """The dispatch; then the rule for hairpin flows, if it contains any of the backends."""
        for chain, text in ((ROOT, "every new flow"), ("postrouting", "what leaves")):
            children = []
            for rule in self._reading.chains.get(chain, ()):
                found = tuple(self._of_all(rule.text))
                if found or not rule.ours:
                    children.append(_rule(chain, rule, found))
            if children:
                yield Node(NodeKind.CHAIN, text, chain, children=tuple(children))

    def _of_all(self, rule: str) -> Iterator[Node]:
        """The elements of this service that match a rule for all flows."""
        elements = self._reading.elements
        for map_name in _MAP_NAME.findall(rule):
            there = elements.get(map_name, {})
            for place in self._places:
                if map_name == ("node_ports" if place.is_node_port else "frontends"):
                    yield self._frontend(place, there[place.key])
            if map_name in ("pinged", "claimed"):
                ping, others = "ping to {}: answered by this host", "other ports of {}: refused"
                does = ping if map_name == "pinged" else others
                addresses = dict.fromkeys(p.frontend.address for p in self._places)
                yield from (Node(NodeKind.RULE, does.format(a), rule=a) for a in addresses if a in there)
            elif map_name == "hairpin":
                yield from self._hairpins(there)

    def _hairpins(self, there: Mapping[str, str]) -> Iterator[Node]:
        held = (value for place in self._places for name in ("endpoints", *_NUMBERED)
                for _, value in self._reading.elements_of(_at(place, name), place))  # fmt: skip
        for address in dict.fromkeys(value.partition(" . ")[0] for value in held):
            if f"{address} . {address}" in there:
                yield Node(NodeKind.RULE, f"{address} to itself: masqueraded", rule=f"{address} . {address}")

    def _frontend(self, place: FrontendKey, value: str) -> Node:
        name, counts = str(place.frontend), self._reading.flows_of(place)
        owner = self._key.service_port if self._key.service_port != name else ""
        holder = "node_ports" if place.is_node_port else "frontends"
        count = sum(counts.values(), Count(0, 0)) if "flows" in self._reading.elements else None
        chain = self._reading.chain_of(value)
        text, element = describe_element(holder, place.key, owner), f"{place.key} : {value}"
        return Node(NodeKind.FRONTEND, text, name, element, count, children=(self._chain(chain, place),))

    def _chain(self, name: str, place: FrontendKey) -> Node:
        text = _shared_by(self._users[name])
        if (name, place.key) in self._shown:
            return Node(NodeKind.CHAIN, text, name, repeated=True)
        self._shown.add((name, place.key))
        rules = self._reading.chains.get(name, ())
        looked_into: set[str] = set()
        children = []
        for rule in rules:
            found = [self._chain(target, place) for target in _JUMP.findall(rule.text)]
            for map_name in _MAP_NAME.findall(rule.text):
                if map_name not in looked_into:
                    looked_into.add(map_name)
                    found += self._elements(map_name, name, place)
            children.append(_rule(name, rule, tuple(found)))
        fault = self._unfilled(name, place) if rules else EMPTY
        return Node(NodeKind.CHAIN, text, name, fault=fault, children=tuple(children))

    def _elements(self, map_name: str, chain: str, place: FrontendKey) -> Iterator[Node]:
        """The elements of a frontend in one of the maps, for a lookup from a chain."""
        if map_name == _at(place, "endpoints"):
            yield from self._backends(self._slots(map_name, chain, place), place)
        elif map_name == _at(place, "picks"):
            numbered = dict(
                each for name in _NUMBERED for each in self._reading.elements_of(_at(place, name), place)
            )
            slots = [numbered.get(number, number) for number in self._slots(map_name, chain, place)]
            yield from self._backends(slots, place)
        elif map_name in [_at(place, name) for name in _NUMBERED]:
            yield from self._numbered(map_name, place)
        elif allowed_sources_named(map_name):
            for source, verdict in self._reading.elements_of(map_name, place):
                onward = (self._chain(verdict.rpartition(" ")[2], place),)
                yield Node(NodeKind.RULE, describe_limit(map_name, source), rule=verdict, children=onward)

    def _numbered(self, map_name: str, place: FrontendKey) -> Iterator[Node]:
        """The backends that clients can be pinned to, and the number of those clients."""
        known = self._reading.elements.get(_at(place, "services"), {})
        where = known.get(place.key, "") if self._reading.family is Family.IPV4 else ""
        of_any = "" if where else ", by any service"
        for number, endpoint in sorted(self._reading.elements_of(map_name, place), key=lambda item: item[1]):
            pinned = self._reading.affinity_entries.get((where, number), 0)
            yield Node(
                NodeKind.RULE,
                f"{socket_of(endpoint)}: {pinned} pinned{of_any}",
                rule=f"{number} : {endpoint}",
            )

    def _slots(self, map_name: str, chain: str, place: FrontendKey) -> list[str]:
        """The content of each slot from which a chain chooses."""
        local = "local" in chain.split("-")
        found = [(_number(slot), value) for slot, value in self._reading.elements_of(map_name, place)]
        return [value for slot, value in sorted(found) if (slot >= LOCAL_OFFSET) == local]

    def _backends(self, slots: Iterable[str], place: FrontendKey) -> Iterator[Node]:
        """Slots gathered to shares."""
        filled = Counter(slots)
        whole, flows = filled.total(), self._reading.flows_of(place)
        for endpoint, number in sorted(filled.items(), key=lambda item: socket_of(item[0])):
            name = socket_of(endpoint)
            count = flows.get(name, Count(0, 0)) if "flows" in self._reading.elements else None
            text = f"to {name}, {number} of {whole} slots" if whole > 1 else f"to {name}, the only slot"
            yield Node(NodeKind.BACKEND, text, name, endpoint, count, number / whole)

    def _unfilled(self, chain: str, place: FrontendKey) -> str:
        """Reports that a chain chooses from empty slots."""
        found = _SLOTS.search(chain)
        rules = " ".join(rule.text for rule in self._reading.chains.get(chain, ()))
        map_name = next((h for n in _SLOT_MAPS if f"@{(h := _at(place, n))}" in rules.split()), "")
        if not (found and map_name):
            return ""
        filled = len(self._slots(map_name, chain, place))
        return "" if filled == int(found[1]) else f"{filled} of {found[1]} slots are filled"


def _at(place: FrontendKey, map_name: str) -> str:
    return f"node_{map_name}" if place.is_node_port else map_name


def _number(address: str) -> int:
    """The slot in the form of an address: its last 32 bits."""
    return int(ip_address(address)) & 0xFFFFFFFF


def _rule(chain: str, rule: TableRule, children: tuple[Node, ...] = ()) -> Node:
    kind, fault = (NodeKind.RULE, "") if rule.ours else (NodeKind.FOREIGN, NOT_OURS)
    if (
        rule.ours
        and len(children) == 1
        and rule.text in (f"goto {children[0].name}", f"jump {children[0].name}")
    ):
        # A rule without other effects is only the way to the chain.
        return replace(children[0], rule=rule.text, place=rule.place)
    text = describe(chain, rule.text) if rule.ours else rule.text
    return Node(kind, text, "", rule.text, fault=fault, children=children, place=rule.place)


def _plain(chain: str, rules: Iterable[TableRule]) -> Iterator[Node]:
    return (_rule(chain, rule) for rule in rules)


def _shared_by(number: int) -> str:
    if number < 2:
        return "of one frontend" if number else "shared"
    return f"shared by {number} frontends"


def _below(reading: TableReading, roots: Iterable[str]) -> set[str]:
    """The chains that these lead to by rules, themselves included."""
    found, todo = set(roots), list(roots)
    while todo:
        for rule in reading.chains.get(todo.pop(), ()):
            new = set(_JUMP.findall(rule.text)) - found
            found |= new
            todo += new
    return found
