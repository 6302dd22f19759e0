"""The evaluator of nftables rules against the kernel: what it prints of tables, counts and hashes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.observe.explain.test_real_packets import compiled
from tests.observe.simulator.cases import HOST, OUTSIDE
from tests.observe.simulator.nft_forms import FORMS, TABLE
from tests.observe.simulator.test_kernel import (
    SENDER,
    Namespace,
    connect,
    eventually,
    make_namespace,
    meaning,
)
from vipd.dataplane.nftables.render import render
from vipd.model.service import Family
from vipd.observe.simulator import Arrival, Host, Packet, PacketVerdict, parse_tables, trace

__all__ = ["make_namespace"]

pytestmark = pytest.mark.root

OWN = "192.168.100.1"
VIP = "10.96.0.9"
TO = ("10.244.1.10", 5353)


def forms_table() -> str:
    """The table, its rules numbered; what a source hashes to comes from the evaluator itself."""
    rules = "\n".join(f'\t\t{form} counter comment "{i} {form}"' for i, form in enumerate(FORMS))
    text = TABLE.format(forms=rules, hashed="0.0.0.0")
    found = trace(parse_tables(text, Family.IPV4), packet("client"), Host((OWN,)))
    slots = next(s.slots for s in found.outcomes[0].steps if "jhash" in s.rule)
    assert slots is not None
    return TABLE.format(forms=rules, hashed=f"0.0.{slots.chosen[0] >> 8}.{slots.chosen[0] & 255}")


def packet(sender: str) -> Packet:
    source, arriving = (OUTSIDE, Arrival.FORWARDED) if sender == "client" else (OWN, Arrival.LOCAL)
    return Packet(source, VIP, "udp", 53, arriving=arriving)


def counted(listing: str) -> set[str]:
    """The comments of rules that a packet met."""
    return set(re.findall(r'counter packets [1-9]\d* bytes .*comment "([^"]*)"', listing))


@pytest.mark.parametrize("sender", ["client", "host"])
def test_the_rules_that_count_a_packet_are_the_steps(
    make_namespace: Callable[[], Namespace], sender: str
) -> None:
    host, client = make_namespace(), make_namespace()
    connect(host, client)
    host("nft", "-f", "-", stdin=forms_table())
    place, sent = (client, packet(sender)) if sender == "client" else (host, packet(sender))
    place("python3", "-c", SENDER, sent.source, VIP, "53")
    listing = host("nft", "list", "table", "ip", "forms")
    # What the packet has put into maps must not be there when it is followed.
    before = re.sub(r"\n\t\telements = \{ [^}]*expires [^}]*\}", "", listing)
    (outcome,) = trace(parse_tables(before, Family.IPV4), sent, Host((OWN, "192.168.5.1"))).outcomes
    steps = {step.comment for step in outcome.steps if "counter" in step.rule}
    assert steps == eventually(lambda: counted(host("nft", "list", "table", "ip", "forms")), steps)
    assert (outcome.verdict, outcome.backend) == (PacketVerdict.DELIVERED, "10.244.1.10:5353")
    assert len(FORMS) * 0.4 < len(steps) < len(FORMS)


HASHED = {
    Family.IPV4: (
        "ct original ip saddr",
        "ip saddr . th sport",
        "ip daddr . meta l4proto . th sport",
        "th sport",
    ),
    Family.IPV6: (
        "ip6 saddr",
        "ct original ip6 saddr . ip6 daddr . th sport",
        "meta l4proto . ip6 saddr . th sport",
    ),
}
MANY = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
for port in range(20000, 20030):
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        sender.bind((sys.argv[1], port))
        sender.sendto(b"x", (sys.argv[2], 53))
"""


