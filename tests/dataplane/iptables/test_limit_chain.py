"""The rules of a LIM chain, as iptables-save prints them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dataplane.declared import numbered
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.iptables.limit_chain import limit_rules, stored_rate
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.render import render
from vipd.model.flow_limits import FlowLimits
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family, Masquerade, Protocol

LIMITS = FlowLimits(
    new_per_client=3,
    client_burst=100,
    connections_per_client=2,
    new_per_second=3000,
    burst=4000,
    connections=9,
    client_ipv6_prefix=56,
)


def rules(family: Family, limits: FlowLimits) -> list[str]:
    key = ForwardingKey("web", "http", Protocol.TCP, family)
    return [*limit_rules(key, limits, "VIPD-LIM-X")]


def test_each_limit_is_one_rule_in_their_order() -> None:
    per_client, connections_per_client, rate, connections = rules(Family.IPV4, LIMITS)
    assert per_client == (
        '-m comment --comment "web:http over new_per_client" -m hashlimit --hashlimit-above 3/sec '
        "--hashlimit-burst 100 --hashlimit-mode srcip --hashlimit-name VIPD-LIM-X-client-3-100 "
        "--hashlimit-htable-max 65536 --hashlimit-htable-expire 67000 -j ACCEPT"
    )
    assert connections_per_client == (
        '-m comment --comment "web:http over connections_per_client" -m connlimit '
        "--connlimit-above 2 --connlimit-mask 32 --connlimit-saddr -j ACCEPT"
    )
    assert rate == (
        '-m comment --comment "web:http over new_per_second" -m hashlimit --hashlimit-above 3003/sec '
        "--hashlimit-burst 4000 --hashlimit-name VIPD-LIM-X-all-3000-4000 "
        "--hashlimit-htable-max 65536 --hashlimit-htable-expire 10000 -j ACCEPT"
    )
    assert connections == (
        '-m comment --comment "web:http over connections" -m connlimit '
        "--connlimit-above 9 --connlimit-mask 0 --connlimit-saddr -j ACCEPT"
    )


@pytest.mark.parametrize(("length", "mask"), [(56, " --hashlimit-srcmask 56"), (128, "")])
def test_an_ipv6_client_is_a_prefix_and_the_table_of_rates_has_it_in_its_name(length: int, mask: str) -> None:
    limits = FlowLimits(
        new_per_client=3, connections_per_client=2, new_per_second=7, client_ipv6_prefix=length
    )
    per_client, connections_per_client, rate = rules(Family.IPV6, limits)
    assert f"--hashlimit-name VIPD-LIM-X-client-3-3-{length} " in per_client
    assert per_client.endswith(f"--hashlimit-htable-expire 10000{mask} -j ACCEPT")
    assert f"--connlimit-mask {length} " in connections_per_client
    assert "--hashlimit-name VIPD-LIM-X-all-7-7 " in rate, "all clients together have no prefix"
    assert "srcmask" not in rate


@pytest.mark.parametrize(
    ("asked", "stored"), [(1, 1), (1000, 1000), (1001, 1001), (3000, 3003), (70000, 71428)]
)
def test_the_rate_that_the_kernel_prints(asked: int, stored: int) -> None:
    assert stored_rate(asked) == stored


@pytest.mark.parametrize("limits", [True, False])
def test_a_kernel_that_cannot_limit_gets_no_rule_for_it(limits: bool) -> None:
    """Neither the chain nor jumps to it."""
    service = replace(numbered(1, "10.244.0.1"), limits=LIMITS)
    policy = SelectionPolicy(dict.fromkeys(Family, Masquerade.HAIRPIN))
    text = render(select_backends(service, policy), replace(RuleOptions(Family.IPV4), limits=limits))
    assert (":VIPD-LIM-" in text, "-j VIPD-LIM-" in text, "connlimit" in text) == (limits,) * 3
