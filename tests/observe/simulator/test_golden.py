"""What a real kube-proxy's rules do, against expectations read from the manifests and the contract."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace

import pytest

from tests.observe.simulator.cases import CASES, HOST, NODE, NODE6, OUTSIDE, OUTSIDE6, POD, POD6, send, traced
from vipd.observe.simulator import PacketVerdict

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
    ("kube-dns", OUTSIDE, "10.96.0.10", "udp", 53, DNS, True),
    ("kube-dns", NODE, "10.96.0.10", "udp", 53, DNS, True),
    ("kube-dns", POD, "10.96.0.10", "tcp", 53, DNS, False),
    ("kube-dns", OUTSIDE, "10.96.0.10", "tcp", 9153, ("10.244.0.5:9153", "10.244.2.21:9153"), True),
    ("clusterip-1ep", POD, VIP, "tcp", 80, TWO[:1], False),
    ("clusterip-1ep", TWO[0].split(":")[0], VIP, "tcp", 80, TWO[:1], True),
    ("clusterip-1ep", NODE, VIP, "tcp", 80, TWO[:1], True),
    ("clusterip-3ep", POD, VIP, "tcp", 80, SPREAD, False),
    ("clusterip-3ep", OUTSIDE, VIP, "tcp", 80, SPREAD, True),
    ("my-nginx", POD, "10.98.69.149", "tcp", 3000, ("10.244.3.38:80",), False),
    ("my-nginx", "10.244.3.38", "10.98.69.149", "tcp", 3000, ("10.244.3.38:80",), True),
    ("my-nginx", NODE, "10.98.69.149", "tcp", 3000, ("10.244.3.38:80",), True),
    ("named-unnamed", POD, "10.96.0.50", "tcp", 80, TWO[:1], False),
    ("named-unnamed", POD, "10.96.0.51", "tcp", 80, PLAIN, False),
    ("named-unnamed", OUTSIDE, "10.96.0.51", "udp", 80, PLAIN, True),
    ("named-unnamed", NODE, "10.96.0.51", "tcp", 443, HTTPS, True),
    ("affinity-default", POD, VIP, "tcp", 80, SPREAD, False),
    ("affinity-default", OUTSIDE, VIP, "tcp", 80, SPREAD, True),
    ("affinity-default", NODE, VIP, "tcp", 80, SPREAD, True),
    ("external-ips", POD, VIP, "tcp", 80, TWO, False),
    ("external-ips", OUTSIDE, "203.0.113.10", "tcp", 80, TWO, True),
    ("external-ips", POD, "203.0.113.11", "tcp", 80, TWO, True),
    ("external-ips", NODE, "203.0.113.11", "tcp", 80, TWO, True),
    ("nodeport", POD, VIP, "tcp", 80, TWO, False),
    ("nodeport", OUTSIDE, NODE, "tcp", 30080, TWO, True),
    ("nodeport", OUTSIDE, "192.168.101.1", "tcp", 30080, TWO, True),
    ("nodeport", POD, NODE, "tcp", 30080, TWO, True),
    ("nodeport", "10.244.1.10", NODE, "tcp", 30080, TWO, True),
    ("nodeport", NODE, NODE, "tcp", 30080, TWO, True),
    ("nodeport", "127.0.0.1", "127.0.0.1", "tcp", 30080, TWO, True),
    ("nodeport-addresses", OUTSIDE, NODE, "tcp", 30080, TWO, True),
    ("nodeport-addresses", NODE, NODE, "tcp", 30080, TWO, True),
    ("nodeport-etp-local", OUTSIDE, NODE, "tcp", 30080, THREE[:1], False),
    ("nodeport-etp-local", POD, NODE, "tcp", 30080, THREE, False),
    ("nodeport-etp-local", NODE, NODE, "tcp", 30080, THREE, True),
    ("nodeport-etp-local", OUTSIDE, VIP, "tcp", 80, THREE, True),
    ("nodeport-etp-local", "10.244.0.7", VIP, "tcp", 80, THREE, None),
    ("lb", OUTSIDE, LB, "tcp", 80, TWO, True),
    ("lb", POD, LB, "tcp", 80, TWO, True),
    ("lb", NODE, LB, "tcp", 80, TWO, True),
    ("lb", OUTSIDE, NODE, "tcp", 30080, TWO, True),
    ("lb", POD, VIP, "tcp", 80, TWO, False),
    ("lb-etp-local", OUTSIDE, LB, "tcp", 80, THREE[:1], False),
    ("lb-etp-local", POD, LB, "tcp", 80, THREE, False),
    ("lb-etp-local", NODE, LB, "tcp", 80, THREE, True),
    ("lb-etp-local", OUTSIDE, NODE, "tcp", 30080, THREE[:1], False),
    ("lb-etp-local", OUTSIDE, VIP, "tcp", 80, THREE, True),
    ("lb-source-ranges", "203.0.113.5", LB, "tcp", 80, TWO, True),
    ("lb-source-ranges", "192.0.2.77", LB, "tcp", 80, TWO, True),
    ("lb-source-ranges", "203.0.113.200", NODE, "tcp", 30080, TWO, True),
    ("lb-source-ranges", OUTSIDE, VIP, "tcp", 80, TWO, True),
    ("lb-source-ranges", POD, VIP, "tcp", 80, TWO, False),
    ("masquerade-all", POD, VIP, "tcp", 80, TWO, True),
    ("masquerade-all", OUTSIDE, VIP, "tcp", 80, TWO, True),
    ("masquerade-all", NODE, VIP, "tcp", 80, TWO, True),
    ("no-cluster-cidr", POD, VIP, "tcp", 80, TWO, False),
    ("no-cluster-cidr", OUTSIDE, VIP, "tcp", 80, TWO, False),
    ("no-cluster-cidr", NODE, VIP, "tcp", 80, TWO, False),
    ("terminating-mix", POD, VIP, "tcp", 80, TWO[1:], False),
    ("terminating-mix", OUTSIDE, VIP, "tcp", 80, TWO[1:], True),
    ("terminating-mix", "10.244.2.11", VIP, "tcp", 80, TWO[1:], True),
    ("ipv6-clusterip", POD6, "fd00:10:96::20", "tcp", 80, SIX, False),
    ("ipv6-clusterip", OUTSIDE6, "fd00:10:96::20", "tcp", 80, SIX, True),
    ("ipv6-clusterip", NODE6, "fd00:10:96::20", "tcp", 80, SIX, True),
    ("large-cluster", POD, VIP, "tcp", 80, TWO, False),
    ("large-cluster", OUTSIDE, VIP, "tcp", 80, TWO, True),
]

NOT_DELIVERED = [
    ("no-endpoints", POD, VIP, 80, PacketVerdict.REJECTED),
    ("no-endpoints", OUTSIDE, VIP, 80, PacketVerdict.REJECTED),
    ("no-endpoints", NODE, VIP, 80, PacketVerdict.REJECTED),
    ("no-endpoints", POD, VIP, 81, PacketVerdict.UNCHANGED),
    ("itp-local-none", POD, VIP, 80, PacketVerdict.DROPPED),
    ("itp-local-none", OUTSIDE, VIP, 80, PacketVerdict.DROPPED),
    ("itp-local-none", NODE, VIP, 80, PacketVerdict.DROPPED),
    ("lb-source-ranges", "203.0.113.200", LB, 80, PacketVerdict.DROPPED),
    ("lb-source-ranges", POD, LB, 80, PacketVerdict.DROPPED),
    ("lb-source-ranges", NODE, LB, 80, PacketVerdict.DROPPED),
    ("lb-source-ranges", "203.0.113.200", LB, 81, PacketVerdict.UNCHANGED),
    ("nodeport", OUTSIDE, "192.168.7.7", 30080, PacketVerdict.UNCHANGED),
    ("nodeport", OUTSIDE, NODE, 30081, PacketVerdict.UNCHANGED),
    ("nodeport-addresses", OUTSIDE, "192.168.101.1", 30080, PacketVerdict.UNCHANGED),
    ("nodeport-addresses", "127.0.0.1", "127.0.0.1", 30080, PacketVerdict.UNCHANGED),
    ("lb-etp-local", OUTSIDE, NODE, 32100, PacketVerdict.UNCHANGED),
    # kubelet's localnet block: from elsewhere to 127.0.0.0/8 without DNAT
    ("clusterip-1ep", OUTSIDE, "127.0.0.1", 22, PacketVerdict.DROPPED),
    ("clusterip-1ep", "127.0.0.1", "127.0.0.1", 22, PacketVerdict.UNCHANGED),
    ("clusterip-1ep", POD, VIP, 81, PacketVerdict.UNCHANGED),
    ("named-unnamed", POD, "10.96.0.50", 443, PacketVerdict.UNCHANGED),
    ("kube-dns", POD, "10.96.0.10", 54, PacketVerdict.UNCHANGED),
]


@pytest.mark.parametrize("row", DELIVERED, ids=lambda row: "-".join(map(str, (*row[:5], row[6]))))
def test_delivered(row: tuple[str, str, str, str, int, tuple[str, ...], bool | None]) -> None:
    case, source, to, protocol, port, backends, masqueraded = row
    found = traced(case, send(source, to, protocol, port))
    assert found.shares() == pytest.approx({b: 1 / len(backends) for b in backends})
    assert {o.verdict for o in found.outcomes} == {PacketVerdict.DELIVERED}
    if masqueraded is not None:
        assert {o.masqueraded for o in found.outcomes} == {masqueraded}


@pytest.mark.parametrize(("case", "source", "to", "port", "verdict"), NOT_DELIVERED)
def test_not_delivered(case: str, source: str, to: str, port: int, verdict: PacketVerdict) -> None:
    found = traced(case, send(source, to, "tcp", port))
    assert [(o.verdict, o.backend, o.masqueraded) for o in found.outcomes] == [(verdict, None, False)]
    assert found.shares() == {}


@pytest.mark.parametrize(
    ("case", "source", "to"),
    [
        ("clusterip-3ep", "10.244.1.10", VIP),
        ("no-cluster-cidr", "10.244.1.10", VIP),
        ("external-ips", "10.244.1.10", VIP),
        ("nodeport-etp-local", "10.244.0.7", NODE),
        ("lb-etp-local", "10.244.0.7", LB),
        ("ipv6-clusterip", "fd00:10:244:1::a", "fd00:10:96::20"),
    ],
)
def test_a_backend_that_meets_itself_is_masqueraded_and_meets_others_as_itself(
    case: str, source: str, to: str
) -> None:
    port = 30080 if to == NODE else 80
    outcomes = traced(case, send(source, to, "tcp", port)).outcomes
    assert len(outcomes) > 1
    for outcome in outcomes:
        assert outcome.backend is not None
        assert outcome.masqueraded is (source in outcome.backend)


def test_affinity_leads_back_to_the_pinned_backend() -> None:
    digest = hashlib.sha256(b"default/web:http" + b"tcp" + b"10.244.2.11:8080").digest()
    pinned = "KUBE-SEP-" + base64.b32encode(digest).decode()[:16]
    host = replace(HOST, affinity_lists=frozenset({pinned}))
    assert traced("affinity-default", send(POD, VIP, "tcp", 80), host).shares() == {"10.244.2.11:8080": 1.0}
    assert len(traced("clusterip-3ep", send(POD, VIP, "tcp", 80), host).shares()) == 3


def test_steps_tell_the_path() -> None:
    outcome = traced("clusterip-1ep", send(POD, VIP, "tcp", 80)).outcomes[0]
    comments = [s.comment for s in outcome.steps if s.table == "nat"]
    assert comments == [
        "kubernetes service portals",
        "default/web:http cluster IP",
        "default/web:http -> 10.244.1.10:8080",
        "default/web:http",
        "kubernetes postrouting rules",
        "",
    ]
    chains = [s.chain.rsplit("-", 1)[0] for s in outcome.steps if s.table == "nat"]
    assert chains == ["PREROUTING", "KUBE", "KUBE-SVC", "KUBE-SEP", "POSTROUTING", "KUBE"]
    assert outcome.steps[-1].rule.endswith("-j RETURN")


@pytest.mark.timeout(100)
def test_a_thousand_endpoints_share_evenly() -> None:
    shares = traced("large-cluster", send(OUTSIDE, "10.96.2.1", "tcp", 80)).shares()
    assert len(shares) == 999
    assert all(share == pytest.approx(1 / 999, rel=1e-5) for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1.0)


def test_every_case_is_looked_at() -> None:
    assert {row[0] for row in DELIVERED} | {row[0] for row in NOT_DELIVERED} == set(CASES)
