"""The golden cases as rulesets, and who sends the packets."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from vipd.model.service import Family
from vipd.observe.simulator import Arrival, Host, Packet, Ruleset, SimulationResult, parse_ruleset, trace

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir())

HOST = Host(("192.168.100.1", "192.168.101.1", "fd00:100::1"))
"""The host of every case, with a second IPv4 address that no case mentions."""

POD = "10.244.9.9"
OUTSIDE = "192.168.5.5"
NODE = "192.168.100.1"
"""The address a process of the host sends from."""

POD6, OUTSIDE6, NODE6 = "fd00:10:244:9::9", "2001:db8::5", "fd00:100::1"


def family_of_case(case: str) -> Family:
    """The family a case was recorded in."""
    settings = json.loads((GOLDEN / case / "case.json").read_text())
    return Family.IPV6 if settings["family"] == "IPv6" else Family.IPV4


def rules_text(case: str) -> str:
    """What iptables-save printed."""
    return "".join((GOLDEN / case / f"{table}.rules").read_text() for table in ("filter", "nat"))


@cache
def ruleset(case: str) -> Ruleset:
    """The rules of a case."""
    return parse_ruleset(rules_text(case), family_of_case(case))


def send(source: str, destination: str, protocol: str, port: int) -> Packet:
    """A packet; those from the host's own addresses are sent by a process of the host."""
    local = source in HOST.addresses or source == "127.0.0.1"
    arriving = Arrival.LOCAL if local else Arrival.FORWARDED
    return Packet(source, destination, protocol, port, arriving=arriving)


def traced(case: str, packet: Packet, host: Host = HOST) -> SimulationResult:
    """What a case does to a packet."""
    return trace(ruleset(case), packet, host)


PACKETS = {
    Family.IPV4: [
        send(source, destination, protocol, port)
        for source in (POD, OUTSIDE, NODE, "10.244.1.10", "203.0.113.5")
        for destination, port in (
            ("10.96.0.20", 80),
            ("10.96.0.10", 53),
            ("10.96.2.1", 80),
            ("198.51.100.5", 80),
            ("203.0.113.10", 80),
            (NODE, 30080),
            ("10.98.69.149", 3000),
        )
        for protocol in ("tcp", "udp")
    ],
    Family.IPV6: [
        send(source, "fd00:10:96::20", "tcp", 80) for source in (POD6, OUTSIDE6, NODE6, "fd00:10:244:1::a")
    ],
}
"""Packets that between them meet every kind of frontend of the cases."""
