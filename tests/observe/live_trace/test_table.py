"""The table that marks packets, as the kernel holds it."""

from __future__ import annotations

import sys

import pytest

from tests.lab.node import Node
from tests.observe.explain.probe_lab import ROOT

pytestmark = pytest.mark.root

MAKE = """
import subprocess, sys
from vipd.model.service import Protocol
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.table import TraceTable
with TraceTable([{flow}]):
    print(subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout)
"""

FLOWS = {
    'Flow("10.96.0.10", 80, Protocol.TCP, "10.10.0.2")': (
        "ip saddr 10.10.0.2 ip daddr 10.96.0.10 tcp dport 80 tcp flags syn / syn,ack",
        "",
    ),
    'Flow("10.96.0.10", 53, Protocol.UDP, source_port=4000)': (
        "ip daddr 10.96.0.10 udp sport 4000 udp dport 53",
        " limit rate 100/second",
    ),
    'Flow("fd00::10", 53, Protocol.UDP, "fd00::2", 4000)': (
        "ip6 saddr fd00::2 ip6 daddr fd00::10 udp sport 4000 udp dport 53",
        " limit rate 100/second",
    ),
    'Flow("10.96.0.10", 7, Protocol.SCTP)': ("ip daddr 10.96.0.10 sctp dport 7 @th,96,8 0x1", ""),
}


def listed(host: Node, flow: str) -> list[str]:
    """The lines of everything that nft lists while the table for a flow is there."""
    argv = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", MAKE.format(flow=flow))
    return [" ".join(line.split()) for line in host.run(*argv).stdout.splitlines()]


@pytest.mark.parametrize("flow", FLOWS)
def test_exactly_the_first_packets_of_the_flow_are_marked(host: Node, flow: str) -> None:
    lines = listed(host, flow)
    matched, limit = FLOWS[flow]
    assert "flags owner" in lines
    assert lines.count(f"{matched}{limit} meta nftrace set 1") == 2
    assert lines.count(f"ct state new {matched} meta nftrace set 1") == 2
    assert lines.count("ct state established,related jump earlier") == 2
    assert lines.count("meta nftrace set 0") == 1
    assert sum("meta nftrace" in line for line in lines) == 5
    assert not any("policy drop" in line for line in lines)
    assert host.run("nft", "list", "ruleset").stdout == ""


def test_packets_of_this_host_alone_need_no_look_at_others(host: Node) -> None:
    lines = listed(host, 'Flow("10.96.0.10", 80, Protocol.TCP, from_here=True)')
    hooks = [line.split()[3] for line in lines if line.startswith("type filter hook")]
    assert sorted(hooks) == ["input", "output", "output", "postrouting"]
