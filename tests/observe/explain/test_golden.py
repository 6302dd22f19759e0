"""What a real kube-proxy's rules do, against expectations read from the manifests and the contract.

vipd writes the rules of these cases byte for byte (tests/golden), so explain must say the same of a packet.
Every sender to every port of every case: test_real_packets.py, by packets, and test_dataplanes_agree.py.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.lab.inside import DATAPLANES
from tests.observe.explain.asking import Declared, Json, golden

POD, OUTSIDE, NODE = "10.244.9.9", "192.168.5.5", "192.168.100.1"
"""A pod elsewhere, a client outside, and the address that a process of the host sends from."""
POD6, OUTSIDE6, NODE6 = "fd00:10:244:9::9", "2001:db8::5", "fd00:100::1"
HOST = [NODE, "192.168.101.1", NODE6, "127.0.0.1", "::1"]

VIP = "10.96.0.20"
TWO = ("10.244.1.10:8080", "10.244.2.11:8080")
THREE = ("10.244.0.7:8080", *TWO)
SPREAD = (*TWO, "10.244.3.12:8080")
DNS = ("10.244.0.5:53", "10.244.2.21:53")
SIX = ("[fd00:10:244:1::a]:8080", "[fd00:10:244:2::b]:8080")
HTTPS = ("10.244.1.11:8443", "10.244.2.12:8443")
PLAIN = ("10.244.1.11:8080", "10.244.2.12:8080")
LB = "198.51.100.5"

DELIVERED = [
    # case, source, destination, protocol, port, backends in equal shares, masqueraded
    ("kube-dns", POD, "10.96.0.10", "udp", 53, DNS, False),
    ("kube-dns", OUTSIDE, "10.96.0.10", "tcp", 9153, ("10.244.0.5:9153", "10.244.2.21:9153"), True),
    ("clusterip-3ep", OUTSIDE, VIP, "tcp", 80, SPREAD, True),
    ("named-unnamed", NODE, "10.96.0.51", "tcp", 443, HTTPS, True),
    ("affinity-default", OUTSIDE, VIP, "tcp", 80, SPREAD, True),
    ("external-ips", OUTSIDE, "203.0.113.10", "tcp", 80, TWO, True),
    ("nodeport", "10.244.1.10", NODE, "tcp", 30080, TWO, True),
    ("nodeport", "127.0.0.1", "127.0.0.1", "tcp", 30080, TWO, True),
    ("nodeport-addresses", OUTSIDE, NODE, "tcp", 30080, TWO, True),
    ("nodeport-etp-local", OUTSIDE, NODE, "tcp", 30080, THREE[:1], False),
    ("lb", OUTSIDE, LB, "tcp", 80, TWO, True),
    ("lb-etp-local", POD, LB, "tcp", 80, THREE, False),
    ("lb-source-ranges", "192.0.2.77", LB, "tcp", 80, TWO, True),
    ("lb-source-ranges", "203.0.113.200", NODE, "tcp", 30080, TWO, True),
    ("masquerade-all", POD, VIP, "tcp", 80, TWO, True),
    ("no-cluster-cidr", POD, VIP, "tcp", 80, TWO, False),
    ("terminating-mix", "10.244.2.11", VIP, "tcp", 80, TWO[1:], True),
    ("ipv6-clusterip", OUTSIDE6, "fd00:10:96::20", "tcp", 80, SIX, True),
]

NOT_DELIVERED = [
    ("no-endpoints", POD, VIP, 80, "rejected"),
    ("itp-local-none", POD, VIP, 80, "dropped"),
    ("lb-source-ranges", "203.0.113.200", LB, 80, "dropped"),
    ("nodeport", OUTSIDE, "192.168.7.7", 30080, "unchanged"),
    ("nodeport-addresses", OUTSIDE, "192.168.101.1", 30080, "unchanged"),
    ("nodeport-addresses", "127.0.0.1", "127.0.0.1", 30080, "unchanged"),
    # kubelet's localnet block: from elsewhere to 127.0.0.0/8 without DNAT
    ("clusterip-1ep", OUTSIDE, "127.0.0.1", 22, "dropped"),
    ("clusterip-1ep", "127.0.0.1", "127.0.0.1", 22, "unchanged"),
]


@cache
def declared(case: str, dataplane: str) -> Declared:
    if dataplane == "iptables":
        return golden(case, host_addresses=HOST)
    # It has no such form; without it unused ports are refused.
    return golden(case, host_addresses=HOST, compat=None, chain_prefix=None, reject_unused_ports=False)


def explained(case: str, source: str, to: str, protocol: str, port: int, dataplane: str) -> Json:
    target = f"[{to}]:{port}/{protocol}" if ":" in to else f"{to}:{port}/{protocol}"
    return declared(case, dataplane).explain(source, target, dataplane)


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_delivered(dataplane: str) -> None:
    wrong = []
    for case, source, to, protocol, port, backends, masqueraded in DELIVERED:
        view = explained(case, source, to, protocol, port, dataplane)
        shares = {backend["endpoint"]: backend["share"] for backend in view["backends"]}
        told = {backend["masqueraded"] for backend in view["backends"]}
        same = shares == pytest.approx(dict.fromkeys(backends, 1 / len(backends)), abs=1e-6)
        if not same or (view["verdict"], told) != ("delivered", {masqueraded}):
            wrong.append((case, view["summary"]))
    assert wrong == []


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_not_delivered(dataplane: str) -> None:
    wrong = []
    for case, source, to, port, verdict in NOT_DELIVERED:
        view = explained(case, source, to, "tcp", port, dataplane)
        # The block of 127.0.0.0/8 is part of the rules of iptables alone.
        expected = "unchanged" if to == "127.0.0.1" and dataplane == "nftables" else verdict
        if (view["verdict"], view["backends"]) != (expected, []):
            wrong.append((case, view["summary"]))
    assert wrong == []


def test_the_path_of_a_packet() -> None:
    rules = explained("clusterip-1ep", POD, VIP, "tcp", 80, "iptables")["outcomes"][0]["rules"]
    assert [
        f"{r['chain'].rpartition('-')[0] or r['chain']}: {r['meaning']}" for r in rules if r["table"] == "nat"
    ] == [
        "PREROUTING: on to KUBE-SERVICES",
        "KUBE: 10.96.0.20:80/tcp of default/web:http",
        "KUBE-SVC: to 10.244.1.10:8080, all others",
        "KUBE-SEP: DNAT to 10.244.1.10:8080",
        "POSTROUTING: on to KUBE-POSTROUTING",
        "KUBE: not marked: nothing to do",
    ]


@pytest.mark.slow
def test_a_thousand_endpoints_share_evenly() -> None:
    for dataplane in DATAPLANES:
        view = explained("large-cluster", OUTSIDE, "10.96.2.1", "tcp", 80, dataplane)
        shares = [backend["share"] for backend in view["backends"]]
        assert shares == pytest.approx([1 / 999] * 999, rel=1e-3)
        assert sum(shares) == pytest.approx(1.0, abs=1e-3)
