"""A graph in the language of graphviz. Pure.

Boxes have a light ground and dark text; lines and their labels are in a grey that is visible on white and on
black; the ground is transparent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vipd.observe.rule_tree.graph import Box, Graph
from vipd.observe.rule_tree.tree import NodeKind

_GREY, _INK, _RED = "#7b7b7b", "#1a1a1a", "#c62828"
_GROUNDS = {NodeKind.CHAIN: "#e3eaf4", NodeKind.FRONTEND: "#fff3cd", NodeKind.BACKEND: "#dcefdc"}
_WRONG = "#fbdcdc"


def dot(graphs: Iterable[Graph]) -> str:
    """One drawing of all graphs, from left to right."""
    return "\n".join(_lines(graphs)) + "\n"


def _lines(graphs: Iterable[Graph]) -> Iterator[str]:
    yield "digraph rules {"
    yield '  graph [rankdir="LR", bgcolor="transparent", fontname="sans-serif", ranksep="0.8"];'
    yield f'  node [shape="box", style="filled", fontname="monospace", fontsize="10", fontcolor="{_INK}"];'
    yield f'  edge [color="{_GREY}", fontcolor="{_GREY}", fontname="sans-serif", fontsize="9"];'
    for number, graph in enumerate(graphs):
        yield f"  subgraph cluster_{number} {{"
        yield f'    label={quoted(graph.title)}; labeljust="l"; bgcolor="";'
        yield f'    color="{_GREY}"; fontcolor="{_GREY}";'
        yield from (f"    {_box(box)}" for box in graph.boxes.values())
        for edge in graph.edges:
            label = f" [label={quoted(edge.label)}]" if edge.label else ""
            yield f"    {edge.start} -> {edge.end}{label};"
        yield "  }"
    yield "}"


def _box(box: Box) -> str:
    ground = _WRONG if box.fault else _GROUNDS.get(box.kind, _GROUNDS[NodeKind.CHAIN])
    style = f', color="{_RED}", style="filled,dashed"' if box.fault else f', color="{_GREY}"'
    return f'{box.id} [label={quoted(box.text)}, fillcolor="{ground}"{style}];'


def quoted(text: str) -> str:
    """A string: nothing in it is an escape, an entity or its end; lines stay lines."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    return '"' + plain.replace("\n", "\\n") + '"'
