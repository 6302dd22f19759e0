"""All readings of the kernel together: the trees of the requested services. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vipd.dataplane.iptables.names import HASHED_KINDS, ChainId, hashed
from vipd.model.service import Family
from vipd.observe.rule_tree.expected import Expected, compare, missing_tree
from vipd.observe.rule_tree.iptables_shared import shared_tree, single_chain
from vipd.observe.rule_tree.iptables_tree import IptablesRules
from vipd.observe.rule_tree.nftables_table import TableReading
from vipd.observe.rule_tree.nftables_tree import NftablesRules
from vipd.observe.rule_tree.tree import NodeKind, ServicePortKey, ServiceTree, SharedTree

_KINDS = "|".join(kind for kind in HASHED_KINDS["nat"] if kind != "GRP")
_OF_SERVICE = re.compile(rf"([A-Z][A-Z0-9]*)-(?:{_KINDS})-[A-Z2-7]{{16}}")
_IPTABLES = re.compile(r"ip6?tables v[\d.]+(?: \((\w+)\))?")
_OF_ALL = re.compile(r"([A-Z][A-Z0-9]*)-(?:GRP-[A-Z2-7]{16}|[A-Z]+(?:-[A-Z]+)*)")


@dataclass(frozen=True, slots=True)
class ChainName:
    """The name of a chain of iptables, as found in a log."""

    name: str
    prefix: str
    of_service: bool
    """It belongs to one service, and not to all."""

    @classmethod
    def read(cls, text: str) -> ChainName | None:
        """A name in the form of vipd and kube-proxy; None for anything else."""
        if found := _OF_SERVICE.fullmatch(text):
            return cls(text, found[1], of_service=True)
        found = _OF_ALL.fullmatch(text)
        return cls(text, found[1], of_service=False) if found else None

    def role_in(self, expected: Expected) -> str:
        """The role of the chain in a service port, by its hash, if it belongs to it; else empty."""
        key = expected.key.service_port + expected.key.protocol
        digest = self.name.rpartition("-")[2]
        if digest == hashed(key):
            return expected.key.service_port
        for endpoint in expected.chains:
            if digest == hashed(key + endpoint):
                return f"backend {endpoint} of {expected.key.service_port}"
        return ""


def _where(place: str) -> str:
    """A place without the version of the program, which may change while a daemon runs: `nf_tables`,
    `legacy`, or a table of nft; empty if it names none, as with a fault in place of a version."""
    if place.startswith("table "):
        return place
    found = _IPTABLES.match(place)
    return (found[1] or "legacy") if found else ""


def _is_other(place: str, used: str | None) -> bool:
    """Whether a place with rules is not the one in use; None: the daemon uses none."""
    return used is None or _where(used) not in ("", _where(place))


@dataclass(frozen=True, slots=True)
class DaemonRules:
    """The daemon's view of itself."""

    places: Mapping[Family, str]
    """The place of its rules for each family, in the form of trees."""
    expected: Sequence[Expected]
    """For the requested services."""


@dataclass(frozen=True)
class KernelRules:
    """The content of the kernel."""

    iptables: Sequence[IptablesRules]
    tables: Sequence[TableReading]
    daemon: DaemonRules | None

    def places(self) -> list[str]:
        """The places with rules of vipd."""
        return [each.place for each in self._readings()]

    def unused_places(self) -> list[str]:
        """The places that the daemon does not use."""
        used = self.daemon.places if self.daemon else {}
        unused = [each for each in self._readings() if used and _is_other(each.place, used.get(each.family))]
        return [each.place for each in unused if not (isinstance(each, IptablesRules) and each.accepts_only)]

    def all_trees(self) -> tuple[list[SharedTree], list[ServiceTree]]:
        """The shared chains, then every service."""
        services: list[ServiceTree] = []
        shared = []
        for rules in self._readings():
            trees = [rules.tree(key) for key in rules.service_ports()]
            services += trees
            if isinstance(rules, IptablesRules):
                names = (name for tree in trees for name in tree.named(NodeKind.CHAIN))
                shared.append(shared_tree(rules, set(names)))
            else:
                shared.append(rules.shared())
        return shared, sorted(self._compared(services), key=lambda tree: (tree.key, tree.family))

    def find(self, name: str) -> list[ServiceTree]:
        """The trees of a service, by its name, a service port or a frontend, as known to the daemon."""
        wanted = self.daemon.expected if self.daemon else ()
        if wanted:
            return self.trees_of({each.key for each in wanted})
        return [rules.tree(key) for rules in self._readings() for key in rules.keys_named(name)]

    def trees_of(self, keys: Iterable[ServicePortKey]) -> list[ServiceTree]:
        """The trees of service ports."""
        wanted = set(keys)
        readings = self._readings()
        return self._compared(r.tree(key) for r in readings for key in r.service_ports() if key in wanted)

    def owners(self, chain: str) -> list[ServicePortKey]:
        """The service ports of a chain of iptables, by the rules that lead to it."""
        return list(dict.fromkeys(key for rules in self.iptables for key in rules.owners(chain)))

    def addresses_in(self, chains: Iterable[str]) -> set[str]:
        """The addresses of services that rules of these chains name."""
        found = set()
        for rules in self.iptables:
            for chain in (ChainId("nat", name) for name in chains):
                for rule in rules.tables.chains.get(chain, ()):
                    parsed = rules.parser.parse(chain, rule.text)
                    found.add(parsed.parts.get("address", "") if parsed else "")
        return found - {""}

    def chain(self, name: str) -> list[SharedTree]:
        """One chain, rule by rule, in every place that has it."""
        found = [single_chain(rules, name) for rules in self.iptables]
        found += [rules.single(name) for rules in self._tables()]
        return [tree for tree in found if tree.nodes]

    def _compared(self, trees: Iterable[ServiceTree]) -> list[ServiceTree]:
        """Trees from the daemon's place, compared with the wanted ones; then the missing ones."""
        found = list(trees)
        if self.daemon is None:
            return found
        wanted = {(w.key, w.family): w for w in self.daemon.expected}
        used = self.daemon.places
        compared = []
        for tree in found:
            meant = wanted.get((tree.key, tree.family))
            in_place = tree.family in used and _where(used[tree.family]) == _where(tree.place)
            if in_place:
                wanted.pop((tree.key, tree.family), None)
            compared.append(compare(tree, meant) if meant and in_place else tree)
        missing = (each for each in wanted.values() if each.frontends and each.family in used)
        return [*compared, *(missing_tree(each, used[each.family]) for each in missing)]

    def _readings(self) -> Iterator[IptablesRules | NftablesRules]:
        yield from self.iptables
        yield from self._tables()

    def _tables(self) -> list[NftablesRules]:
        names = {
            frontend: wanted.key
            for wanted in (self.daemon.expected if self.daemon else ())
            for frontend in wanted.frontends
        }
        return [NftablesRules(table, names) for table in self.tables]
