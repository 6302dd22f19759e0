"""The effect of an nft chain of the forward hook on the flows that vipd translated. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vipd.model.service import Family

OTHER_TABLES = ("mangle", "security")
"""Tables of iptables with a chain FORWARD, besides filter."""

_ESTABLISHED = {"established", "related"}


class ForwardVerdict(Enum):
    """The effect of rules on a new flow that vipd translated."""

    PASSES = "passes"
    MAYBE = "maybe"
    """Some rule accepts, under a condition that may be true or false."""
    BLOCKED = "blocked"
    GOES_ON = "goes on"
    """They do not decide: later rules do."""


@dataclass(frozen=True, slots=True)
class NftForward:
    """A chain at the hook forward, and the table that it is in."""

    family: str
    """`inet`, `ip` or `ip6`."""
    table: str
    name: str
    policy: str
    chains: Mapping[str, tuple[Sequence[Mapping[str, Any]], ...]]
    """Chain -> its rules, each as nft's JSON has the statements."""

    def concerns(self, family: Family) -> bool:
        """Whether packets of a family pass it."""
        return self.family in ("inet", "ip" if family is Family.IPV4 else "ip6")

    def forward_verdict(self, flow_mark: int) -> ForwardVerdict:
        """Its effect on a new flow that vipd translated and marked, as far as is known."""
        found = self._walk(self.name, flow_mark, frozenset())
        if found in (ForwardVerdict.PASSES, ForwardVerdict.BLOCKED) or self.policy != "drop":
            return ForwardVerdict.PASSES if found in (ForwardVerdict.GOES_ON, ForwardVerdict.MAYBE) else found
        return ForwardVerdict.BLOCKED if found is ForwardVerdict.GOES_ON else found

    def _walk(self, name: str, flow_mark: int, above: frozenset[str]) -> ForwardVerdict:
        maybe = False
        for statements in self.chains.get(name, ()):
            verdict, target = _verdict(statements)
            matches = [s for s in statements if not _NEUTRAL.issuperset(s)]
            holds = all(_holds_for_translated(match, flow_mark) for match in matches)
            forward_verdict = ForwardVerdict.GOES_ON
            if verdict in ("jump", "goto") and target not in above:
                forward_verdict = self._walk(target, flow_mark, above | {name})
            elif verdict == "accept":
                forward_verdict = ForwardVerdict.PASSES
            elif verdict in ("drop", "reject"):
                forward_verdict = ForwardVerdict.BLOCKED
            elif verdict == "return" and holds:
                break
            if holds and forward_verdict in (ForwardVerdict.PASSES, ForwardVerdict.BLOCKED):
                return (
                    ForwardVerdict.MAYBE
                    if maybe and forward_verdict is ForwardVerdict.BLOCKED
                    else forward_verdict
                )
            accepts = forward_verdict in (ForwardVerdict.PASSES, ForwardVerdict.MAYBE) and (
                holds or not _for_answers_only(matches)
            )
            maybe = maybe or accepts
            if verdict == "goto" and holds:
                break
        return ForwardVerdict.MAYBE if maybe else ForwardVerdict.GOES_ON


_VERDICTS = ("accept", "drop", "reject", "jump", "goto", "return")
_NEUTRAL = {*_VERDICTS, "counter", "log", "comment"}


def _verdict(statements: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    for statement in statements:
        for verdict in _VERDICTS:
            if verdict in statement:
                body = statement[verdict]
                return verdict, str(body["target"]) if isinstance(body, dict) and "target" in body else ""
    return "", ""


def _holds_for_translated(statement: Mapping[str, Any], flow_mark: int) -> bool:
    """Whether a condition is true for every flow that vipd translated: by its status, or vipd's mark."""
    match = _match(statement)
    left, right = match.get("left"), match.get("right")
    if left == {"ct": {"key": "status"}}:
        return match.get("op") in ("in", "==") and (right == "dnat" or "dnat" in _words(right))
    marked = {"&": [{"ct": {"key": "mark"}}, flow_mark]}
    return bool(left == marked and (match.get("op"), right) in (("==", flow_mark), ("!=", 0)))


def _for_answers_only(matches: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rule is for established flows, or for the loopback device: no new forwarded flow matches
    it."""
    return any(
        match.get("left") == {"ct": {"key": "state"}} and _ESTABLISHED.issuperset(_words(match.get("right")))
        for match in map(_match, matches)
    ) or any(_match(statement).get("right") == "lo" for statement in matches)


def _match(statement: Mapping[str, Any]) -> Mapping[str, Any]:
    """The comparison in a statement; empty if there is none."""
    found = statement.get("match")
    return found if isinstance(found, dict) else {}


def _words(right: object) -> list[str]:
    if isinstance(right, dict):
        right = right.get("set", [])
    return [str(word) for word in right] if isinstance(right, list) else [str(right)]
