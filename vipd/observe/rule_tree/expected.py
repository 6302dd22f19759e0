"""The daemon's view of services, and the comparison of the kernel's trees with it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vipd.model.service import Family, Frontend, Protocol, TrafficPolicy
from vipd.observe.rule_tree.tree import Node, NodeKind, ServicePortKey, ServiceTree

SHARE_TOLERANCE = 0.0101
"""Maximum difference of a share: with nftables shares are whole numbers of slots."""
NOT_EXPECTED = "vipd means no new flows to go there"
_FAMILIES = {str(family): family for family in Family}


@dataclass(frozen=True, slots=True)
class Expected:
    """One service port in one family as the daemon wants it."""

    service: str
    key: ServicePortKey
    family: Family
    frontends: tuple[str, ...]
    addresses: tuple[str, ...]
    shares: Mapping[str, float]
    """By `ADDRESS:PORT`, for the backends that take new flows."""
    chains: Mapping[str, str]
    """The kernel's name for each backend, if known also for those that take no new flows now."""
    comparable: bool
    """All traffic is spread alike, so that there is one share for each backend."""
    state: str
    """The service's: `ok`, `degraded`, `no-backends`, `pending` or `quarantined`."""
    message: str


def expected_of(view: Mapping[str, Any]) -> list[Expected]:
    """Each forwarding of a ServiceView of docs/api.md."""
    return [_read_expected(view, forwarding) for forwarding in view["forwardings"]]


def _read_expected(view: Mapping[str, Any], forwarding: Mapping[str, Any]) -> Expected:
    protocol = str(forwarding["protocol"])
    places = [str(place) for place in (*forwarding["frontends"], *forwarding.get("external", ()))]
    node_port = forwarding.get("node_port")
    on_host = [str(Frontend("", int(node_port), Protocol(protocol)))] if node_port else []
    policies = set(forwarding.get("traffic_policy", {}).values())
    endpoints = forwarding["endpoints"]
    return Expected(
        str(view["name"]),
        ServicePortKey(str(forwarding["name"]), protocol),
        _FAMILIES[str(forwarding["family"])],
        (*places, *on_host),
        tuple(place.rpartition(":")[0].strip("[]") for place in places),
        {str(e["endpoint"]): float(e["share"] or 0) for e in endpoints if e["ready"]},
        {str(e["endpoint"]): str(e["chain"]) for e in endpoints},
        comparable=str(TrafficPolicy.LOCAL) not in policies,
        state=str(view["status"]["state"]),
        message=str(view["status"]["message"]),
    )


def compare(tree: ServiceTree, expected: Expected) -> ServiceTree:
    """The tree with its missing parts added, and a fault on each unexpected node."""
    shares = _shares_found(tree)
    nodes = [_with_faults(node, expected, shares) for node in tree.nodes]
    return tree.with_nodes([*nodes, *_missing(tree, expected)])


def missing_tree(expected: Expected, place: str) -> ServiceTree:
    """The tree of a service port of which the kernel has nothing."""
    empty = ServiceTree(expected.key, expected.family, place, ())
    return empty.with_nodes(_missing(empty, expected))


def _shares_found(tree: ServiceTree) -> Mapping[str, float]:
    """The share of each backend in the probability chain that has the most steps."""
    chains: list[dict[str, float]] = []
    for node in tree.walk():
        shares: dict[str, float] = defaultdict(float)
        for child in node.children:
            if child.kind is NodeKind.BACKEND and child.share is not None:
                shares[child.name] += child.share
        chains.append(shares)
    return max(chains, key=len, default={})


def _with_faults(node: Node, expected: Expected, shares: Mapping[str, float]) -> Node:
    children = tuple(_with_faults(child, expected, shares) for child in node.children)
    fault = node.fault
    if node.kind is NodeKind.BACKEND and not fault:
        fault = _fault_of(node.name, expected, shares)
    return replace(node, fault=fault, children=children) if fault or children else node


def _fault_of(endpoint: str, expected: Expected, shares: Mapping[str, float]) -> str:
    if endpoint not in expected.shares:
        return NOT_EXPECTED
    meant, found = expected.shares[endpoint], shares.get(endpoint)
    if expected.comparable and found is not None and abs(found - meant) > SHARE_TOLERANCE:
        return f"vipd means it to have {100 * meant:.1f}%, not {100 * found:.1f}%"
    return ""


def _missing(tree: ServiceTree, expected: Expected) -> Sequence[Node]:
    frontends, backends = set(tree.named(NodeKind.FRONTEND)), set(tree.named(NodeKind.BACKEND))
    nodes = [
        Node(NodeKind.MISSING, f"frontend {frontend}", frontend, fault="the kernel has nothing for it")
        for frontend in expected.frontends
        if frontend not in frontends
    ]
    nodes += [
        Node(
            NodeKind.MISSING,
            f"backend {endpoint}",
            expected.chains.get(endpoint, ""),
            fault="no share of new flows",
        )
        for endpoint in expected.shares
        if endpoint not in backends
    ]
    return nodes
