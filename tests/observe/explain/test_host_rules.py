"""Rules and routes of a host beside vipd's: which of them take part."""

from __future__ import annotations

import pytest

from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.service import Family
from vipd.observe.explain.host_rules import HostState, merged_rules, unreachable
from vipd.observe.explain.rule_words import is_vipd_rule
from vipd.observe.simulator import Ruleset, Step, Tables, parse_ruleset, parse_tables
from vipd.observe.simulator.errors import RulesetError

IPTABLES = "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"
OWN = "table ip vipd {\n\tchain a {\n\t\ttype nat hook prerouting priority dstnat; policy accept;\n\t}\n}\n"
CHAIN = "\tchain forward {\n\t\ttype filter hook forward priority filter; policy drop;\n\t}\n}\n"
TABLES = {
    name: f"table {name} {{\n{CHAIN}" for name in ("inet site", "ip a", "ip6 b", "bridge c", "netdev d")
}


def test_tables_of_the_family_take_part_and_those_below_it_are_named() -> None:
    found = merged_rules(HostState({"nft": IPTABLES}, TABLES), parse_tables(OWN, Family.IPV4), "VIPD")
    assert [type(part) for part in found.parts] == [Tables, Ruleset, Tables, Tables], "inet site, ip a"
    assert found.left_out == ("bridge c", "netdev d")


def test_with_iptables_vipd_is_among_the_rules_of_the_host() -> None:
    own = parse_ruleset(IPTABLES, Family.IPV4)
    assert len(merged_rules(HostState({"nft": IPTABLES, "legacy": IPTABLES}), own, "VIPD").parts) == 2
    with pytest.raises(RulesetError, match="the kernel has no rules of iptables"):
        merged_rules(HostState(), own, "VIPD")
    table = parse_tables(OWN, Family.IPV4)
    assert merged_rules(HostState(), table, "VIPD").parts == [table]


def test_what_cannot_be_read_is_an_error_that_names_it() -> None:
    with pytest.raises(RulesetError, match="could not be read: a; b"):
        merged_rules(HostState(unread=("a", "b")), parse_tables(OWN, Family.IPV4), "VIPD")
    with pytest.raises(RulesetError, match=r"iptables \(nft\): \*nonsense"):
        merged_rules(HostState({"nft": "*nonsense"}), parse_tables(OWN, Family.IPV4), "VIPD")


@pytest.mark.parametrize(
    ("backends", "found"),
    [
        (["10.0.0.1:80"], ["10.0.0.1"]),
        (["10.0.0.1"], ["10.0.0.1"]),
        (["[fd00::1]:80"], ["fd00::1"]),
        (["10.0.0.11:80", "10.0.0.2:80"], []),
    ],
)
def test_backends_without_a_route(backends: list[str], found: list[str]) -> None:
    devices = {"10.0.0.1": "", "fd00::1": "", "10.0.0.2": "eth0", "10.0.0.9": ""}
    assert unreachable(backends, devices) == found


@pytest.mark.parametrize(
    ("step", "iptables", "nftables"),
    [
        (Step("nat", "VIPD-SERVICES", "-A VIPD-SERVICES -j VIPD-SVC-X"), True, False),
        (Step("filter", "INPUT", "-A INPUT -j VIPD-NODE-PORTS"), True, False),
        (Step("filter", "INPUT", "-A INPUT -j DROP"), False, False),
        (Step("filter", "FORWARD", "policy DROP"), False, False),
        (Step("ip vipd", "dispatch", "drop"), False, True),
        (Step("inet site", "forward", "policy drop"), False, False),
    ],
)
def test_whose_rule_a_step_is(step: Step, iptables: bool, nftables: bool) -> None:
    found = [is_vipd_rule(step, each) for each in (RuleOptions(Family.IPV4), TableOptions(Family.IPV4))]
    assert found == [iptables, nftables]
