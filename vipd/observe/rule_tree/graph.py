"""Trees as boxes and edges: the input of `graphviz.py`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from vipd.dataplane.iptables.saved_rules import Count
from vipd.observe.rule_tree.rows import heading
from vipd.observe.rule_tree.tree import Node, NodeKind, ServiceTree, SharedTree, total


@dataclass(frozen=True, slots=True)
class Box:
    """A chain, a frontend, a backend, or a fault. `lines` are its text."""

    id: str
    lines: tuple[str, ...]
    kind: NodeKind
    fault: str = ""

    @property
    def text(self) -> str:
        """Its lines, and its fault where they do not name it."""
        fault = (self.fault,) if self.fault and self.fault not in self.lines else ()
        return "\n".join((*self.lines, *fault))


@dataclass(frozen=True, slots=True)
class Edge:
    """The way from one box to another."""

    start: str
    end: str
    text: str
    """The text of the rule on the edge."""
    share: float | None
    count: Count | None

    @property
    def label(self) -> str:
        """Text, share and count, as far as there are any, each in a line."""
        share = f"{100 * self.share:.1f}%" if self.share is not None else ""
        packets = ""
        if self.count is not None:
            packets = f"{self.count.packets} packet{'' if self.count.packets == 1 else 's'}"
        return "\n".join(filter(None, (self.text, share, packets)))

    def merged(self, other: Edge) -> Edge:
        """Both as one: the same rule, met by flows to several frontends."""
        return replace(self, count=total((self.count, other.count)))


@dataclass
class Graph:
    """One tree. `prefix` keeps the ids of several trees distinct."""

    title: str
    prefix: str
    boxes: dict[str, Box] = field(default_factory=dict)
    """By what they represent."""
    edge_map: dict[tuple[str, str, str], Edge] = field(default_factory=dict)
    _deferred: list[tuple[str, str, Node]] = field(default_factory=list, init=False)
    """Rules that lead from a box to another one that is drawn later."""

    @property
    def edges(self) -> list[Edge]:
        """Every edge, in the order of discovery."""
        return list(self.edge_map.values())

    def add_edge(self, edge: Edge) -> None:
        """Add an edge, or extend the existing one."""
        place = (edge.start, edge.end, edge.text)
        there = self.edge_map.get(place)
        self.edge_map[place] = there.merged(edge) if there else edge

    def defer_edge(self, start: str, what: str, rule: Node) -> None:
        """Draw the way that a rule is in the end, when all boxes are there."""
        self._deferred.append((start, what, rule))

    def add_deferred(self) -> None:
        """Draw the remaining edges."""
        for start, what, rule in self._deferred:
            if what in self.boxes:
                self.add_edge(Edge(start, self.boxes[what].id, rule.text, rule.share, rule.count))

    def box(self, what: str, lines: Sequence[str], node: Node) -> str:
        """The id of the box for something; creates it if it is new."""
        if what not in self.boxes:
            name = f"{self.prefix}n{len(self.boxes)}"
            self.boxes[what] = Box(name, tuple(line for line in lines if line), node.kind, node.fault)
        return self.boxes[what].id


def graphs_of(trees: Iterable[ServiceTree | SharedTree]) -> list[Graph]:
    """A graph for each tree that has anything to show."""
    found = []
    for number, tree in enumerate(trees):
        graph = Graph(heading(tree), f"g{number}")
        for node in tree.nodes:
            _draw(graph, node, "", table=node.text)
        graph.add_deferred()
        joined = {end for edge in graph.edges for end in (edge.start, edge.end)}
        boxes = {what: box for what, box in graph.boxes.items() if box.fault or box.id in joined}
        if boxes:
            found.append(Graph(graph.title, graph.prefix, boxes, graph.edge_map))
    return found


def _draw(graph: Graph, node: Node, parent: str, table: str) -> None:
    """Draw a node's box, and the edge to it. A rule is the edge to the chain that it leads to; a rule without
    one is not drawn, unless it is faulty."""
    passed = node.kind is NodeKind.RULE and not node.fault
    if node.leads_to and parent:
        graph.defer_edge(parent, f"{table} {node.leads_to}", node)
    chains = [child for child in node.children if child.kind is NodeKind.CHAIN]
    if passed or (node.kind is NodeKind.BACKEND and chains):
        for child in node.children:
            if child.kind is NodeKind.CHAIN:
                fault = child.fault or node.fault
                text = node.text if passed else ""
                _enter(graph, replace(child, fault=fault), parent, table, (text, node))
            else:
                _draw(graph, child, parent, table)
        return
    _enter(graph, node, parent, table, ("", node))


def _enter(graph: Graph, node: Node, parent: str, table: str, way: tuple[str, Node]) -> None:
    """The box of a node, the way to it with the counts of a rule, and everything behind it."""
    box = graph.box(*_box(node, parent, table), node)
    if parent:
        text, rule = way
        graph.add_edge(Edge(parent, box, text, rule.share, rule.count))
    for child in node.children:
        _draw(graph, child, box, table)


def _box(node: Node, parent: str, table: str) -> tuple[str, tuple[str, ...]]:
    """What a box represents, and its lines."""
    match node.kind:
        case NodeKind.CHAIN:
            return f"{table} {node.name}", (node.text, node.name)
        case NodeKind.FRONTEND:
            return f"{table} {node.name} {node.rule}", _frontend_lines(node)
        case NodeKind.BACKEND:
            return f"{parent} {node.name}", (node.name,)
    return f"{parent} {node.kind} {node.text} {node.rule}", (f"{node.kind}: {node.text}", node.fault)


def _frontend_lines(node: Node) -> tuple[str, ...]:
    """The frontend, then its description."""
    return (node.name, node.text.removeprefix(node.name).lstrip(":, ")) if node.name else (node.text,)
