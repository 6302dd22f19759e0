"""A graph in the language of mermaid, which many pages can display. Pure.

It has no colours but red for faults: the others are the page's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vipd.observe.rule_tree.graph import Box, Graph
from vipd.observe.rule_tree.tree import NodeKind

_SHAPES = {NodeKind.FRONTEND: ("([", "])"), NodeKind.BACKEND: ("[[", "]]")}
_ENTITIES = str.maketrans(
    {
        '"': "#quot;",
        "#": "#35;",
        "&": "#amp;",
        "<": "#lt;",
        ">": "#gt;",
        "`": "#96;",
        "\\": "#92;",
        "|": "#124;",
    }
)


def mermaid(graphs: Iterable[Graph]) -> str:
    """One drawing of all graphs, from left to right."""
    return "\n".join(_lines(graphs)) + "\n"


def _lines(graphs: Iterable[Graph]) -> Iterator[str]:
    yield "flowchart LR"
    wrong = []
    for number, graph in enumerate(graphs):
        yield f"  subgraph s{number} [{quoted(graph.title)}]"
        yield from (f"    {_box(box)}" for box in graph.boxes.values())
        for edge in graph.edges:
            label = f"|{quoted(edge.label)}|" if edge.label else ""
            yield f"    {edge.start} -->{label} {edge.end}"
        yield "  end"
        wrong += [box.id for box in graph.boxes.values() if box.fault]
    if wrong:
        yield "  classDef wrong stroke:#c62828,stroke-width:2px,stroke-dasharray:5 3"
        yield f"  class {','.join(wrong)} wrong"


def _box(box: Box) -> str:
    start, end = _SHAPES.get(box.kind, ("[", "]"))
    return f"{box.id}{start}{quoted(box.text)}{end}"


def quoted(text: str) -> str:
    """A string: characters with a meaning in mermaid or HTML become entities; lines stay lines."""
    return '"' + text.translate(_ENTITIES).replace("\n", "<br/>") + '"'
