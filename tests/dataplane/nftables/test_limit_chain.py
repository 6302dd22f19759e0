"""The chains and sets that limit the flows of a service."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vipd.dataplane.nftables.balance_chain import BalanceChain
from vipd.dataplane.nftables.chains import RejectChain
from vipd.dataplane.nftables.limit_chain import LimitChain, OverLimitChain
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.flow_limits import FlowLimits, Limit
from vipd.model.service import Balance, Family

LIMITS = FlowLimits(
    new_per_client=3,
    client_burst=100,
    connections_per_client=2,
    new_per_second=7,
    connections=9,
    client_ipv6_prefix=56,
)
CHAIN = LimitChain(LIMITS, RejectChain(), BalanceChain(2, Balance.RANDOM))
IPV4, IPV6 = TableOptions(Family.IPV4), TableOptions(Family.IPV6)


def test_each_limit_is_one_rule_between_the_number_of_the_service_and_the_next_chain() -> None:
    assert CHAIN.rules(IPV4) == (
        "ip daddr set ct original ip daddr . meta l4proto . th dport map @services",
        (
            "update @new_per_client_3_100 { ip daddr . ip saddr timeout 67s"
            " limit rate over 3/second burst 100 packets } goto over-new_per_client-refuse"
        ),
        (
            "add @connections_per_client_2 { ip daddr . ip saddr ct count over 2 }"
            " goto over-connections_per_client-refuse"
        ),
        (
            "update @new_per_second_7_7 { ip daddr timeout 10s limit rate over 7/second burst 7 packets }"
            " goto over-new_per_second-refuse"
        ),
        "add @connections_9 { ip daddr ct count over 9 } goto over-connections-refuse",
        "ip daddr set ct original ip daddr goto random-2",
    )


@pytest.mark.parametrize(
    ("length", "client"),
    [(56, "ip6 saddr & ffff:ffff:ffff:ff00::"), (128, "ip6 saddr"), (32, "ip6 saddr & ffff:ffff::")],
)
def test_an_ipv6_client_is_a_prefix(length: int, client: str) -> None:
    chain = replace(CHAIN, limits=replace(LIMITS, client_ipv6_prefix=length))
    _, rate, connections, *_ = chain.rules(IPV6)
    assert f"ip6 daddr . {client} timeout" in rate
    assert f"ip6 daddr . {client} ct count" in connections


def test_the_name_of_a_chain_changes_with_its_limits() -> None:
    """A chain is written anew under another name; one of 16 digits is short enough for a message, and
    nobody finds limits that have those of another's."""
    names = {replace(CHAIN, limits=replace(LIMITS, connections=n)).name for n in range(100)}
    assert len(names) == 100
    assert all(name.startswith("limits-") and name.endswith("-random-2") for name in names)
    assert {len(name) for name in names} == {len("limits-1234567812345678-random-2")}


def test_the_sets_count_clients_where_a_limit_is_for_each() -> None:
    found = {each.name: (len(each.key), each.dynamic_flags) for each in CHAIN.sets()}
    assert found == {
        "new_per_client_3_100": (2, "dynamic,timeout"),
        "connections_per_client_2": (2, "dynamic"),
        "new_per_second_7_7": (1, "dynamic,timeout"),
        "connections_9": (1, "dynamic"),
    }


def test_a_flow_over_a_limit_is_counted_where_the_kernel_can_and_refused() -> None:
    over = OverLimitChain(Limit.CONNECTIONS, RejectChain())
    refusal = RejectChain().rules(IPV4)
    count = "update @refused_connections { ct original ip daddr . meta l4proto . th dport counter }"
    assert over.rules(IPV4) == (count, *refusal)
    assert over.rules(replace(IPV4, counts=False)) == refusal
    assert over.targets() == ()
    assert [each.name for each in over.sets()] == ["refused_connections"]
