"""What a forwarding says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import ExternalAddress, Family, Masquerade, Protocol, TrafficPolicy

A, B, C = (Endpoint(f"10.0.0.{number}", 80) for number in (1, 2, 3))
PLAIN = Forwarding(
    ForwardingKey("web", "", Protocol.TCP, Family.IPV4), ("10.96.0.1",), 80, (A, B), Masquerade.ALWAYS
)
UDP = ForwardingKey("web", "dns", Protocol.UDP, Family.IPV4)


def test_names() -> None:
    assert (PLAIN.key.service_port, UDP.service_port) == ("web", "web:dns")
    assert (str(A), str(Endpoint("fd00::1", 80)), A.weight) == ("10.0.0.1:80", "[fd00::1]:80", 1)


def test_resets_are_for_tcp_where_flows_end() -> None:
    each = (PLAIN, replace(PLAIN, ends_flows=True), replace(PLAIN, key=UDP, ends_flows=True))
    assert [forwarding.resets_flows for forwarding in each] == [False, True, False]


def test_endpoints_are_counted_once_and_those_under_a_policy_are_its_own() -> None:
    both = replace(
        PLAIN, local_endpoints=(C, A), without_new_flows=(B, C), unavailable=(Endpoint("10.0.0.4", 80),)
    )
    assert PLAIN.reachable() == (A, B)
    assert both.reachable() == (A, B, C)
    assert (PLAIN.endpoint_count(), both.endpoint_count()) == (2, 4)
    assert both.endpoints_under(TrafficPolicy.LOCAL) == (C, A)
    assert both.endpoints_under(TrafficPolicy.CLUSTER) == (A, B)


def test_shares_are_those_of_a_policy_or_else_of_the_internal_one() -> None:
    weighted = replace(PLAIN, endpoints=(A._replace(weight=3), B), local_endpoints=(C,))
    assert weighted.shares() == {A._replace(weight=3): 0.75, B: 0.25}
    assert weighted.shares(TrafficPolicy.LOCAL) == {C: 1.0}
    assert replace(weighted, internal_policy=TrafficPolicy.LOCAL).shares() == {C: 1.0}
    assert (
        replace(weighted, internal_policy=TrafficPolicy.LOCAL).shares(TrafficPolicy.CLUSTER)
        == weighted.shares()
    )


@pytest.mark.parametrize(
    ("forwarding", "work"),
    [
        (PLAIN, 2),
        (replace(PLAIN, addresses=(), endpoints=()), 0),
        (replace(PLAIN, addresses=("10.96.0.1", "10.96.0.2")), 2 * 2 + 1),
        (replace(PLAIN, external_addresses=(ExternalAddress("192.0.2.1", allow_from=("10.0.0.0/8",)),)), 6),
        (replace(PLAIN, endpoints=(A._replace(weight=2), B._replace(weight=4))), 3),
        (replace(PLAIN, endpoints=(A._replace(weight=2), B._replace(weight=2))), 2),
        (replace(PLAIN, endpoints=(A._replace(weight=60_000), B)), 1024),
    ],
)
def test_work_is_the_slots_at_each_frontend_and_what_else_takes_a_rule(
    forwarding: Forwarding, work: int
) -> None:
    assert forwarding.compile_cost() == work
