"""The rules of one family and variant of iptables, as trees of services. Pure.

Names are taken from the comments on the rules, which every rule of the dispatch has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby

from vipd.dataplane.iptables.descriptions import ParsedRule, Role, RuleParser
from vipd.dataplane.iptables.names import ChainId, Names, hashed
from vipd.dataplane.iptables.saved_rules import SavedRule, SavedTables
from vipd.model.service import Family
from vipd.observe.rule_tree.dispatch import SHARED, Dispatch, Entry
from vipd.observe.rule_tree.tree import Node, NodeKind, ServicePortKey, ServiceTree

NOT_OURS = "not written by vipd"
EMPTY = "it is empty, so new flows go past it"
UNREACHED = "nothing leads to it"
_ALL_BUT = 1e-6
"""Rounding error of a probability chain: chances are stored in steps of 1/2^31."""
_OF_SERVICES = ("SVC", "SVL", "EXT", "LIM")
_PURPOSE = {"LIM": "limits on new flows", "EXT": "traffic from outside", "FW": "sources that may come"}


class IptablesRules:
    """The rules of one variant for one family with one chain prefix."""

    def __init__(self, tables: SavedTables, prefix: str, family: Family, place: str) -> None:
        self.tables, self.family, self.place = tables, family, place
        self.names, self.parser = Names(prefix), RuleParser(prefix)

    @cached_property
    def dispatch(self) -> Dispatch:
        """The dispatch of the shared chains."""
        return Dispatch(self.tables, self.parser, self.names.prefix)

    def __bool__(self) -> bool:
        """Whether there is any chain of vipd's."""
        return any(self.names.owns(chain) for chain in self.tables.chains)

    @property
    def accepts_only(self) -> bool:
        """Whether there is only the accept of translated flows, which every dataplane may need."""
        ours = [chain for chain in self.tables.chains if self.names.owns(chain)]
        return ours == [ChainId("filter", self.names.fixed("FORWARD"))]

    def service_ports(self) -> list[ServicePortKey]:
        """Every service port that the dispatch names, sorted."""
        return sorted(self.dispatch.by_key)

    def keys_named(self, name: str) -> list[ServicePortKey]:
        """Those of a service or service port, or with this frontend."""
        return [
            key
            for key, entries in sorted(self.dispatch.by_key.items())
            if key.service_port == name
            or key.service_port.startswith(f"{name}:")
            or any(entry.parsed.frontend == name for entry in entries)
        ]

    def tree(self, key: ServicePortKey) -> ServiceTree:
        """The rules of one service port."""
        return _ServiceTreeBuilder(self, key).build()

    def owners(self, chain: str) -> list[ServicePortKey]:
        """The owners of a chain, by the rules that lead there, else by its own comments. Empty if it has
        none."""
        reached, todo = {chain}, [chain]
        found: dict[ServicePortKey, None] = {}
        while todo:
            for caller, rule in self._callers.get(todo.pop(), ()):
                parsed = self.parser.parse(caller, rule.text)
                if parsed is not None and parsed.role is Role.FRONTEND:
                    found[ServicePortKey(parsed.service_port, parsed.parts["protocol"])] = None
                elif caller.name not in reached and not self.names.is_fixed(caller):
                    reached.add(caller.name)
                    todo.append(caller.name)
        return list(found) or self._claimed(chain)

    def unreachable_chains(self, reached: Iterable[str]) -> list[ChainId]:
        """Our chains of services to which no tree led; `reached` are the chains in the trees."""
        known = {*reached, *(chain.name for chain in self.dispatch.reached)}
        return sorted(
            chain
            for chain in self.tables.chains
            if chain.name not in known and self.names.owns(chain) and not self.names.is_fixed(chain)
        )

    @cached_property
    def _callers(self) -> dict[str, list[tuple[ChainId, SavedRule]]]:
        """The jumps to each chain of nat that is not fixed."""
        callers: dict[str, list[tuple[ChainId, SavedRule]]] = {}
        for chain, rules in self.tables.chains.items():
            for rule in rules if chain.table == "nat" else ():
                callers.setdefault(rule.target, []).append((chain, rule))
        return callers

    def _claimed(self, chain: str) -> list[ServicePortKey]:
        """By the comments in a chain, if its hash matches them."""
        for rule in self.tables.rules("nat", chain) or ():
            parsed = self.parser.parse(ChainId("nat", chain), rule.text)
            name, endpoint = (parsed.service_port, parsed.parts.get("endpoint", "")) if parsed else ("", "")
            for protocol in ("tcp", "udp", "sctp") if name else ():
                if chain.endswith((f"-{hashed(name + protocol)}", f"-{hashed(name + protocol + endpoint)}")):
                    return [ServicePortKey(name, protocol)]
        return []


