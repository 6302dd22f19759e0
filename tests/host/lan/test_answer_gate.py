"""The gate in the kernel: it closes by itself, and opens only for a request that was made in time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from tests.lab.node import Node
from tests.sources.host import namespace
from vipd.host.lan.answer_gate import AnswerGate

pytestmark = pytest.mark.root

LAN = {"eth0", "eth1.100"}
ADDRESSES = {"192.0.2.10", "2001:db8::10"}


@pytest.fixture
def node() -> Iterator[Node]:
    with namespace() as node, node.entered():
        yield node


@pytest.fixture
def gate(node: Node) -> AnswerGate:
    made = AnswerGate("vipd-test")
    made.make(LAN, ADDRESSES, set())
    return made


def elements(node: Node, name: str) -> set[str]:
    """The elements of a set in both tables."""
    found = set()
    for family in ("arp", "ip6"):
        listed = json.loads(node.run("nft", "-j", "list", "set", family, "vipd-test", name).stdout)
        for element in listed["nftables"][1]["set"].get("elem", ()):
            found.add(str(element["elem"]["val"] if isinstance(element, dict) else element))
    return found


def test_it_is_made_closed(node: Node, gate: AnswerGate) -> None:
    assert elements(node, "lease") == elements(node, "held") == set()
    assert {str(ip_address(each)) for each in elements(node, "addresses")} == ADDRESSES
    assert gate.exists()
    assert not gate.extend(LAN, 1.0), "only an open gate is kept open"
    assert not gate.open(LAN, 1.0), "nothing was prepared"


def test_it_is_opened_in_time_or_not_at_all(node: Node, gate: AnswerGate) -> None:
    assert gate.prepare(LAN, 0.2)
    time.sleep(0.3)
    assert not gate.open(LAN, 10.0)
    assert elements(node, "lease") == set()
    assert gate.prepare(LAN, 5.0)
    assert gate.open(LAN, 10.0)
    assert elements(node, "lease") == LAN
    assert not gate.open(LAN, 10.0), "each preparation opens once"


def test_it_closes_by_itself_and_cannot_be_extended_then(node: Node, gate: AnswerGate) -> None:
    gate.prepare(LAN, 5.0)
    gate.open(LAN, 0.5)
    assert gate.extend(LAN, 0.5)
    time.sleep(0.6)
    assert elements(node, "lease") == set()
    assert not gate.extend(LAN, 5.0)
    assert elements(node, "lease") == set()


def test_one_interface_whose_element_is_gone_keeps_all_closed(node: Node, gate: AnswerGate) -> None:
    gate.prepare(LAN, 5.0)
    gate.open(LAN, 0.4)
    gate.close({"eth0"})
    assert not gate.extend(LAN, 5.0)
    time.sleep(0.5)
    assert elements(node, "lease") == set()


def test_addresses_are_held_and_released_together(node: Node, gate: AnswerGate) -> None:
    assert gate.hold(ADDRESSES)
    assert gate.hold(ADDRESSES), "again: no difference"
    assert elements(node, "held") == ADDRESSES
    assert not gate.release({*ADDRESSES, "192.0.2.11"}), "one of them was not held"
    assert elements(node, "held") == ADDRESSES
    assert gate.release(ADDRESSES)
    assert elements(node, "held") == set()


def test_a_flush_by_another_program_is_noticed(node: Node, gate: AnswerGate) -> None:
    gate.prepare(LAN, 5.0)
    node.run("nft", "flush", "ruleset")
    assert not gate.exists()
    assert not gate.prepare(LAN, 5.0)
    assert not gate.open(LAN, 5.0)
    assert not gate.hold(ADDRESSES)
    gate.remove()
    gate.make(LAN, ADDRESSES, {"192.0.2.10"})
    assert elements(node, "held") == {"192.0.2.10"}
