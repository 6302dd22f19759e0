"""What a real kube-proxy's rules do to packets that test_dataplanes_agree.py and test_real_packets.py leave
out: those to 127.0.0.1, and the case of a thousand endpoints."""

from __future__ import annotations

import pytest

from tests.lab.inside import DATAPLANES
from tests.observe.explain.asking import Json, golden

OUTSIDE, HERE = "192.168.5.5", "127.0.0.1"
TO_LOOPBACK = [
    ("nodeport", HERE, 30080, "delivered"),
    ("nodeport-addresses", HERE, 30080, "unchanged"),
    # kubelet's localnet block: from elsewhere to 127.0.0.0/8 without DNAT
    ("clusterip-1ep", OUTSIDE, 22, "dropped"),
    ("clusterip-1ep", HERE, 22, "unchanged"),
]


def explained(case: str, source: str, target: str, dataplane: str) -> Json:
    # The nftables dataplane has no such form; without it unused ports are refused.
    form = {"compat": None, "chain_prefix": None, "reject_unused_ports": False}
    declared = golden(
        case, host_addresses=["192.168.100.1", HERE], **(form if dataplane == "nftables" else {})
    )
    return declared.explain(source, target, dataplane)


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_to_the_loopback_address(dataplane: str) -> None:
    for case, source, port, verdict in TO_LOOPBACK:
        view = explained(case, source, f"{HERE}:{port}/tcp", dataplane)
        # The block is part of the rules of iptables alone.
        blocked = "dropped" if dataplane == "iptables" else "unchanged"
        assert view["verdict"] == (blocked if verdict == "dropped" else verdict), (case, view["summary"])
        assert {b["masqueraded"] for b in view["backends"]} == ({True} if verdict == "delivered" else set())


@pytest.mark.slow
def test_a_thousand_endpoints_share_evenly() -> None:
    for dataplane in DATAPLANES:
        view = explained("large-cluster", OUTSIDE, "10.96.2.1:80/tcp", dataplane)
        shares = [backend["share"] for backend in view["backends"]]
        assert shares == pytest.approx([1 / 999] * 999, rel=1e-3)
        assert sum(shares) == pytest.approx(1.0, abs=1e-3)
