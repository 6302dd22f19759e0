"""Every rule that vipd or kube-proxy writes is known and has words, the same ones that `explain` has; and the
kernel's trees hold what was declared, in both dataplanes."""

from __future__ import annotations

import json
import re
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dataplane.nftables.declared import OWN, state
from tests.dataplane.states import cluster_cidrs
from tests.lab.examples import examples
from tests.lab.inside import DATAPLANES, written
from tests.observe.explain.asking import CASES, Declared, Json, family_of_case, golden, rules_text
from tests.observe.explain.probes import on_the_host, probes
from tests.observe.explain.test_dataplanes_agree import sound
from tests.observe.rule_tree.kernel_rules import KernelRules, faults, nodes
from tests.observe.rule_tree.test_drawings import graphviz
from vipd.model.service import Family, Service

pytestmark = pytest.mark.root


def undescribed(found: Json) -> list[str]:
    """The rules of vipd that are shown as the kernel has them."""
    trees = (*found["shared"], *found["services"])
    return [node["rule"] for node in nodes(trees, "rule") if node["text"] == node.get("rule")]


def shares(found: Json, service_port: str) -> dict[str, float]:
    """The share of each backend of a service port in the chain that spreads over the most."""
    chains: defaultdict[str, dict[str, float]] = defaultdict(dict)
    trees = [tree for tree in found["services"] if tree["service_port"] == service_port]
    for node in nodes(trees, "backend"):
        chains[node["in"]][node["name"]] = chains[node["in"]].get(node["name"], 0) + (node["share"] or 0)
    return max(chains.values(), key=len, default={})


def case_of(case: str, dataplane: str) -> tuple[tuple[Service, ...], Declared]:
    """A case with kube-proxy's names, or for nftables, which has no such form, with vipd's."""
    own: dict[str, object] = {"compat": None, "chain_prefix": None, "dataplane": dataplane}
    recorded = golden(case, **(own if dataplane == "nftables" else {}))
    return on_the_host(recorded.text, dict(recorded.settings))


@pytest.mark.parametrize("dataplane", DATAPLANES)
@pytest.mark.parametrize("case", CASES)
def test_cases_of_kube_proxy(kernel: KernelRules, case: str, dataplane: str) -> None:
    services, declared = case_of(case, dataplane)
    family = family_of_case(case)
    # The rules of iptables are those that a real kube-proxy wrote.
    rules = rules_text(case) if dataplane == "iptables" else declared.render(family, dataplane)
    kernel.load(rules, family=family)
    kernel.meant(declared)
    found = kernel.rules("--all")
    assert (faults(found), undescribed(found)) == ([], [])
    graphviz("canon", kernel.vipctl("--all", "--format", "dot").out)
    assert {tree["service_port"].partition(":")[0] for tree in found["services"]} == {
        s.name for s in services
    }
    if dataplane == "iptables":
        shown = {node["name"] for node in nodes(found["services"], "chain")}
        chains = {line.split()[0][1:] for line in rules_text(case).splitlines() if line.startswith(":")}
        own = {chain for chain in chains if "-S" in chain and len(chain) > 20}
        assert own - {"KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL"} <= shown
    if case != "large-cluster":
        assert compared_with_explain(services, declared, dataplane, family, found) > 2


def compared_with_explain(
    services: tuple[Service, ...], declared: Declared, dataplane: str, family: Family, found: Json
) -> int:
    """How many rules on the ways of packets have the words of the tree; AssertionError where not."""
    words: defaultdict[str, set[str]] = defaultdict(set)
    for node in nodes((*found["shared"], *found["services"]), "rule", "backend", "frontend", "chain"):
        words[node["in"]].add(node["text"])
    same = 0
    for _, to, sender in list(probes(services, family))[::3]:
        for outcome in declared.explain(sender.address(family), str(to), dataplane)["outcomes"]:
            for rule in (rule for rule in outcome["rules"] if rule["chain"] in words):
                # Of a rule that only leads to a chain, the tree shows the chain.
                if not rule["meaning"].startswith("on to "):
                    texts = tuple(words[rule["chain"]])
                    # What a packet met in a map stands behind what the rule does.
                    meaning = re.sub(r"\{ (\S+) \}", r"\1", rule["meaning"])  # the kernel's set of one
                    assert meaning.startswith(texts), (rule["chain"], meaning, texts)
                    same += 1
    return same


@pytest.mark.parametrize("dataplane", DATAPLANES)
@settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    services=state(),
    own=st.fixed_dictionaries(
        {
            "cluster_cidrs": cluster_cidrs,
            "dispatch": st.sampled_from(["flat", "grouped"]),
            "localhost_node_ports": st.booleans(),
        },
        optional={"node_port_addresses": st.just(["192.0.2.0/24"])},
    ),
)
def test_any_services(
    kernel: KernelRules, dataplane: str, services: tuple[Service, ...], own: dict[str, object]
) -> None:
    own = own | {"host_addresses": [*OWN, "192.0.2.1"], "dataplane": dataplane}
    services = sound(services)
    declared = Declared(written(services), own)
    kernel.load()
    for family in Family:
        kernel.add(declared.render(family, dataplane), family)
    kernel.meant(declared)
    found = kernel.rules("--all")
    # The daemon says the shares that it means; what differs by more is a fault.
    assert (faults(found), undescribed(found)) == ([], [])
    assert {tree["service_port"].partition(":")[0] for tree in found["services"]} == {
        s.name for s in services
    }


def test_turns_of_unequal_weights_have_their_shares(kernel: KernelRules) -> None:
    text = """
apiVersion: vipd/v1
services:
  - name: web
    address: 10.96.0.1
    ports: [{port: 80, protocol: tcp, target: 8080}]
    backends: [{address: 10.244.0.1, weight: 3}, 10.244.0.2, 10.244.0.3]
    balance: BALANCE
"""
    kernel.meant(None)
    for balance in ("random", "round-robin"):
        declared = Declared(text.replace("BALANCE", balance), {"host_addresses": ["192.0.2.1"]})
        kernel.load(declared.render(Family.IPV4))
        expected = {"10.244.0.1:8080": 0.6, "10.244.0.2:8080": 0.2, "10.244.0.3:8080": 0.2}
        assert shares(kernel.rules("web"), "web") == pytest.approx(expected, abs=1e-5)


def test_of_a_large_table_only_what_is_asked_for_is_read(kernel: KernelRules) -> None:
    """Just as if all had been. It is large by the chains of somebody else."""
    some = [
        f"  - {{name: s{n}, address: 10.96.0.{n + 1}, ports: 80, backends: [10.244.0.{n}, 10.245.0.{n}]}}\n"
        for n in range(10)
    ]
    declared = Declared("apiVersion: vipd/v1\nservices:\n" + "".join(some), {"host_addresses": ["192.0.2.1"]})
    chains = "".join(f":OTHER-{n} - [0:0]\n" for n in range(3000))
    kernel.load(declared.render(Family.IPV4).replace("*nat\n", f"*nat\n{chains}"))
    kernel.meant(None)
    part, whole = kernel.vipctl("10.96.0.8:80/tcp", "-o", "json"), kernel.vipctl("--all", "-o", "json")
    assert "reading every ipv4 rule of a large table" in whole.err
    assert "reading every" not in part.err
    trees = [json.loads(ended.out)["rules"]["services"] for ended in (part, whole)]
    (alone,) = trees[0]
    assert alone["service_port"] == "s7"
    assert alone == next(tree for tree in trees[1] if tree["service_port"] == "s7")
