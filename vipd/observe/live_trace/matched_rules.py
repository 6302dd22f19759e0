"""Describes the rules that a traced packet matched: the roles of chains, and the effects of rules. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_network
from itertools import pairwise

from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.words import split_words
from vipd.dataplane.nftables.chains import limits_sources
from vipd.dataplane.nftables.options import table_name
from vipd.observe.explain.rule_words import step_words
from vipd.observe.live_trace.events import Chain, TraceVerdict
from vipd.observe.live_trace.matching import BUILT_IN, IPTABLES, ChainRules, RuleMatch, match_rules
from vipd.observe.live_trace.packet_trace import PacketTrace
from vipd.observe.simulator import Step

UNREADABLE = "a rule that cannot be read"
"""Shown for a rule whose chain no tool could list."""

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
    "LIM": "limits",
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
_LIMIT = re.compile(r"vmap @allowed_(\d+)")
_SERVICE = re.compile(
    r"(?P<name>\S+) (?:->.*|cluster IP|external IP|loadbalancer IP|has no .*|traffic not accepted by .*)"
)


@dataclass(frozen=True, slots=True)
class MatchedRule:
    """One rule that the packet matched, or a policy that dropped it."""

    chain: Chain
    role: str
    """The role of the chain; empty for a chain that is not vipd's."""
    rule: str
    """As `Match` has it, and so are `target`, `verdict`, `leads` and `mark`."""
    target: str
    does: str
    """The effect of the rule, in words; the text of a rule that is not vipd's."""
    ours: bool
    """It is vipd's."""
    verdict: TraceVerdict
    jump_target: str
    destination: str
    """`ip:port` that the packet had for its destination then."""
    mark: int | None = None
    number: int = 0
    """Its handle; 0 for a policy."""
    hook: str = ""
    """Where in the kernel: `prerouting`, `input`, `forward`, `output`, `postrouting`; empty if unknown."""


def matched_rules(
    trace: PacketTrace, listed: Mapping[Chain, ChainRules], prefix: str, service_port: str = ""
) -> tuple[MatchedRule, ...]:
    """The rules in the order in which the packet matched them, in words.

    `prefix` is that of vipd's chains: others of the same form belong to a kube-proxy or another vipd.
    `service_port` is that of the packet's first destination, if it is known: maps do not contain it.
    """
    names, hook, found = Names(prefix), "", []
    for match in match_rules(trace, listed):
        rule = _of_table(match, prefix, service_port) if match.of_nft else _of_iptables(match, names)
        hook = _hook(match, hook)
        found.append(replace(rule, hook=hook))
    return tuple(found)


def _hook(match: RuleMatch, before: str) -> str:
    """The hook of a match: that of its base chain, which the packet entered by a rule that matched before."""
    chain = match.chain
    if chain.table in IPTABLES and chain.name in BUILT_IN:
        return chain.name.lower()
    if match.listed is None:
        return ""
    return match.listed.hook or before


def _of_table(match: RuleMatch, prefix: str, service_port: str) -> MatchedRule:
    ours = match.listed is not None and match.listed.ours and match.chain.table == table_name(prefix)
    does = _table_words(match, service_port) if ours else match.rule
    return _matched(match, table_chain_role(match.chain.name) if ours else "", does, ours)


def _of_iptables(match: RuleMatch, names: Names) -> MatchedRule:
    chain, rule = match.chain, match.rule
    role = chain_role(chain, match.listed.rules if match.listed else {}, names)
    ours = bool(role) or names.owns(ChainId(chain.table, match.jump_target))
    does = step_words(Step(chain.table, chain.name, rule)) if ours and rule else rule
    return _matched(match, role, does if rule or match.listed else UNREADABLE, ours)


def _matched(match: RuleMatch, role: str, does: str, ours: bool) -> MatchedRule:
    destination = match.traced.headers.receiver
    return MatchedRule(
        match.chain, role, match.rule, match.target, does, ours,
        match.verdict, match.jump_target, destination, match.mark, match.traced.event.rule,
    )  # fmt: skip


def chain_role(chain: Chain, rules: Mapping[int, str], names: Names) -> str:
    """The role of a chain of the iptables dataplane, with its service or backend; empty for a foreign one.

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


def table_chain_role(name: str) -> str:
    """The role of a chain of the nftables dataplane."""
    if name in _NFT_ROLES:
        return _NFT_ROLES[name]
    if limits_sources(name):
        return "source limits"
    if name.startswith(("limits-", "over-")):
        return "limits"
    if name.startswith(("gate-", "edge-")):
        return {"gate": "node port", "edge": "from outside"}[name.partition("-")[0]]
    return (
        "masquerade" if name.startswith(("always-", "forwarded-", "off-cluster-", "hairpin-")) else "backends"
    )


def _table_words(match: RuleMatch, service_port: str) -> str:
    """Describes a rule of the nftables dataplane. The kernel does not report which element of a map matched:
    the packet's destination shows it."""
    chain = match.chain
    step = Step(f"{chain.family} {chain.table}", chain.name, match.rule, element=_element(match))
    return step_words(step, service_port)


def _element(match: RuleMatch) -> str:
    """The element of a map or set that a rule must have matched, as far as the packet shows it."""
    rule, headers, limit = match.rule, match.traced.headers, _LIMIT.search(match.rule)
    if "map @frontends" in rule:
        return f"{headers.destination} . {headers.protocol} . {headers.port}"
    if "vmap @handlers" in rule:
        return f"goto {match.jump_target}"
    if limit:
        return str(ip_network(f"{headers.source}/{limit[1]}", strict=False).network_address)
    if "vmap @" in rule:
        return f"{headers.protocol} . {headers.port}"
    return "" if " map @" in rule else headers.destination
