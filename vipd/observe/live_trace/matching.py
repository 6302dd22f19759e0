"""Finds the text of the rules that a traced packet matched, among the rules that the kernel lists. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
    """By handle."""
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
    return chain.table if _is_iptables(chain) else f"{chain.family} {chain.table}"


def match_rules(trace: PacketTrace, listed: Mapping[Chain, ChainRules]) -> Iterator[RuleMatch]:
    """The rules in the order in which the packet matched them; policies only where they drop."""
    before = trace.mark
    for traced in filter(_is_match, trace.events):
        match, after = _match(traced, listed.get(traced.event.chain)), traced.event.mark
        yield match._replace(mark=after) if after != before else match
        before = after


def chains_of(trace: PacketTrace) -> set[Chain]:
    """The chains to list, so that every matched rule has its text."""
    events = (traced.event for traced in trace.events)
    return {event.chain for event in events if event.kind is not EventKind.RETURN}


def _is_match(traced: TraceEvent) -> bool:
    event = traced.event
    if event.kind is EventKind.POLICY:
        return event.verdict is TraceVerdict.DROP
    return event.kind is EventKind.RULE


def _match(traced: TraceEvent, listed: ChainRules | None) -> RuleMatch:
    event = traced.event
    rule = _text(event, listed)
    if listed is not None and not listed.iptables:
        rule = _COMMENT.sub("", rule)
        return RuleMatch(traced, listed, rule, _nft_target(rule), event.verdict, event.jump_target, None)
    return RuleMatch(traced, listed, rule, target_of(rule), event.verdict, event.jump_target, None)


def _nft_target(rule: str) -> str:
    if xt := _XT_TARGET.search(rule):
        return xt[1]
    plain = _QUOTED.sub('""', rule)
    return next((target for target, form in _NFT_TARGETS.items() if form.search(plain)), "")


def _text(event: KernelEvent, listed: ChainRules | None) -> str:
    if event.kind is EventKind.POLICY:
        return "policy DROP"
    return listed.rules.get(event.rule, "") if listed else ""


def _is_iptables(chain: Chain) -> bool:
    """It has the name of one of iptables' tables. A table of nft may have it, too: that does no harm."""
    return chain.table in IPTABLES and chain.family in ("ip", "ip6")
