"""The table that marks packets, as the kernel holds it."""

from __future__ import annotations

import pytest

from tests.lab.node import Node
from tests.observe.live_trace.tracing import NOBODY, waiting

pytestmark = pytest.mark.root

FLOWS = {
    ("--from", "10.10.0.2", "10.96.0.10:80/tcp"): (
        "ip saddr 10.10.0.2 ip daddr 10.96.0.10 tcp dport 80 tcp flags syn / syn,ack",
        "",
    ),
    ("10.96.0.10:53/udp",): ("ip daddr 10.96.0.10 udp dport 53", " limit rate 100/second"),
    ("--from", "[fd00::2]:4000", "[fd00::10]:53/udp"): (
        "ip6 saddr fd00::2 ip6 daddr fd00::10 udp sport 4000 udp dport 53",
        " limit rate 100/second",
    ),
    ("10.96.0.10:7/sctp",): ("ip daddr 10.96.0.10 sctp dport 7 @th,96,8 0x1", ""),
}
"""Words of vipctl trace -> the packets that are marked, and how many."""


def listed(host: Node, *words: str) -> list[str]:
    """The lines of everything that nft lists while a flow is waited for."""
    with waiting(host, NOBODY, *words):
        lines = host.run("nft", "list", "ruleset").stdout.splitlines()
    assert host.run("nft", "list", "ruleset").stdout == ""
    return [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize("words", FLOWS, ids=" ".join)
def test_exactly_the_first_packets_of_the_flow_are_marked(host: Node, words: tuple[str, ...]) -> None:
    lines = listed(host, *words)
    matched, limit = FLOWS[words]
    assert "flags owner" in lines
    assert lines.count(f"{matched}{limit} meta nftrace set 1") == 2
    assert lines.count(f"ct state new {matched} meta nftrace set 1") == 2
    assert lines.count("ct state established,related jump earlier") == 2
    assert lines.count("meta nftrace set 0") == 1
    assert sum("meta nftrace" in line for line in lines) == 5
    assert not any("policy drop" in line for line in lines)


def test_packets_of_this_host_alone_need_no_look_at_others(host: Node) -> None:
    lines = listed(host, "--from", "local", "10.96.0.10:80/tcp")
    hooks = [line.split()[3] for line in lines if line.startswith("type filter hook")]
    assert sorted(hooks) == ["input", "output", "output", "postrouting"]