class _ServiceTreeBuilder:
    """The work on one service port."""

    def __init__(self, rules: IptablesRules, key: ServicePortKey) -> None:
        self._rules, self._key = rules, key
        self._entries = rules.dispatch.of(key)
        self._shown: set[str] = set()

    def build(self) -> ServiceTree:
        """Shared chains in their order, then unreachable chains of the service."""
        prefix = self._rules.names.prefix
        nodes = []
        for table, kind in SHARED:
            root = ChainId(table, f"{prefix}-{kind}")
            entries = [e for e in self._entries if (e.path[0].chain if e.path else e.chain) == root]
            if entries:
                children = (*self._foreign(root), *self._level(entries, 0))
                nodes.append(Node(NodeKind.CHAIN, f"{table}, all services", root.name, children=children))
        nodes += self._unreachable_chains()
        return ServiceTree(self._key, self._rules.family, self._rules.place, tuple(nodes))

    def _level(self, entries: Sequence[Entry], depth: int) -> Iterator[Node]:
        """Entries that have the way to here in common."""
        for hop, group in groupby(entries, lambda e: e.path[depth] if len(e.path) > depth else None):
            found = list(group)
            if hop is None:
                yield from (self._entry(entry) for entry in found)
            else:
                children = (*self._foreign(hop.group), *self._level(found, depth + 1))
                yield Node(
                    NodeKind.CHAIN,
                    hop.parsed.text,
                    hop.group.name,
                    hop.rule.text,
                    hop.rule.counted,
                    children=children,
                    place=hop.rule.place,
                )

    def _foreign(self, chain: ChainId) -> Iterator[Node]:
        """Foreign rules in a shared chain: they affect every service that is found through it."""
        for rule in self._rules.dispatch.foreign.get(chain, ()):
            yield foreign(rule)

    def _entry(self, entry: Entry) -> Node:
        kind = NodeKind.FRONTEND if entry.parsed.role is Role.FRONTEND else NodeKind.RULE
        name = entry.parsed.frontend
        if entry.chain.table == "filter" and entry.rule.target == "ACCEPT":
            kind, name = NodeKind.RULE, ""  # a health port is answered by this host itself
        children = self._jump_node(entry.rule) if kind is NodeKind.FRONTEND else ()
        return Node(
            kind,
            entry.parsed.text,
            name,
            entry.rule.text,
            entry.rule.counted,
            children=children,
            place=entry.rule.place,
        )

    def _jump_node(self, rule: SavedRule) -> tuple[Node, ...]:
        return (self._chain(rule.target),) if self._is_own(rule.target) else ()

    def _is_own(self, name: str) -> bool:
        chain = ChainId("nat", name)
        return self._rules.names.owns(chain) and not self._rules.names.is_fixed(chain)

    def _chain(self, name: str) -> Node:
        text, rules = self._purpose(name), self._rules.tables.rules("nat", name) or ()
        if name in self._shown:
            return Node(NodeKind.CHAIN, text, name, repeated=True)
        self._shown.add(name)
        if not rules:
            return Node(NodeKind.CHAIN, text, name, fault=EMPTY)
        chain = ChainId("nat", name)
        parsed = [(rule, self._rules.parser.parse(chain, rule.text)) for rule in rules]
        steps = {rule.target for rule, each in parsed if each and each.role is Role.SHARE}
        children, left = [], 1.0
        for rule, each in parsed:
            share = None
            if each and each.role is Role.SHARE:
                share = left * _chance(each)
                left -= share
            children.append(self._rule(name, rule, each, share, steps))
        translated = any(each and each.role is Role.TRANSLATION for _, each in parsed)
        fault = _gap(self._rules.parser.kind_of(name), steps, left, translated)
        return Node(NodeKind.CHAIN, text, name, fault=fault, children=tuple(children))

    def _rule(
        self, chain: str, rule: SavedRule, parsed: ParsedRule | None, share: float | None, steps: set[str]
    ) -> Node:
        if parsed is None:
            return foreign(rule)
        text, name, kind = parsed.text, "", NodeKind.RULE
        if parsed.role in (Role.SHARE, Role.AFFINITY):
            name = self._endpoint(rule.target) or parsed.parts["endpoint"]
            kind = NodeKind.BACKEND if parsed.role is Role.SHARE else NodeKind.RULE
        # Affinity rules come first, but a chain is shown below the probability chain.
        follows = parsed.role in (Role.SHARE, Role.ONWARD) or (
            parsed.role is Role.AFFINITY and rule.target not in steps
        )
        children = self._jump_node(rule) if follows else ()
        fault = self._wrong_target(chain, parsed)
        return Node(
            kind, text, name, rule.text, rule.counted, None if kind is NodeKind.RULE else share, fault,
            children=children, leads_to=rule.target if parsed.role is Role.AFFINITY and not follows else "",
            place=rule.place,
        )  # fmt: skip

    def _endpoint(self, chain: str) -> str:
        """The backend that a SEP chain translates to."""
        for rule in self._rules.tables.rules("nat", chain) or ():
            parsed = self._rules.parser.parse(ChainId("nat", chain), rule.text)
            if parsed and parsed.role is Role.TRANSLATION:
                return parsed.parts["endpoint"]
        return ""

    def _wrong_target(self, chain: str, parsed: ParsedRule) -> str:
        """A chain's name is made from the backend that it is for."""
        if parsed.role is not Role.TRANSLATION:
            return ""
        meant = hashed(f"{self._key.service_port}{self._key.protocol}{parsed.parts['endpoint']}")
        return "" if chain.endswith(meant) else "the chain is another backend's"

    def _purpose(self, name: str) -> str:
        kind = self._rules.parser.kind_of(name)
        if kind == "SEP":
            return self._endpoint(name) or "backend"
        if kind in _PURPOSE:
            return _PURPOSE[kind]
        if kind == "SVL":
            return f"{self._key.service_port}, backends of this host"
        frontends = [entry.parsed.frontend for entry in self._entries if entry.parsed.frontend]
        return " ".join([self._key.service_port, *frontends[:1]])

    def _unreachable_chains(self) -> Iterator[Node]:
        """Chains whose name derives from the service port, if no rule leads to them."""
        digest = hashed(self._key.service_port + self._key.protocol)
        for kind in _OF_SERVICES:
            name = f"{self._rules.names.prefix}-{kind}-{digest}"
            if name not in self._shown and self._rules.tables.rules("nat", name) is not None:
                node = self._chain(name)
                # Under the local policy this chain may be there for addresses that the service has not.
                fault = node.fault if kind == "SVL" else UNREACHED
                yield Node(node.kind, node.text, name, fault=fault, children=node.children)


def foreign(rule: SavedRule) -> Node:
    """A rule that vipd does not write, in one of vipd's chains."""
    return Node(NodeKind.FOREIGN, rule.text, "", rule.text, rule.counted, fault=NOT_OURS, place=rule.place)


def _chance(parsed: ParsedRule) -> float:
    if "chance" in parsed.parts:
        return float(parsed.parts["chance"])
    return 1 / int(parsed.parts["every"]) if int(parsed.parts.get("every", 0)) else 1.0


def _gap(kind: str, steps: set[str], left: float, translated: bool) -> str:
    if kind == "SEP":
        return "" if translated else "no rule translates to a backend"
    if kind not in ("SVC", "SVL"):
        return ""
    if not steps:
        return "no rule leads on to a backend"
    return f"{100 * left:.1f}% of new flows go past it" if left > _ALL_BUT else ""
