"""A table of the nftables dataplane as read: chains as nft lists them, elements by map. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vipd.dataplane.iptables.saved_rules import Count
from vipd.dataplane.nftables.layout import DISPATCH_MAP, allowed_sources_named
from vipd.dataplane.nftables.saved_table import read_chains
from vipd.model.service import Family, Frontend, Protocol, socket_text

_DIGEST = re.compile(r' comment "#[0-9a-f]{12}"$')


class TableRule(NamedTuple):
    """A rule as nft lists it, without the digest that identifies vipd's rules."""

    text: str
    ours: bool
    handle: int = 0

    @property
    def place(self) -> str:
        """`handle 12`; empty if that is unknown."""
        return f"handle {self.handle}" if self.handle else ""


def read_table_rules(listing: str) -> dict[str, tuple[TableRule, ...]]:
    """The rules of the chains in the output of `nft -a -t list table`."""
    return {
        name: tuple(
            TableRule(_DIGEST.sub("", rule.text), bool(_DIGEST.search(rule.text)), rule.handle)
            for rule in chain.rules
        )
        for name, chain in read_chains(listing).items()
    }


@dataclass(frozen=True, slots=True)
class FrontendKey:
    """A frontend as the maps have it, `10.96.0.10 . udp . 53` or `tcp . 30080`."""

    key: str

    @property
    def is_node_port(self) -> bool:
        """Whether it is a port of this host itself."""
        return self.key.count(" . ") == 1

    @property
    def frontend(self) -> Frontend:
        """The same in the words of the model."""
        *address, protocol, port = self.key.split(" . ")
        return Frontend(address[0] if address else "", int(port), Protocol(protocol))


@dataclass(frozen=True)
class TableReading:
    """One family's table as read."""

    family: Family
    table: str
    """`ip vipd`."""
    chains: Mapping[str, tuple[TableRule, ...]]
    elements: Mapping[str, Mapping[str, str]]
    """By map or set: key -> value, fields joined by ` . `."""
    flows: Mapping[str, Count]
    """By frontend and endpoint, as in the set's key: new flows."""
    affinity_entries: Mapping[tuple[str, str], int]
    """Clients by number of a service port (with IPv6 empty: keys are hashes) and of an endpoint."""

    @property
    def location(self) -> str:
        """Its name on the screen."""
        return f"table {self.table}"

    def sizes(self) -> list[tuple[str, int]]:
        """The number of elements of each map and set."""
        learnt = {"flows": len(self.flows), "pins": sum(self.affinity_entries.values())}
        return list(({name: len(held) for name, held in self.elements.items()} | learnt).items())

    def chain_of(self, value: str) -> str:
        """The chain that a frontend's value leads to: a verdict, or the number of one; empty: none."""
        verdict = value if " " in value else self.elements.get(DISPATCH_MAP.name, {}).get(value, "")
        return verdict.rpartition(" ")[2]

    def elements_of(self, map_name: str, place: FrontendKey) -> list[tuple[str, str]]:
        """The last field of the key, and the value, of a frontend's elements in a map."""
        return self._by_frontend.get((map_name, place.key), [])

    @cached_property
    def _by_frontend(self) -> dict[tuple[str, str], list[tuple[str, str]]]:
        found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        for map_name, elements in self.elements.items():
            if allowed_sources_named(map_name):
                for key, value in elements.items():
                    source, _, rest = key.partition(" . ")
                    found[map_name, rest].append((source, value))
            elif map_name.endswith(("endpoints", "picks", "numbered")):
                for key, value in elements.items():
                    head, _, last = key.rpartition(" . ")
                    found[map_name, head].append((last, value))
        return found

    def flows_of(self, place: FrontendKey) -> Mapping[str, Count]:
        """New flows to each endpoint by one frontend."""
        return self._flows.get(place.key, {})

    @cached_property
    def _flows(self) -> dict[str, dict[str, Count]]:
        """Those of node ports under this host's addresses count for the port alone, too."""
        found: dict[str, dict[str, Count]] = defaultdict(lambda: defaultdict(lambda: Count(0, 0)))
        node_ports = self.elements.get("node_ports", {})
        for key, count in self.flows.items():
            address, protocol, port, *endpoint = key.split(" . ")
            place = f"{address} . {protocol} . {port}"
            if place not in self.elements.get("frontends", {}) and f"{protocol} . {port}" in node_ports:
                place = f"{protocol} . {port}"
            to = socket_text(endpoint[0], int(endpoint[1]))
            found[place][to] += count
        return found
