"""The rules that a traced packet matched, each with its text and what it does. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.words import target_of
from vipd.dataplane.nftables.options import table_name
from vipd.observe.live_trace.events import Chain, Event, Kind, Verdict
from vipd.observe.live_trace.packet_trace import PacketTrace, TraceEvent
from vipd.observe.live_trace.rule_words import (
    chain_role,
    rule_words,
    table_chain_role,
    table_rule_words,
)

UNREADABLE = "a rule that cannot be read"
"""Shown for a rule whose chain no tool could list."""

IPTABLES = frozenset({"raw", "mangle", "nat", "filter", "security"})
"""Tables of iptables."""

_QUOTED = re.compile(r'"[^"]*"')
_NFT_TARGETS = {
    "MASQUERADE": re.compile(r"(?<!jump )(?<!goto )(?<!\S)masquerade(?!\S)"),
    # `ct status snat` is a condition: the statement says to what.
    "SNAT": re.compile(r"(?<!jump )(?<!goto )(?<!\S)snat (?:[\w.]+ )*to "),
    "REJECT": re.compile(r"(?<!jump )(?<!goto )(?<!\S)reject(?!\S)"),
}
_XT_TARGET = re.compile(r'\bxt target "(\w+)"')
"""How nft shows a target of iptables that it cannot say in its own words."""
_COMMENT = re.compile(r' comment "[^"]*"$')


class ChainRules(NamedTuple):
    """What a chain holds. Rules are iptables' text, or nft's."""

    rules: Mapping[int, str]
    """By handle; in legacy tables by number, from 1."""
    policy: str = ""
    """`DROP` or `ACCEPT`, where a legacy chain has one."""
    iptables: bool = True
    """The text is iptables'."""
    ours: bool = False
    """It stands in the table of vipd's nftables dataplane."""


@dataclass(frozen=True, slots=True)
class MatchedRule:
    """One rule that the packet matched, or a policy that dropped it."""

    chain: Chain
    role: str
    """What the chain is for; empty for a chain that is not vipd's."""
    rule: str
    """The rule's text, or `policy DROP`; empty when it cannot be read, or is gone."""
    target: str
    """iptables' word for what the rule does (`MASQUERADE`, `REJECT`), or the chain that it leads to. For a
    rule of nft only where it changes the source or refuses. Empty when it is not known."""
    does: str
    ours: bool
    """It is vipd's."""
    verdict: Verdict
    leads: str
    """The chain that it leads to, if any."""
    destination: str
    """`ip:port` that the packet had for its destination then."""
    mark: int | None = None
    """The packet's mark, where this has changed it."""


def table_of(chain: Chain) -> str:
    """The table as `explain` names it: `nat` for iptables', `ip vipd` for nft's."""
    return chain.table if chain.legacy or _is_iptables(chain) else f"{chain.family} {chain.table}"


def matched_rules(
    trace: PacketTrace, listed: Mapping[Chain, ChainRules], prefix: str, service_port: str = ""
) -> tuple[MatchedRule, ...]:
    """The rules in the order in which the packet matched them; policies only where they drop.

    `prefix` is that of vipd's chains: others of the same form belong to a kube-proxy or another vipd.
    `service_port` is that of the packet's first destination, if it is known: maps do not hold it.
    """
    names = Names(prefix)
    events = tuple(_with_kind(traced, listed.get(traced.event.chain)) for traced in trace.events)
    shown = [traced for traced in events if _is_shown(traced, events, listed, trace.passed)]
    passed = frozenset(traced.event.chain for traced in events)
    before, found = trace.mark, []
    for number, traced in enumerate(shown):
        after = _mark_after(shown, number)
        known = listed.get(traced.event.chain)
        if known is not None and not known.iptables:
            found.append(_table_rule(traced, known, prefix, service_port))
        else:
            found.append(_iptables_rule(traced, known, passed, names))
        if after != before:
            found[-1] = replace(found[-1], mark=after)
        before = after
    return tuple(found)


