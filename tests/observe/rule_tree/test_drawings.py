"""Drawings: graphviz takes what is written for it, and shows it."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from tests.observe.explain.asking import CASES, family_of_case, rules_text
from tests.observe.rule_tree.made import SVC, TEXT, forwardings, read, table, with_first
from vipd.model.service import Backend, Family, Protocol, Service, ServicePort
from vipd.observe.rule_tree.graph import Graph, graphs_of
from vipd.observe.rule_tree.graphviz import dot
from vipd.observe.rule_tree.nftables_tree import NftablesRules
from vipd.observe.rule_tree.tree import Node, NodeKind, ServicePortKey, ServiceTree

SVG = "{http://www.w3.org/2000/svg}"
NASTY = 'a"b\\N<&lt;>\\ #35; `x` |y| ; end {z}'
"""Text that means something in the language that it is written in."""


def graphs(case: str) -> list[Graph]:
    """A golden case drawn."""
    rules = read(rules_text(case), "KUBE", family_of_case(case))
    return graphs_of(rules.tree(key) for key in rules.service_ports()[:5])


def nasty() -> list[Graph]:
    """A tree whose every text is hard to write down."""
    foreign = Node(NodeKind.FOREIGN, NASTY, "", NASTY, fault=NASTY)
    chain = Node(NodeKind.CHAIN, NASTY, NASTY, children=(foreign,))
    frontend = Node(NodeKind.FRONTEND, NASTY, NASTY, children=(chain,))
    root = Node(NodeKind.CHAIN, "nat", "VIPD-SERVICES", children=(frontend,))
    return graphs_of([ServiceTree(ServicePortKey(NASTY, "tcp"), Family.IPV4, NASTY, (root,))])


def graphviz(form: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["dot", f"-T{form}"], input=text, capture_output=True, text=True, check=True, timeout=60
    )


def svg(found: Sequence[Graph]) -> ET.Element:
    """What graphviz draws."""
    return ET.fromstring(graphviz("svg", dot(found)).stdout)  # noqa: S314 (graphviz wrote it just now)


def texts(drawing: ET.Element) -> set[str]:
    """All that can be read in it."""
    return {text.text or "" for text in drawing.iter(f"{SVG}text")}


def test_a_drawing_has_the_way_of_pinned_clients_to_each_backend() -> None:
    (graph,) = [each for each in graphs("affinity-default") if any("SEP" in box for box in each.boxes)][:1]
    chains = {box.id for what, box in graph.boxes.items() if "-SEP-" in what}
    pinned = [edge for edge in graph.edges if edge.text.startswith("clients pinned to ")]
    assert len(chains) > 1
    assert {edge.end for edge in pinned} == chains
    assert len(pinned) == len({edge.start for edge in pinned}) * len(chains)
    seen = texts(svg([graph]))
    assert {edge.text for edge in pinned} <= seen


def test_a_drawing_has_every_name_and_share() -> None:
    found = graphs("affinity-default")
    seen = texts(svg(found))
    boxes = {line for graph in found for box in graph.boxes.values() for line in box.lines}
    assert boxes <= seen
    assert {"10.96.0.20:80/tcp", "33.3%", "KUBE-SVC-CDGGSHYLG3RE2FKL"} <= seen


def test_graphviz_takes_every_case_without_a_word() -> None:
    every = dot([graph for case in CASES for graph in graphs(case)])
    assert graphviz("canon", every).stderr == ""


def test_names_are_escaped() -> None:
    # Graphviz gives an entity or an escape back as the character, if it was taken for one.
    assert NASTY in texts(svg(nasty()))


def test_a_drawing_can_be_read_on_white_and_on_black() -> None:
    drawing = svg(graphs("kube-dns"))
    fills = {element.get("fill") for element in drawing.iter() if element.get("fill")}
    assert fills.isdisjoint({"white", "black", "transparent"})  # SVG 1.1 does not know the last
    strokes = {element.get("stroke") for element in drawing.iter() if element.get("stroke")}
    assert "black" not in strokes


def test_what_is_wrong_stands_out() -> None:
    rules = read(with_first(SVC, "-s 9.9.9.9/32 -j RETURN")(TEXT))
    found = graphs_of([rules.tree(ServicePortKey("shop/web:http", "tcp"))])
    assert "foreign: -s 9.9.9.9/32 -j RETURN" in texts(svg(found))
    assert "#c62828" in dot(found)


def test_one_way_stands_once_with_the_flows_of_all_frontends() -> None:
    port = ServicePort(80, Protocol.TCP, "", 8080)
    service = Service(
        "web", ("10.96.0.1", "10.96.0.2"), (port,), (Backend("10.244.0.1"), Backend("10.244.0.2"))
    )
    rules = NftablesRules(table(forwardings([service]), Family.IPV4), {})
    both = {f"10.96.0.{n}:80/tcp": ServicePortKey("web", "tcp") for n in (1, 2)}
    rules = NftablesRules(rules.reading, both)
    edges = graphs_of([rules.tree(ServicePortKey("web", "tcp"))])[0].edges
    assert len({(edge.start, edge.end, edge.text) for edge in edges}) == len(edges)
