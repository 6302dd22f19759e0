"""Drawings: graphviz takes what is written for it, and shows it. Of every golden case: test_declared.py."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET

import pytest

from tests.observe.explain.asking import Declared
from tests.observe.rule_tree.kernel_rules import KernelRules, nodes
from tests.observe.rule_tree.test_damage import BY_TABLE, SEPS, SVC, TEXT, with_first
from vipd.model.service import Family

pytestmark = pytest.mark.root

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "a\\N<&lt;> #35; `x` |y| ; end {z}"
"""Text that means something in the language that it is written in."""


def graphviz(form: str, text: str) -> str:
    """What graphviz makes of a drawing, without a word."""
    argv = ["dot", f"-T{form}"]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


def drawn(kernel: KernelRules) -> str:
    ended = kernel.vipctl("shop/web", "--format", "dot")
    assert ended.code == 0, ended.err
    return ended.out


def svg(text: str) -> ET.Element:
    return ET.fromstring(graphviz("svg", text))  # noqa: S314 (graphviz wrote it just now)


def texts(drawing: ET.Element) -> list[str]:
    """All that can be read in it."""
    return [text.text or "" for text in drawing.iter(f"{SVG}text")]


def test_a_drawing_has_all_names_and_shares_and_can_be_read_on_white_and_on_black(
    kernel: KernelRules,
) -> None:
    kernel.meant(None)
    kernel.load(TEXT)
    drawing = svg(drawn(kernel))
    seen = texts(drawing)
    assert {"10.96.0.1:80/tcp", "node port 30080/tcp", "33.3%", SVC, *SEPS} <= set(seen)
    assert len([text for text in seen if text.startswith("clients pinned to ")]) == len(SEPS)
    fills = {element.get("fill") for element in drawing.iter() if element.get("fill")}
    assert fills.isdisjoint({"white", "black", "transparent"})  # SVG 1.1 does not know the last
    assert "black" not in {element.get("stroke") for element in drawing.iter()}


def test_what_is_wrong_stands_out_and_is_escaped(kernel: KernelRules) -> None:
    kernel.meant(None)
    kernel.load(with_first(SVC, f'-s 9.9.9.9/32 -m comment --comment "{NASTY}" -j RETURN')(TEXT))
    (foreign,) = nodes(kernel.rules("shop/web")["services"], "foreign")
    text = drawn(kernel)
    # Graphviz gives an entity or an escape back as the character, if it was taken for one.
    assert f"foreign: {foreign['text']}" in texts(svg(text))
    assert "&lt;> #35; `x` |y| ; end {z}" in foreign["text"]
    assert "#c62828" in text


def test_one_way_stands_once_with_the_flows_of_all_frontends(kernel: KernelRules) -> None:
    two = Declared(BY_TABLE.text.replace("10.96.0.1", "[10.96.0.1, 10.96.0.2]"), BY_TABLE.settings)
    kernel.load(two.render(Family.IPV4, "nftables"))
    kernel.meant(two)
    ways = [line for line in drawn(kernel).splitlines() if " -> " in line]
    assert len(ways) > 3
    assert len(set(ways)) == len(ways)
