"""Of a large table only the chains of one service are read: just as if all had been."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from tests.dataplane.namespace import Namespace
from tests.observe.rule_tree.made import forwardings
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.render import render
from vipd.dataplane.iptables.saved_rules import Count, SavedRule, listed_rule, read_tables
from vipd.dataplane.iptables.tools import find_tools, save
from vipd.model.service import Backend, Family, Protocol, Service, ServicePort
from vipd.observe.rule_tree.iptables_tree import IptablesRules
from vipd.observe.rule_tree.read_iptables import Search, _ChainReader
from vipd.observe.rule_tree.tree import ServicePortKey

MANY = 80
"""Addresses: enough to be dispatched in groups."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-j X", SavedRule("-j X", None)),
        ("-c 3 180 -j X", SavedRule("-j X", Count(3, 180))),
        ("-d 10.0.0.1/32 -c 3 180 -j X --y", SavedRule("-d 10.0.0.1/32 -j X --y", Count(3, 180))),
        ("-m comment --comment x -c 0 0", SavedRule("-m comment --comment x", Count(0, 0))),
        (
            '-m comment --comment "a -c 1 2 -j b" -c 5 6 -j X',
            SavedRule('-m comment --comment "a -c 1 2 -j b" -j X', Count(5, 6)),
        ),
    ],
)
def test_a_listed_rule_is_a_saved_one_with_its_counter_inside(text: str, expected: SavedRule) -> None:
    assert listed_rule(text) == expected


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    port = ServicePort(80, Protocol.TCP, "http", 8080)
    services = [
        Service(
            f"test/s{n}", (f"10.96.{n}.1",), (port,), (Backend(f"10.244.{n}.1"), Backend(f"10.244.{n}.2"))
        )
        for n in range(MANY)
    ]
    text = render(tuple(forwardings(services)), RuleOptions(Family.IPV4))
    assert "VIPD-GRP-" in text
    with Namespace() as made:
        command = ["ip", "netns", "exec", made.name, "iptables-nft-restore"]
        subprocess.run(command, input=text, text=True, check=True, timeout=60)
        yield made


@pytest.mark.root
def test_a_part_is_as_the_whole(namespace: Namespace) -> None:
    async def both() -> tuple[IptablesRules, IptablesRules]:
        tools = await find_tools(Family.IPV4, "nft", namespace.run)
        search = Search(frozenset({"10.96.7.1"}), frozenset({"test/s7:http"}))
        part = await _ChainReader(tools, "VIPD", search, namespace.run).read()
        whole = read_tables(await save(tools, namespace.run, counters=True))
        return tuple(IptablesRules(found, "VIPD", Family.IPV4, "") for found in (part, whole))  # type: ignore[return-value]

    part, whole = asyncio.run(both())
    key = ServicePortKey("test/s7:http", "tcp")
    assert part.tree(key) == whole.tree(key)
    assert len(part.tables.chains) < len(whole.tables.chains) / 4
    for chain, rules in part.tables.chains.items():
        assert rules == whole.tables.chains[chain]
