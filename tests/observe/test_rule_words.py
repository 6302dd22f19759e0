"""Every rule that is compiled has a description, and `explain`, `trace` and `rules` print the same one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataplane.nftables.declared import OWN, state
from tests.dataplane.states import cluster_cidrs
from tests.lab.examples import examples
from tests.observe.explain.test_real_packets import compiled, probes
from tests.observe.rule_tree.made import forwardings, saved, table
from tests.observe.simulator.cases import CASES, GOLDEN, family_of_case
from vipd.cli.offline import Compilation
from vipd.dataplane.iptables.descriptions import describe as describe_iptables
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.render import render as render_rules
from vipd.dataplane.iptables.saved_rules import read_tables
from vipd.dataplane.iptables.words import target_of
from vipd.dataplane.nftables.descriptions import describe as describe_nftables
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.render import render as render_table
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Protocol, Service
from vipd.observe.explain.explanation import Explanation, explain
from vipd.observe.explain.query import ask
from vipd.observe.explain.rule_words import is_vipd_rule
from vipd.observe.live_trace.events import Chain, EventKind, KernelEvent, TraceVerdict
from vipd.observe.live_trace.matched_rules import matched_rules
from vipd.observe.live_trace.matching import ChainRules
from vipd.observe.live_trace.packet_trace import PacketTrace, TraceEvent
from vipd.observe.live_trace.packets import Headers
from vipd.observe.rule_tree.kernel_rules import KernelRules
from vipd.observe.rule_tree.nftables_table import read_table_rules
from vipd.observe.rule_tree.tree import Node, NodeKind
from vipd.observe.simulator import Step


def read(case: str, **own: str) -> tuple[tuple[Service, ...], Compilation, Family]:
    """The services of a golden case and what they compile to, not with kube-proxy's names if not told so."""
    recorded = json.loads((GOLDEN / case / "case.json").read_text())["settings"]
    kept = {key: value for key, value in recorded.items() if key not in ("compat", "chain_prefix")}
    services, compilation = compiled((GOLDEN / case / "manifest.json").read_text(), kept | own)
    return services, compilation, family_of_case(case)


def undescribed(found: Iterable[Forwarding], rules: RuleOptions, options: TableOptions) -> list[str]:
    """The rules of both dataplanes that no description fits."""
    here = [forwarding for forwarding in found if forwarding.key.family is rules.family]
    missing = [
        f"{chain.table} {chain.name}: {rule.text}"
        for chain, listed in read_tables(render_rules(here, rules)).chains.items()
        for rule in listed
        if describe_iptables(chain, rule.text) == rule.text
    ]
    missing += [
        f"{chain}: {rule.text}"
        for chain, listed in read_table_rules(render_table(here, options)).items()
        for rule in listed
        if describe_nftables(chain, rule.text) == rule.text
    ]
    return missing


@pytest.mark.parametrize("own", [{}, {"chain_prefix": "KUBE", "compat": "kube-proxy"}])
@pytest.mark.parametrize("case", CASES)
def test_every_rule_of_a_golden_case_is_described(case: str, own: dict[str, str]) -> None:
    _, compilation, family = read(case, **own)
    options = compilation.options(family), compilation.table_options(family)
    assert undescribed(compilation.forwardings, *options) == []


@settings(max_examples=examples(40), deadline=None)
@given(state(), cluster_cidrs, st.sampled_from(["flat", "grouped"]), st.booleans(), st.booleans())
def test_every_rule_of_any_state_is_described(
    services: tuple[Service, ...], cidrs: tuple[str, ...], dispatch: str, localhost: bool, named: bool
) -> None:
    found = forwardings(services, OWN)
    # Only TCP has flows that a reset ends.
    tcp = [forwarding for forwarding in found if forwarding.key.protocol is Protocol.TCP]
    ended = [replace(forwarding, endpoints=(), frontend_removed=True) for forwarding in tcp]
    for family in Family:
        own = tuple(cidr for cidr in cidrs if (":" in cidr) == (family is Family.IPV6))
        answering = ("192.0.2.1",) if named and family is Family.IPV4 else None
        changes: dict[str, Any] = {
            "cluster_cidrs": own,
            "localhost_node_ports": localhost,
            "node_port_addresses": answering,
        }
        rules = replace(RuleOptions(family), **changes, dispatch=dispatch)
        for each in (found, ended):
            assert undescribed(each, rules, replace(TableOptions(family), **changes)) == []


