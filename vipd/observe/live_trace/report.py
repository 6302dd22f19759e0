"""The report of one traced packet, as values for a screen and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vipd.observe.live_trace.events import Chain
from vipd.observe.live_trace.matched_rules import MatchedRule
from vipd.observe.live_trace.matching import table_of
from vipd.observe.live_trace.outcome import Comparison, FinalVerdict, Outcome
from vipd.observe.live_trace.packet_trace import PacketTrace

GONE = "a rule that is gone"
"""Shown for a rule that was deleted before it could be looked up."""


@dataclass(frozen=True, slots=True)
class Report:
    """One packet."""

    trace: PacketTrace
    rules: tuple[MatchedRule, ...]
    outcome: Outcome
    comparison: Comparison | None
    """None: there was no prediction."""
    answer: str = ""
    """The sender's result, if this program is the sender."""

    @property
    def agrees(self) -> bool:
        """Nothing is otherwise than predicted."""
        return self.comparison is None or not self.comparison.differences

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Table, chain, the role of the chain, the effect of the rule; jumps that led nowhere are left
        out."""
        for number, rule in enumerate(self.rules):
            after = self.rules[number + 1] if number + 1 < len(self.rules) else None
            if not rule.jump_target or (after is not None and after.chain.name == rule.jump_target):
                yield table_words(rule.chain), rule.chain.name, rule.role, self._effect_text(rule)

    def deciding_rule(self) -> str:
        """The rule that decided, and whether it is vipd's; empty if unknown."""
        by = self.outcome.decided_by
        if by is None:
            return ""
        told = by.does if by.ours else f"{by.rule or by.does or GONE} (not a rule of vipd)"
        return f"{table_words(by.chain)} {by.chain.name}: {told}"

    def view(self, explanation: Mapping[str, Any] | None, reason: str) -> dict[str, Any]:
        """As JSON. `explanation` is the prediction, or else `reason` why there is none."""
        start, outcome = self.trace.start, self.outcome
        return {
            "packet": {
                "source": start.source,
                "source_port": start.source_port,
                "destination": start.destination,
                "port": start.port,
                "protocol": str(start.protocol),
                "arriving": "forwarded" if self.trace.forwarded else "local",
            },
            "verdict": str(outcome.verdict),
            "destination": outcome.destination,
            "source_seen": outcome.source,
            "masqueraded": outcome.masqueraded,
            "answer": self.answer or None,
            "rules": [_rule_view(rule) for rule in self.rules],
            "agrees": None if self.comparison is None else self.agrees,
            "differences": list(self.comparison.differences) if self.comparison else [],
            "prediction": _prediction_view(explanation, self.comparison),
            "no_prediction": reason or None,
        }

    def _effect_text(self, rule: MatchedRule) -> str:
        does = rule.does or GONE
        if rule is self.outcome.decided_by and rule.ours and self.outcome.verdict is FinalVerdict.DELIVERED:
            to = self.outcome.destination
            does = does if to in does else f"{does}: {to}" if rule.does else f"DNAT to {to}"
        return does if rule.mark is None else f"{does}, mark {rule.mark:#x}"


def table_words(chain: Chain) -> str:
    """`nat`, `nat (legacy)`, or for a table of nft `ip vipd`."""
    return f"{chain.table} (legacy)" if chain.legacy else table_of(chain)


def _rule_view(rule: MatchedRule) -> dict[str, Any]:
    return {
        "family": rule.chain.family,
        "table": rule.chain.table,
        "chain": rule.chain.name,
        "part": rule.role,
        "rule": rule.rule,
        "does": rule.does,
        "verdict": str(rule.verdict) or None,
        "mark": rule.mark,
        "vipd": rule.ours,
    }


def _prediction_view(
    explanation: Mapping[str, Any] | None, comparison: Comparison | None
) -> dict[str, Any] | None:
    if explanation is None or comparison is None:
        return None
    outcomes: Sequence[Mapping[str, Any]] = explanation["outcomes"]
    return {
        "summary": explanation["summary"],
        "share": comparison.share,
        "outcomes": [
            {key: each[key] for key in ("verdict", "backend", "probability", "masqueraded")}
            for each in outcomes
        ],
    }
