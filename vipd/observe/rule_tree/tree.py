"""The tree of a service as the kernel has it: chains, rules and elements, in words and with counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from vipd.dataplane.iptables.saved_rules import Count
from vipd.model.service import Family

Json = dict[str, object]


class NodeKind(StrEnum):
    """Kind of a node."""

    CHAIN = "chain"
    """`name` is the kernel's name; its children are its rules."""
    FRONTEND = "frontend"
    """`name` is the frontend in the syntax of `vipctl`, or `node port 30080/tcp`."""
    BACKEND = "backend"
    """New flows lead to a backend, with its own share. `name` is its `ADDRESS:PORT`."""
    RULE = "rule"
    """Any other rule of vipd's, or element of a map or set."""
    FOREIGN = "foreign"
    """A rule in a chain of vipd's that vipd does not write."""
    MISSING = "missing"
    """Something that should be there."""


@dataclass(frozen=True, slots=True)
class Node:
    """One line of a tree. `text` describes it or its effect in words."""

    kind: NodeKind
    text: str
    name: str = ""
    rule: str = ""
    """As the kernel has it."""
    count: Count | None = None
    """None if the kernel does not count it."""
    share: float | None = None
    """The part of the new flows in its probability chain, 0..1; None if it is no step of one."""
    fault: str = ""
    """A fault."""
    repeated: bool = False
    """A chain whose children are elsewhere in the same tree."""
    children: tuple[Node, ...] = ()
    leads_to: str = ""
    """A chain that it leads to without being its parent: that is elsewhere in the same tree."""
    place: str = ""
    """Where the rule is: `number 3` of its chain with iptables, `handle 12` with nft."""

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def view(self) -> Json:
        """As a JSON value, without empty and unknown fields."""
        found: Json = {"kind": str(self.kind), "text": self.text}
        found |= {key: value for key in ("name", "rule", "place", "fault") if (value := getattr(self, key))}
        if self.count is not None:
            found |= {"packets": self.count.packets, "bytes": self.count.bytes}
        if self.share is not None:
            found["share"] = round(self.share, 6)
        if self.repeated:
            found["repeated"] = True
        if self.children:
            found["children"] = [child.view() for child in self.children]
        return found


class ServicePortKey(NamedTuple):
    """Identifies trees of a dataplane: one service port in one protocol."""

    service_port: str
    """`namespace/name:port`; the first frontend where neither the kernel nor a daemon has the name."""
    protocol: str


@dataclass(frozen=True, slots=True)
class ServiceTree:
    """One service port of one family, in one place of the kernel."""

    key: ServicePortKey
    family: Family
    place: str
    """`iptables v1.8.9 (nf_tables)`, `table ip vipd`."""
    nodes: tuple[Node, ...]

    def walk(self) -> Iterator[Node]:
        """Every node."""
        for node in self.nodes:
            yield from node.walk()

    def with_nodes(self, nodes: Sequence[Node]) -> ServiceTree:
        """The same service with other nodes."""
        return replace(self, nodes=tuple(nodes))

    def named(self, kind: NodeKind) -> list[str]:
        """The names of nodes of a kind, each once, in their order."""
        return list(dict.fromkeys(node.name for node in self.walk() if node.kind is kind))

    def incoming_count(self) -> Count | None:
        """Flows that entered by all frontends, as far as they are counted."""
        return total(node.count for node in self.walk() if node.kind is NodeKind.FRONTEND)

    def view(self) -> Json:
        """As a JSON value."""
        return {
            "service_port": self.key.service_port,
            "protocol": self.key.protocol,
            "family": str(self.family),
            "place": self.place,
            "faults": faults(self.nodes),
            "nodes": [node.view() for node in self.nodes],
        }


@dataclass(frozen=True, slots=True)
class SharedTree:
    """The chains of one family that all services share."""

    family: Family
    place: str
    nodes: tuple[Node, ...]

    def view(self) -> Json:
        """As a JSON value."""
        return {
            "family": str(self.family),
            "place": self.place,
            "faults": faults(self.nodes),
            "nodes": [node.view() for node in self.nodes],
        }


def total(counts: Iterable[Count | None]) -> Count | None:
    """The sum of counts; None if nothing was counted."""
    known = [count for count in counts if count is not None]
    return sum(known[1:], known[0]) if known else None


def faults(nodes: Sequence[Node]) -> list[str]:
    """The faults in these nodes, each once."""
    found = (each for node in nodes for each in node.walk() if each.fault)
    return list(dict.fromkeys(f"{each.text}: {each.fault}" for each in found))
