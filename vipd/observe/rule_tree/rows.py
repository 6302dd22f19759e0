"""Trees as lines of text with their counts, for a screen of 80 columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vipd.dataplane.iptables.saved_rules import Count
from vipd.observe.rule_tree.tree import Node, NodeKind, ServiceTree, SharedTree, faults

_BRANCH, _LAST, _DOWN, _NOTHING = "├ ", "└ ", "│ ", "  "


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `colour` is that of `text`, as `output.Screen` names it."""

    text: str
    count: Count | None = None
    share: float | None = None
    colour: str = ""
    rule: str = ""
    """As the kernel has it; empty where a line is none."""
    place: str = ""
    """Its number or handle."""


def heading(tree: ServiceTree | SharedTree) -> str:
    """The heading of a tree."""
    if isinstance(tree, SharedTree):
        return f"shared chains, {tree.family}, {tree.place}"
    return f"{tree.key.service_port}, {tree.key.protocol}, {tree.family}, {tree.place}"


def rows_of(nodes: Sequence[Node], marked: str = "") -> Iterator[Row]:
    """The lines of several trees; the chain `marked` is highlighted."""
    for node in nodes:
        for row in _rows(node, "", ""):
            pointed = marked and row.colour and marked in row.text
            yield replace(row, text=f"{row.text}  <--") if pointed else row


def _rows(node: Node, own: str, below: str) -> Iterator[Row]:
    colour = "red" if node.fault else "bold" if node.kind is NodeKind.CHAIN else ""
    yield Row(own + label(node), node.count, node.share, colour, node.rule, node.place)
    if node.fault:
        more = _DOWN if node.children else _NOTHING
        yield Row(f"{below}{more}! {node.fault}", colour="red")
    last = len(node.children) - 1
    for number, child in enumerate(node.children):
        end = number == last
        yield from _rows(child, below + (_LAST if end else _BRANCH), below + (_NOTHING if end else _DOWN))


def label(node: Node) -> str:
    """A node as a line: a chain by the kernel's name, with its purpose."""
    if node.kind is NodeKind.CHAIN and node.repeated:
        return f"{node.name}, as above"
    if node.kind is NodeKind.CHAIN:
        return f"{node.name}: {node.text}" if node.text else node.name
    return f"{node.kind}: {node.text}" if node.kind in (NodeKind.FOREIGN, NodeKind.MISSING) else node.text


@dataclass(frozen=True, slots=True)
class Summary:
    """One service port in a line."""

    name: str
    protocol: str
    frontends: str
    backends: int
    count: Count | None
    faults: int


def summary(tree: ServiceTree) -> Summary:
    """The number of objects of each kind; of several frontends the first is named."""
    frontends = tree.named(NodeKind.FRONTEND)
    places = [place.rpartition("/")[0] for place in frontends]
    shown = f"{places[0]} +{len(places) - 1}" if len(places) > 1 else "".join(places)
    return Summary(
        tree.key.service_port,
        tree.key.protocol,
        shown,
        len(tree.named(NodeKind.BACKEND)),
        tree.incoming_count(),
        len(faults(tree.nodes)),
    )