@pytest.mark.parametrize("family", list(Family))
def test_hashes_are_the_kernel_s(make_namespace: Callable[[], Namespace], family: Family) -> None:
    host = make_namespace()
    source, to = ("127.0.0.1", "127.0.0.9") if family is Family.IPV4 else ("::1", "::1")
    host("ip", "link", "set", "lo", "up")
    ip = "ip" if family is Family.IPV4 else "ip6"
    moduli, offsets = (4093, 4294967295), (7, 0)
    lines = [
        f"map m{i} {{ type inet_service : mark\n size 100\n flags dynamic,timeout\n }}"
        for i in range(len(HASHED[family]))
    ]
    lines.append("chain output { type nat hook output priority -100; policy accept;")
    for i, hashed in enumerate(HASHED[family]):
        range_text = f"mod {moduli[i % 2]} seed 0x{i}766970 offset {offsets[i % 2]}"
        lines.append(f"meta mark set jhash {hashed} {range_text}")
        lines.append(f"meta l4proto udp update @m{i} {{ udp sport timeout 1h : meta mark }}")
    host("nft", "-f", "-", stdin="\n".join([f"table {ip} hashes {{", *lines, "}", "}"]))
    empty = host("nft", "list", "ruleset")
    host("python3", "-c", MANY, source, to)

    def learnt() -> list[tuple[str, str]]:
        listing = host("nft", "list", "ruleset")
        return re.findall(r"(\d+) timeout 1h expires \w+ : (0x[0-9a-f]+)", listing)

    number = 30 * len(HASHED[family])
    assert eventually(lambda: len(learnt()), number) == number
    elements = learnt()
    seen = {(int(port), int(mark, 16)) for port, mark in elements}
    tables = parse_tables(empty, family)
    told = set()
    for port in range(20000, 20030):
        sent = Packet(source, to, "udp", 53, port, Arrival.LOCAL)
        steps = trace(tables, sent, Host()).outcomes[0].steps
        slots = [step.slots for step in steps if step.slots is not None]
        assert len(slots) == len(HASHED[family])
        told |= {(port, found.chosen[0] + offsets[i % 2]) for i, found in enumerate(slots)}
    assert told == seen


DECLARED = """
apiVersion: vipd/v1
services:
  - name: web
    address: [10.96.0.20, "fd00:10:96::20"]
    ports: [{port: 80, target: 8080, node_port: 30080}]
    backends: [10.244.1.10, {address: 10.244.2.11, weight: 2}, "fd00:10:244:1::a", "fd00:10:244:2::b"]
    external_addresses: [{address: 198.51.100.5, allow_from: [203.0.113.0/24, 192.168.5.0/24]}]
    traffic_policy: {external: local}
    affinity: {by: client-ip, timeout: 10m}
  - {name: turns, address: 10.96.0.21, ports: [80/tcp], backends: [10.244.1.10, 10.244.2.11@3],
     balance: round-robin, masquerade: hairpin}
  - {name: hash, address: 10.96.0.22, ports: [80/tcp], backends: [10.244.1.10, 10.244.2.11],
     balance: source-hash}
  - {name: dead, address: 10.96.0.23, ports: [80/tcp, 80/udp]}
"""
ASKED = {
    Family.IPV4: (
        ("10.96.0.20", 80),
        ("10.96.0.21", 80),
        ("10.96.0.22", 80),
        ("10.96.0.23", 80),
        ("10.96.0.20", 81),
        ("198.51.100.5", 80),
        (OWN, 30080),
    ),
    Family.IPV6: (("fd00:10:96::20", 80), ("fd00:100::1", 30080), ("fd00:10:96::20", 81)),
}
SENDERS = {
    Family.IPV4: ("192.168.5.5", "10.244.1.10", "8.8.8.8"),
    Family.IPV6: ("fd00:10:244:1::a", "2001:db8::9"),
}


@pytest.mark.parametrize("family", list(Family))
def test_listed_and_written_text_trace_equally(
    make_namespace: Callable[[], Namespace], family: Family
) -> None:
    chosen: dict[str, object] = {
        "dataplane": "nftables",
        "cluster_cidrs": ["10.244.0.0/16", "fd00:10:244::/56"],
    }
    _, compilation = compiled(DECLARED, chosen)
    text = render(compilation.forwardings, compilation.table_options(family))
    host = make_namespace()
    host("nft", "-f", "-", stdin=text)
    listed = host("nft", "list", "ruleset")
    assert listed != text
    before, after = parse_tables(text, family), parse_tables(listed, family)
    for source in SENDERS[family]:
        for to, port in ASKED[family]:
            for arriving in Arrival:
                for protocol in ("tcp", "udp"):
                    sent = Packet(source, to, protocol, port, arriving=arriving)
                    one, other = (trace(tables, sent, HOST) for tables in (before, after))
                    assert meaning(one) == meaning(other)
                    assert [[s.comment for s in o.steps] for o in one.outcomes] == [
                        [s.comment for s in o.steps] for o in other.outcomes
                    ]