def chains_of(trace: PacketTrace) -> set[Chain]:
    """The chains to list, so that every matched rule has its text."""
    events = (traced.event for traced in trace.events)
    return {event.chain for event in events if event.kind is not Kind.RETURN or event.chain.legacy}


def _with_kind(traced: TraceEvent, listed: ChainRules | None) -> TraceEvent:
    """Legacy iptables reports some rules as the ends of their chains; their numbers are those of rules."""
    event = traced.event
    if not event.chain.legacy or listed is None or event.rule not in listed.rules:
        return traced
    return TraceEvent(event._replace(kind=Kind.RULE), traced.headers)


def _is_shown(
    traced: TraceEvent, events: tuple[TraceEvent, ...], listed: Mapping[Chain, ChainRules], passed: bool
) -> bool:
    event = traced.event
    if event.kind is not Kind.POLICY:
        return event.kind is Kind.RULE
    if event.chain.legacy:
        # Legacy iptables does not report what a policy is; but it is the last event of a packet.
        known = listed.get(event.chain)
        return not passed and traced is events[-1] and known is not None and known.policy == "DROP"
    return event.verdict is Verdict.DROP


def _mark_after(shown: list[TraceEvent], number: int) -> int:
    """Legacy iptables reports the mark before a rule, so that the next event has the one after it."""
    event = shown[number].event
    if event.chain.legacy and number + 1 < len(shown):
        return shown[number + 1].event.mark
    return event.mark


def _table_rule(traced: TraceEvent, listed: ChainRules, prefix: str, service_port: str) -> MatchedRule:
    """A rule that nft has listed."""
    event, chain = traced.event, traced.event.chain
    rule = _COMMENT.sub("", _text(event, listed))
    ours = listed.ours and chain.table == table_name(prefix)
    does = table_rule_words(rule, traced, service_port) if ours else rule
    role, target = table_chain_role(chain.name) if ours else "", _nft_target(rule)
    return MatchedRule(
        chain, role, rule, target, does, ours, event.verdict, event.leads, traced.headers.receiver
    )


def _nft_target(rule: str) -> str:
    if xt := _XT_TARGET.search(rule):
        return xt[1]
    plain = _QUOTED.sub('""', rule)
    return next((target for target, form in _NFT_TARGETS.items() if form.search(plain)), "")


def _iptables_rule(
    traced: TraceEvent, listed: ChainRules | None, passed: Collection[Chain], names: Names
) -> MatchedRule:
    """A rule that iptables has listed."""
    event, chain = traced.event, traced.event.chain
    rule = _text(event, listed)
    target = target_of(rule)
    leads, verdict = event.leads, event.verdict
    if chain.legacy:
        # The kernel reports every chain that a packet enters; all other names are targets.
        leads = target if chain._replace(name=target) in passed else ""
        verdict = _legacy_verdict(target, event)
    role = chain_role(chain, listed.rules if listed else {}, names)
    ours = bool(role) or names.owns(ChainId(chain.table, leads))
    does = rule_words(chain, rule) if ours and rule else rule
    if listed is None and not rule:
        does = UNREADABLE
    return MatchedRule(chain, role, rule, target, does, ours, verdict, leads, traced.headers.receiver)


def _text(event: Event, listed: ChainRules | None) -> str:
    if event.kind is Kind.POLICY:
        return "policy DROP"
    return listed.rules.get(event.rule, "") if listed else ""


def _legacy_verdict(target: str, event: Event) -> Verdict:
    if event.kind is Kind.POLICY or target in ("DROP", "REJECT"):
        return Verdict.DROP
    return Verdict.ACCEPT if target in ("ACCEPT", "DNAT", "SNAT", "MASQUERADE") else event.verdict


def _is_iptables(chain: Chain) -> bool:
    """Its name is that of one of iptables' tables. A table of nft may have it, too: that does no harm."""
    return chain.table in IPTABLES and chain.family in ("ip", "ip6")
