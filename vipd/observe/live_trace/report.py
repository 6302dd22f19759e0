"""The report of one traced packet, as values for a screen and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from vipd.dataplane.conntrack.entries import Entry, flow_state
from vipd.model.formatting import time_text
from vipd.model.service import socket_text
from vipd.observe.live_trace.matched_rules import MatchedRule
from vipd.observe.live_trace.matching import table_of
from vipd.observe.live_trace.outcome import Comparison, FinalVerdict, Outcome
from vipd.observe.live_trace.packet_trace import PacketTrace

GONE = "a rule that is gone"
"""Shown for a rule that was deleted before it could be looked up."""


class Interfaces(NamedTuple):
    """The names of the devices by which a packet came and left; empty for none."""

    inbound: str = ""
    outbound: str = ""


NO_INTERFACES = Interfaces()


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
    at: datetime | None = None
    """When its first event was read."""
    tracked: Entry | None = None
    """Its flow in connection tracking, once it had passed; None: there is none, or it cannot be read."""
    interfaces: Interfaces = NO_INTERFACES

    @property
    def agrees(self) -> bool:
        """Nothing is otherwise than predicted."""
        return self.comparison is None or not self.comparison.differences

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Table and hook, chain, the role of the chain, the effect of the rule, for each of `shown`."""
        for rule in self.shown():
            hook = rule.hook and f", hook {rule.hook}"
            yield f"{table_of(rule.chain)}{hook}", rule.chain.name, rule.role, self._effect_text(rule)

    def shown(self) -> Iterator[MatchedRule]:
        """The rules without jumps that led nowhere."""
        for number, rule in enumerate(self.rules):
            after = self.rules[number + 1] if number + 1 < len(self.rules) else None
            if not rule.jump_target or (after is not None and after.chain.name == rule.jump_target):
                yield rule

    def deciding_rule(self) -> str:
        """The rule that decided, and whether it is vipd's; empty if unknown."""
        by = self.outcome.decided_by
        if by is None:
            return ""
        rule = by.does if by.ours else f"{by.rule or by.does or GONE} (not a rule of vipd)"
        return f"{table_of(by.chain)} {by.chain.name}: {rule}"

    def view(self, explanation: Mapping[str, Any] | None, reason: str) -> dict[str, Any]:
        """As JSON. `explanation` is the prediction, or else `reason` why there is none."""
        start, outcome = self.trace.start, self.outcome
        differences = self.comparison.differences if self.comparison else ()
        return {
            "packet": {
                "source": start.source,
                "source_port": start.source_port,
                "destination": start.destination,
                "port": start.port,
                "protocol": str(start.protocol),
                "arriving": "forwarded" if self.trace.forwarded else "local",
            },
            "time": time_text(self.at, milliseconds=True) if self.at else None,
            "inbound": self.interfaces.inbound or None,
            "outbound": self.interfaces.outbound or None,
            "conntrack": _entry_view(self.tracked),
            "verdict": str(outcome.verdict),
            "destination": outcome.destination,
            "source_seen": outcome.source,
            "masqueraded": outcome.masqueraded,
            "answer": self.answer or None,
            "rules": [_rule_view(rule) for rule in self.rules],
            "agrees": None if self.comparison is None else self.agrees,
            "differences": [str(each) for each in differences],
            "different_fields": [each.field for each in differences],
            "prediction": _prediction_view(explanation, self.comparison),
            "no_prediction": reason or None,
        }

    def _effect_text(self, rule: MatchedRule) -> str:
        does = rule.does or GONE
        if rule is self.outcome.decided_by and rule.ours and self.outcome.verdict is FinalVerdict.DELIVERED:
            to = self.outcome.destination
            does = does if to in does else f"{does}: {to}" if rule.does else f"DNAT to {to}"
        return does if rule.mark is None else f"{does}, mark {rule.mark:#x}"


def rule_text(rule: MatchedRule) -> str:
    """The rule itself, with its handle."""
    if not rule.number:
        return rule.rule
    return f"handle {rule.number}: {rule.rule or GONE}"


def tracked_words(entry: Entry) -> str:
    """The state of a flow, and who answers whom."""
    ends = f"answers from {socket_text(*entry.reply_source)} to {socket_text(*entry.reply_destination)}"
    return f"{flow_state(entry)}, {ends}, mark {entry.mark:#x}"


def _entry_view(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        "state": flow_state(entry),
        "reply_source": socket_text(*entry.reply_source),
        "reply_destination": socket_text(*entry.reply_destination),
        "mark": entry.mark,
        "timeout": entry.timeout,
    }


def _rule_view(rule: MatchedRule) -> dict[str, Any]:
    return {
        "family": rule.chain.family,
        "table": rule.chain.table,
        "hook": rule.hook or None,
        "chain": rule.chain.name,
        "part": rule.role,
        "number": rule.number or None,
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
