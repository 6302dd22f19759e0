"""Finds the text of the rules that a traced packet matched, among the rules that the kernel lists. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from vipd.dataplane.iptables.words import target_of
from vipd.observe.live_trace.events import Chain, EventKind, KernelEvent, TraceVerdict
from vipd.observe.live_trace.packet_trace import PacketTrace, TraceEvent

IPTABLES = frozenset({"raw", "mangle", "nat", "filter", "security"})
"""Tables of iptables."""

BUILT_IN = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})
"""Base chains of iptables, named after their hooks."""

_QUOTED = re.compile(r'"[^"]*"')
_NFT_TARGETS = {
    "MASQUERADE": re.compile(r"(?<!jump )(?<!goto )(?<!\S)masquerade(?!\S)"),
    # `ct status snat` is a condition: only the statement has a `to`.
    "SNAT": re.compile(r"(?<!jump )(?<!goto )(?<!\S)snat (?:[\w.]+ )*to "),
    "REJECT": re.compile(r"(?<!jump )(?<!goto )(?<!\S)reject(?!\S)"),
}
_XT_TARGET = re.compile(r'\bxt target "(\w+)"')
"""nft's form of a target of iptables that it cannot express itself."""
_COMMENT = re.compile(r' comment "[^"]*"$')


class ChainRules(NamedTuple):
    """The content of a chain. Rules are iptables' text, or nft's."""

    rules: Mapping[int, str]
    """By handle; in legacy tables by number, from 1."""
    policy: str = ""
    """`DROP` or `ACCEPT`, where a legacy chain has one."""
    iptables: bool = True
    """The text is iptables'."""
    ours: bool = False
    """It is in the table of vipd's nftables dataplane."""
    hook: str = ""
    """`prerouting` and so on, of a base chain of nft; empty for another."""


class RuleMatch(NamedTuple):
    """One rule that the packet matched, or a policy that dropped it."""

    traced: TraceEvent
    listed: ChainRules | None
    """The content of its chain; None if no tool could list it."""
    rule: str
    """The rule's text, or `policy DROP`; empty if it cannot be read, or is gone."""
    target: str
    """iptables' word for the action (`MASQUERADE`, `REJECT`), or the chain that it leads to. For a
    rule of nft only if it changes the source or refuses. Empty if unknown."""
    verdict: TraceVerdict
    jump_target: str
    """The chain that it leads to, if any."""
    mark: int | None
    """The packet's mark, where this has changed it."""

    @property
    def chain(self) -> Chain:
        """The chain of the rule."""
        return self.traced.event.chain

    @property
    def of_nft(self) -> bool:
        """Its text is nft's."""
        return self.listed is not None and not self.listed.iptables


def table_of(chain: Chain) -> str:
    """The table as `explain` names it: `nat` for iptables', `ip vipd` for nft's."""
    return chain.table if chain.legacy or _is_iptables(chain) else f"{chain.family} {chain.table}"


def match_rules(trace: PacketTrace, listed: Mapping[Chain, ChainRules]) -> Iterator[RuleMatch]:
    """The rules in the order in which the packet matched them; policies only where they drop."""
    events = tuple(_with_kind(traced, listed.get(traced.event.chain)) for traced in trace.events)
    matched = [traced for traced in events if _is_match(traced, events, listed, trace.passed)]
    passed = frozenset(traced.event.chain for traced in events)
    before = trace.mark
    for number, traced in enumerate(matched):
        after = _mark_after(matched, number)
        match = _match(traced, listed.get(traced.event.chain), passed)
        yield match._replace(mark=after) if after != before else match
        before = after


def chains_of(trace: PacketTrace) -> set[Chain]:
    """The chains to list, so that every matched rule has its text."""
    events = (traced.event for traced in trace.events)
    return {event.chain for event in events if event.kind is not EventKind.RETURN or event.chain.legacy}


def _with_kind(traced: TraceEvent, listed: ChainRules | None) -> TraceEvent:
    """Legacy iptables reports some rules as the ends of their chains; their numbers are those of rules."""
    event = traced.event
    if not event.chain.legacy or listed is None or event.rule not in listed.rules:
        return traced
    return TraceEvent(event._replace(kind=EventKind.RULE), traced.headers)


def _is_match(
    traced: TraceEvent, events: tuple[TraceEvent, ...], listed: Mapping[Chain, ChainRules], passed: bool
) -> bool:
    event = traced.event
    if event.kind is not EventKind.POLICY:
        return event.kind is EventKind.RULE
    if event.chain.legacy:
        # Legacy iptables does not report the verdict of a policy; but it is the last event of a packet.
        known = listed.get(event.chain)
        return not passed and traced is events[-1] and known is not None and known.policy == "DROP"
    return event.verdict is TraceVerdict.DROP


def _mark_after(matched: list[TraceEvent], number: int) -> int:
    """Legacy iptables reports the mark before a rule, so the next event has the one after it."""
    event = matched[number].event
    if event.chain.legacy and number + 1 < len(matched):
        return matched[number + 1].event.mark
    return event.mark


def _match(traced: TraceEvent, listed: ChainRules | None, passed: Collection[Chain]) -> RuleMatch:
    event = traced.event
    rule = _text(event, listed)
    if listed is not None and not listed.iptables:
        rule = _COMMENT.sub("", rule)
        return RuleMatch(traced, listed, rule, _nft_target(rule), event.verdict, event.jump_target, None)
    target, leads, verdict = target_of(rule), event.jump_target, event.verdict
    if event.chain.legacy:
        # The kernel reports every chain that a packet enters; all other names are targets.
        leads = target if event.chain._replace(name=target) in passed else ""
        verdict = _legacy_verdict(target, event)
    return RuleMatch(traced, listed, rule, target, verdict, leads, None)


def _nft_target(rule: str) -> str:
    if xt := _XT_TARGET.search(rule):
        return xt[1]
    plain = _QUOTED.sub('""', rule)
    return next((target for target, form in _NFT_TARGETS.items() if form.search(plain)), "")


def _text(event: KernelEvent, listed: ChainRules | None) -> str:
    if event.kind is EventKind.POLICY:
        return "policy DROP"
    return listed.rules.get(event.rule, "") if listed else ""


def _legacy_verdict(target: str, event: KernelEvent) -> TraceVerdict:
    if event.kind is EventKind.POLICY or target in ("DROP", "REJECT"):
        return TraceVerdict.DROP
    return TraceVerdict.ACCEPT if target in ("ACCEPT", "DNAT", "SNAT", "MASQUERADE") else event.verdict


def _is_iptables(chain: Chain) -> bool:
    """It has the name of one of iptables' tables. A table of nft may have it, too: that does no harm."""
    return chain.table in IPTABLES and chain.family in ("ip", "ip6")
