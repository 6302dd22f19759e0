"""Two hosts announce an address to a router by real routing daemons: what its table shows, and which
connections fail, when a backend dies, a host is drained, and vipd stops, crashes or is upgraded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.announce.routed_lab import VIP, VIP6, RoutedLab, both_serving, require
from tests.lab.steady_client import steady_client

pytestmark = pytest.mark.root


@pytest.fixture
def lab() -> Iterator[RoutedLab]:
    with RoutedLab() as built:
        yield built


@pytest.mark.parametrize(
    "kind",
    [
        "bird",
        pytest.param("frr", marks=pytest.mark.nightly),
        pytest.param("exabgp", marks=pytest.mark.nightly),
    ],
)
def test_a_router_spreads_flows_over_hosts_that_announce(lab: RoutedLab, kind: str) -> None:
    require("bird", kind)
    with both_serving(lab, {1: kind, 2: kind}) as daemons:
        lab.wait_next_hops(1, 2)
        vips = [VIP] if kind == "frr" else [VIP, VIP6]
        for vip in vips:
            lab.wait_next_hops(1, 2, vip=vip)
            answers = lab.client.send(vip, 80, count=40).all_answered()
            assert answers.sources == {lab_source(n, vip) for n in (1, 2)}, "both hosts forward"
            lab.client.send(vip, 81, timeout=1.0).all_failed("timeout")
        with steady_client(lab.client, VIP, 80) as outcome:
            daemons[1].vipctl("host", "drain", "--reason", "kernel update")
            for vip in vips:
                lab.wait_next_hops(2, vip=vip)
            daemons[1].vipctl("host", "resume")
            lab.wait_next_hops(1, 2)
        # Its route changes twice: a connection that is open at that moment goes on through a host that does
        # not know it.
        assert outcome["failed"].keys() <= {"ConnectionResetError"}, outcome
        assert sum(map(len, outcome["failed"].values())) <= 2, outcome
        assert outcome["answered"] > 0, outcome


def lab_source(number: int, vip: str) -> str:
    return f"fd00:20::{number}" if ":" in vip else f"10.20.0.{number}"
