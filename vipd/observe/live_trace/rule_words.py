"""Words for the rules that a packet matched: what vipd's chains are for, and what their rules do. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_network
from itertools import pairwise

from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.words import split_words
from vipd.dataplane.nftables.chains import limits_sources
from vipd.observe.explain.rule_words import words_for_rule
from vipd.observe.live_trace.events import Chain
from vipd.observe.live_trace.packet_trace import TraceEvent
from vipd.observe.simulator import Step

_ROLES = {
    "SERVICES": "dispatch",
    "GRP": "dispatch",
    "PREROUTING": "entry",
    "POSTROUTING": "postrouting",
    "NODEPORTS": "node ports",
    "MARK-MASQ": "mark",
    "MARK-OFF-CLUSTER": "mark",
    "EXTERNAL-SERVICES": "from outside",
    "PROXY-FIREWALL": "source limits",
    "UNUSED": "unused ports",
    "FORWARD": "forwarding",
    "FIREWALL": "firewall",
    "PROBE": "probe",
    "SVC": "service",
    "SVL": "local policy",
    "EXT": "from outside",
    "FW": "source limits",
    "SEP": "backend",
}
_NFT_ROLES = {
    "prerouting": "entry",
    "output": "entry",
    "input": "entry",
    "dispatch": "dispatch",
    "handover": "dispatch",
    "unused": "unused ports",
    "counting": "counters",
    "postrouting": "postrouting",
    "refuse": "refusal",
    "silence": "refusal",
    "silence-reset": "refusal",
    "removed": "refusal",
    "node-removed": "refusal",
}
_SLOT_CHOICE = re.compile(r"\bip6? daddr set (?:numgen|jhash)\b")
_LIMIT = re.compile(r"vmap @allowed_(\d+)")
_SERVICE = re.compile(
    r"(?P<name>\S+) (?:->.*|cluster IP|external IP|loadbalancer IP|has no .*|traffic not accepted by .*)"
)


def chain_role(chain: Chain, rules: Mapping[int, str], names: Names) -> str:
    """What a chain of the iptables dataplane is for, with its service or backend; empty for one of others.

    `rules` are its own, as far as they are known."""
    here = ChainId(chain.table, chain.name)
    if not names.owns(here):
        return ""
    kind = chain.name.removeprefix(f"{names.prefix}-")
    if names.is_fixed(here):
        return _ROLES[kind]
    kind = kind.partition("-")[0]
    about = _backend(rules) if kind == "SEP" else _service(rules) if kind != "GRP" else ""
    return f"{_ROLES[kind]} {about}".rstrip()


def _service(rules: Mapping[int, str]) -> str:
    """The service of a chain, by the comments of its rules."""
    comments = (rule_comment(rule) for rule in rules.values())
    return next((found["name"] for comment in comments if (found := _SERVICE.fullmatch(comment))), "")


def _backend(rules: Mapping[int, str]) -> str:
    targets = (rule.partition(" --to-destination ")[2] for rule in rules.values())
    return next((target.partition(" ")[0] for target in targets if target), "")


def rule_comment(rule: str) -> str:
    """The comment of a rule of iptables, or nothing."""
    try:
        words = split_words(rule)
    except ValueError:
        return ""
    return next((after for word, after in pairwise(words) if word == "--comment"), "")


def rule_words(chain: Chain, rule: str) -> str:
    """What a rule of the iptables dataplane does."""
    words = words_for_rule(Step(chain.table, chain.name, f"-A {chain.name} {rule}", rule_comment(rule)))
    return f"{words}, kept for this client" if " --rcheck " in rule else words


def table_chain_role(name: str) -> str:
    """What a chain of the nftables dataplane is for."""
    if name in _NFT_ROLES:
        return _NFT_ROLES[name]
    if limits_sources(name):
        return "source limits"
    if name.startswith(("gate-", "edge-")):
        return {"gate": "node port", "edge": "from outside"}[name.partition("-")[0]]
    return (
        "masquerade" if name.startswith(("always-", "forwarded-", "off-cluster-", "hairpin-")) else "backends"
    )


def table_rule_words(rule: str, traced: TraceEvent, service_port: str) -> str:
    """What a rule of the nftables dataplane does. The kernel does not report which element of a map matched:
    it follows from where the packet goes."""
    chain = traced.event.chain
    if _SLOT_CHOICE.search(rule) and " map @" not in rule:
        return "a slot is chosen"
    element = _element(rule, traced)
    return words_for_rule(
        Step(f"{chain.family} {chain.table}", chain.name, rule, element=element), service_port
    )


def _element(rule: str, traced: TraceEvent) -> str:
    """The element of a map or set that a rule must have matched, as far as the packet shows it."""
    headers, limit = traced.headers, _LIMIT.search(rule)
    if "map @frontends" in rule:
        return f"{headers.destination} . {headers.protocol} . {headers.port}"
    if "vmap @handlers" in rule:
        return f"goto {traced.event.leads}"
    if limit:
        return str(ip_network(f"{headers.source}/{limit[1]}", strict=False).network_address)
    if "vmap @" in rule:
        return f"{headers.protocol} . {headers.port}"
    return "" if " map @" in rule else headers.destination
