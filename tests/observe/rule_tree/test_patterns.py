"""Every rule that vipd or kube-proxy writes is known by its form, and the trees of both dataplanes agree with
what was declared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataplane.nftables.declared import OWN, state
from tests.dataplane.states import cluster_cidrs
from tests.lab.examples import examples
from tests.observe.rule_tree.made import forwardings, in_use, read, saved, table
from tests.observe.simulator.cases import CASES, family_of_case, rules_text
from vipd.dataplane.iptables.descriptions import Role
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.options import RuleOptions
from vipd.model.forwarding import Forwarding
from vipd.model.service import Backend, Balance, Family, Protocol, Service, ServicePort
from vipd.observe.rule_tree.expected import SHARE_TOLERANCE
from vipd.observe.rule_tree.iptables_shared import shared_tree
from vipd.observe.rule_tree.iptables_tree import IptablesRules
from vipd.observe.rule_tree.kernel_rules import KernelRules
from vipd.observe.rule_tree.tree import NodeKind, ServiceTree, faults


def unknown_rules(rules: IptablesRules) -> list[str]:
    """Rules in our chains that no form fits."""
    return [
        f"{chain.name} {rule.text}"
        for chain, found in rules.tables.chains.items()
        if rules.names.owns(chain)
        for rule in found
        if rules.parser.parse(chain, rule.text) is None
    ]


def all_faults(rules: IptablesRules) -> list[str]:
    """Whatever is said to be wrong, in the shared chains or those of services."""
    trees = [rules.tree(key) for key in rules.service_ports()]
    reached = {name for tree in trees for name in tree.named(NodeKind.CHAIN)}
    shared = shared_tree(rules, reached)
    return [*faults(shared.nodes), *(fault for tree in trees for fault in faults(tree.nodes))]


@pytest.mark.parametrize("case", CASES)
def test_rules_of_a_real_kube_proxy_are_read_without_a_fault(case: str) -> None:
    rules = read(rules_text(case), "KUBE", family_of_case(case))
    assert unknown_rules(rules) == []
    assert all_faults(rules) == []
    assert rules.service_ports()


@pytest.mark.parametrize("case", CASES)
def test_every_chain_of_a_service_is_in_its_tree(case: str) -> None:
    rules = read(rules_text(case), "KUBE", family_of_case(case))
    trees = [rules.tree(key) for key in rules.service_ports()]
    shown = {name for tree in trees for name in tree.named(NodeKind.CHAIN)}
    own = {chain.name for chain in rules.tables.chains if "-S" in chain.name and len(chain.name) > 20}
    assert own - {"KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL"} <= shown


def shares(tree: ServiceTree, chain: str = "") -> dict[str, float]:
    """The shares of the backends directly below nodes whose name has this in it."""
    found: dict[str, float] = {}
    for node in tree.walk():
        if chain in node.name:
            for child in node.children:
                if child.kind is NodeKind.BACKEND:
                    found[child.name] = found.get(child.name, 0) + (child.share or 0)
    return found


def test_shares_are_those_of_the_whole_ladder() -> None:
    rules = read(rules_text("kube-dns"), "KUBE")
    for key in rules.service_ports():
        found = shares(rules.tree(key), "-SVC-")
        assert sum(found.values()) == pytest.approx(1)
        assert {round(share, 6) for share in found.values()} == {round(1 / len(found), 6)}


def test_a_round_robin_of_unequal_weights_has_its_shares() -> None:
    port = ServicePort(80, Protocol.TCP, "", 8080)
    backends = (Backend("10.244.0.1", weight=3), Backend("10.244.0.2"))
    service = Service("web", ("10.96.0.1",), (port,), backends, balance=Balance.ROUND_ROBIN)
    rules = saved(forwardings([service]), RuleOptions(Family.IPV4))
    found = shares(rules.tree(rules.service_ports()[0]), "-SVC-")
    assert found == pytest.approx({"10.244.0.1:8080": 0.75, "10.244.0.2:8080": 0.25})


def _expected(forwarding: Forwarding) -> dict[str, float]:
    return {str(endpoint): share for endpoint, share in forwarding.shares().items()}


@settings(max_examples=examples(15), deadline=None)
@given(state(), cluster_cidrs, st.sampled_from(["flat", "grouped"]))
def test_iptables_has_what_was_declared(
    services: tuple[Service, ...], cidrs: tuple[str, ...], dispatch: str
) -> None:
    found = forwardings(services, OWN)
    for family in Family:
        own = tuple(cidr for cidr in cidrs if (":" in cidr) == (family is Family.IPV6))
        options = replace(RuleOptions(family), cluster_cidrs=own, dispatch=dispatch)
        here = [forwarding for forwarding in found if forwarding.key.family is family]
        rules = saved(here, options)
        assert unknown_rules(rules) == []
        assert all_faults(rules) == []
        forest = KernelRules([rules], [], in_use(here))
        _, trees = forest.all_trees()
        assert [fault for tree in trees for fault in faults(tree.nodes)] == []


@settings(max_examples=examples(15), deadline=None)
@given(state())
def test_nftables_has_what_was_declared(services: tuple[Service, ...]) -> None:
    found = forwardings(services, OWN)
    for family in Family:
        here = [forwarding for forwarding in found if forwarding.key.family is family]
        reading = table(here, family)
        forest = KernelRules([], [reading], in_use(here, reading.location))
        shared, trees = forest.all_trees()
        assert not here or [fault for tree in shared for fault in faults(tree.nodes)] == []
        assert [fault for tree in trees for fault in faults(tree.nodes)] == []
        by_key = {(tree.key.service_port, tree.key.protocol): tree for tree in trees}
        for forwarding in here:
            key = (forwarding.key.service_port, str(forwarding.key.protocol))
            if forwarding.addresses and not forwarding.externally_exposed and forwarding.endpoints:
                reached = shares(by_key[key])
                number = len(forwarding.addresses)
                for endpoint, share in _expected(forwarding).items():
                    assert abs(reached.get(endpoint, 0) / number - share) <= SHARE_TOLERANCE


FOREIGN = [
    ("SVC-AAAAAAAAAAAAAAAA", "-j RETURN"),
    ("SVC-AAAAAAAAAAAAAAAA", "-j ACCEPT"),
    ("SEP-AAAAAAAAAAAAAAAA", "-p tcp -j DNAT --to-destination 1.2.3.4:5"),
    ("SERVICES", "-s 9.9.9.9/32 -j RETURN"),
    ("SERVICES", "-d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 1.2.3.4:5"),
    ("POSTROUTING", "-j ACCEPT"),
    ("MARK-MASQ", "-j RETURN"),
    ("FW-AAAAAAAAAAAAAAAA", "-j VIPD-EXT-AAAAAAAAAAAAAAAA"),
    ("EXT-AAAAAAAAAAAAAAAA", "-j VIPD-SVC-AAAAAAAAAAAAAAAA -m comment --comment x"),
]


@pytest.mark.parametrize(("chain", "rule"), FOREIGN)
def test_rules_of_others_have_no_form(chain: str, rule: str) -> None:
    rules = read("")
    assert rules.parser.parse(ChainId("nat", f"VIPD-{chain}"), rule) is None


def test_a_rule_of_one_kind_of_chain_is_foreign_in_another() -> None:
    parser = read("").parser
    rule = "-s 10.244.0.1/32 -m comment --comment web -j VIPD-MARK-MASQ"
    parsed = parser.parse(ChainId("nat", "VIPD-SEP-AAAAAAAAAAAAAAAA"), rule)
    assert parsed is not None
    assert parsed.role is Role.PLAIN
    assert parser.parse(ChainId("nat", "VIPD-SVC-AAAAAAAAAAAAAAAA"), rule) is None
    assert parser.parse(ChainId("nat", "KUBE-SEP-AAAAAAAAAAAAAAAA"), rule) is None
