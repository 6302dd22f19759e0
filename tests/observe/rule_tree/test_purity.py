"""What makes trees and drawings follows from its arguments alone; only four modules touch anything."""

from __future__ import annotations

from tests.test_architecture import EFFECTS, ROOT, Tree, _below

ROOM = "vipd.observe.rule_tree"
SHELL = {f"{ROOM}.{name}" for name in ("resolve_target", "read_iptables", "read_nftables", "graphviz")}


def test_only_the_edge_reaches_effects() -> None:
    tree = Tree(ROOT)
    modules = set(tree.within(ROOM))
    assert modules > SHELL
    reached = {
        start: [imported for _, imported in tree.reached(start) if _below(imported, EFFECTS)]
        for start in modules - SHELL
    }
    assert {start: found for start, found in reached.items() if found} == {}