Texts = dict[tuple[str, str], set[str]]
"""By chain and rule."""


def texts_of_trees(rules: KernelRules) -> Texts:
    """What `vipctl rules` prints of each rule. Of a rule that only leads to a chain, the chain is printed."""
    shared, services = rules.all_trees()
    texts: Texts = {}

    def add(node: Node, chain: str) -> None:
        if node.kind in (NodeKind.RULE, NodeKind.BACKEND, NodeKind.FRONTEND) and node.rule:
            texts.setdefault((chain, node.rule), set()).add(node.text)
        for child in node.children:
            add(child, node.name if node.kind is NodeKind.CHAIN else chain)

    for nodes in (*(tree.nodes for tree in shared), *(tree.nodes for tree in services)):
        for node in nodes:
            add(node, "")
    return texts


def explanations(case: str, nft: bool) -> Iterator[Explanation]:
    """Some packets of a case."""
    services, compilation, family = read(case)
    options = (compilation.table_options if nft else compilation.options)(family)
    for _, to, sender in list(probes(services, family))[::3]:
        query = ask(sender.address(family), str(to), compilation.forwardings, compilation.host_addresses)
        yield explain(query, compilation.forwardings, options, compilation.host_addresses)


def words_of_trace(found: Explanation, steps: tuple[Step, ...], nft: bool) -> list[str]:
    """What `vipctl trace` prints of the steps of a packet."""
    packet = found.packet
    to = packet.destination, packet.port or 0, Protocol(packet.protocol)
    headers = Headers(packet.source, packet.source_port or 0, *to)
    events: list[TraceEvent] = []
    rules: dict[Chain, dict[int, str]] = {}
    for number, step in enumerate(steps):
        family, _, name = step.table.rpartition(" ")
        chain = Chain(family or "ip", name, step.chain)
        rule = step.rule.removeprefix(f"-A {step.chain} ")
        leads = step.element.rpartition(" ")[2] if nft else target_of(rule)
        event = KernelEvent(1, chain, EventKind.RULE, number, TraceVerdict.CONTINUE, leads, 0, headers, 0, 0)
        events.append(TraceEvent(event, headers))
        rules.setdefault(chain, {})[number] = rule
    trace = PacketTrace(headers, True, 0, 0, tuple(events), headers, passed=True)
    listed = {chain: ChainRules(texts, iptables=not nft, ours=True) for chain, texts in rules.items()}
    return [rule.does for rule in matched_rules(trace, listed, "VIPD")]


@pytest.mark.parametrize("nft", [False, True], ids=["iptables", "nftables"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "large-cluster"])
def test_the_three_verbs_say_the_same_of_a_rule(case: str, nft: bool) -> None:
    _, compilation, family = read(case)
    here = [forwarding for forwarding in compilation.forwardings if forwarding.key.family is family]
    if nft:
        trees = texts_of_trees(KernelRules([], [table(here, family)], None))
    else:
        trees = texts_of_trees(KernelRules([saved(here, compilation.options(family))], [], None))
    compared = 0
    for found in explanations(case, nft):
        view: Any = found.view()["outcomes"]
        for outcome, told in zip(found.trace.outcomes, view, strict=True):
            meanings = [rule["meaning"] for rule in told["rules"]]
            traced = words_of_trace(found, outcome.steps, nft)
            for step, meaning, does in zip(outcome.steps, meanings, traced, strict=True):
                rule = step.rule.removeprefix(f"-A {step.chain} ")
                # What a packet found in a map stands behind what the rule does.
                assert not nft or meaning.startswith(describe_nftables(step.chain, rule))
                assert does == meaning if not nft else does.startswith(describe_nftables(step.chain, rule))
                if texts := trees.get((step.chain, rule)):
                    assert any(meaning == text or (nft and meaning.startswith(f"{text}: ")) for text in texts)
                    compared += 1
    assert compared > 3


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
