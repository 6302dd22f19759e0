"""The effect of an nft chain of the forward hook on the flows that vipd translated. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vipd.dataplane.accept_order import Effect, effect_of_call
from vipd.dataplane.refusals import MAX_REFUSALS, Networks, Ports, Refusal, Scope, network
from vipd.model.service import Family

OTHER_TABLES = ("mangle", "security")
"""Tables of iptables with a chain FORWARD, besides filter."""

_ESTABLISHED = {"established", "related"}
_MAX_DEPTH = 16
"""Jumps within jumps; the kernel allows no more."""

Statements = Sequence[Mapping[str, Any]]
"""A rule, as nft's JSON has its statements."""


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

    def refusals(self, flow_mark: int) -> tuple[tuple[Refusal, ...], tuple[Refusal, ...]]:
        """The rules that may refuse flows which vipd translated: those that do so before a rule accepts all
        of them, and those that would, if they were not behind that."""
        before: list[Refusal] = []
        behind: list[Refusal] = []
        found = before
        for rule in self.chains.get(self.name, ()):
            if accepts_translated(rule, flow_mark):
                found = behind
            elif found is before or effect_of(rule, self.chains, flow_mark).filters:
                found += refusals_of(rule, self.name, self.chains)
        return tuple(before), tuple(behind)

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


def effect_of(
    statements: Statements, chains: Mapping[str, Sequence[Statements]], flow_mark: int, depth: int = 0
) -> Effect:
    """The effect of another program's rule. What is not understood filters."""
    if any("queue" in statement for statement in statements):
        return Effect.FILTERS
    if verdict_maps := [statement["vmap"] for statement in statements if "vmap" in statement]:
        return Effect.FILTERS if any(map(_map_refuses, verdict_maps)) else Effect.PASSES
    verdict, target = _verdict(statements)
    conditions = [
        statement
        for statement in statements
        if not _NEUTRAL.issuperset(statement) and not _holds_for_translated(statement, flow_mark)
    ]
    if verdict in ("drop", "reject", "return"):
        return _closing([_match(condition) for condition in conditions])
    if verdict not in ("jump", "goto"):
        return Effect.PASSES
    if target not in chains or depth >= _MAX_DEPTH:
        return Effect.FILTERS
    effect = effect_of_call(
        [
            (effect_of(rule, chains, flow_mark, depth + 1), _verdict(rule)[0] == "return")
            for rule in chains[target]
        ]
    )
    return Effect.FILTERS if effect is Effect.CLOSES and conditions else effect


def refusals_of(
    statements: Statements,
    chain: str,
    chains: Mapping[str, Sequence[Statements]],
    scopes: tuple[Scope, ...] = (),
) -> Iterator[Refusal]:
    """The rules that refuse: this one, or those in the chain that it jumps to. Of a long list the first ones.

    `scopes`: the conditions of the jumps to its chain.
    """
    verdict, target = _verdict(statements)
    scopes = (*scopes, scope_of(statements))
    refusing_maps = [s["vmap"] for s in statements if "vmap" in s and _map_refuses(s["vmap"])]
    if verdict in ("jump", "goto") and target in chains and len(scopes) <= _MAX_DEPTH:
        for inner in chains[target][:MAX_REFUSALS]:
            yield from refusals_of(inner, target, chains, scopes)
    elif verdict in ("drop", "reject") or refusing_maps or any("queue" in s for s in statements):
        yield Refusal(chain, rule_text(statements), scopes)


def accepts_translated(statements: Statements, flow_mark: int) -> bool:
    """Whether a rule accepts every flow that somebody translated, as firewalld's does."""
    matches = [statement for statement in statements if not _NEUTRAL.issuperset(statement)]
    return _verdict(statements)[0] == "accept" and all(_holds_for_translated(m, flow_mark) for m in matches)


def scope_of(statements: Statements) -> Scope:
    """The conditions of a rule. One that is not understood does not count."""
    compared: dict[str, object] = {}
    for match in map(_match, statements):
        if match.get("op") in ("==", "in"):
            compared[_expression_text(match.get("left"))] = match.get("right")
    by_port = {key.split()[0]: right for key, right in compared.items() if key.endswith(" dport")}
    protocols = [
        *_words(compared.get("meta l4proto", {"set": []})),
        *(name for name in by_port if name != "th"),
    ]
    maps = [statement["vmap"] for statement in statements if "vmap" in statement]
    return Scope(
        _networks(compared.get("ip saddr", compared.get("ip6 saddr", "any"))),
        _networks(compared.get("ip daddr", compared.get("ip6 daddr", "any"))),
        _networks(compared.get("ct original daddr", "any")),
        frozenset(protocols) or None,
        _ports(next(iter(by_port.values()), "any")),
        only_invalid=compared.get("ct state") == "invalid"
        or any(_refused_by_map(m) == {"invalid"} for m in maps),
    )


def identity_of(statements: Statements) -> str:
    """A text by which a rule is known again when it is written anew: without its counters."""
    return json.dumps([statement for statement in statements if "counter" not in statement], sort_keys=True)


def rule_text(statements: Statements) -> str:
    """A rule nearly as nft prints it."""
    return " ".join(filter(None, map(_statement_text, statements)))


def _statement_text(statement: Mapping[str, Any]) -> str:
    if match := _match(statement):
        operator = "" if match.get("op") in ("==", "in") else f"{match.get('op')} "
        return f"{_expression_text(match.get('left'))} {operator}{_expression_text(match.get('right'))}"
    verdict, target = _verdict([statement])
    if verdict:
        return f"{verdict} {target}".strip()
    if "vmap" in statement:
        verdicts = statement["vmap"]
        return f"{_expression_text(verdicts.get('key'))} vmap {_expression_text(verdicts.get('data'))}"
    return "" if "counter" in statement else next(iter(statement), "")


def _expression_text(expression: object) -> str:
    if isinstance(expression, list):
        return " : ".join(map(_expression_text, expression))
    if not isinstance(expression, dict) or len(expression) != 1:
        return str(expression)
    ((kind, value),) = expression.items()
    if not isinstance(value, dict):
        if kind == "set" and isinstance(value, list):
            return f"{{ {', '.join(map(_expression_text, value))} }}"
        return "-".join(map(str, value)) if kind == "range" and isinstance(value, list) else str(kind)
    match kind:
        case "payload" | "ct" | "meta":
            words = [value.get("protocol"), value.get("dir"), value.get("field"), value.get("key")]
            short = kind == "payload" or str(value.get("key")).endswith(("iif", "oif", "ifname"))
            return " ".join(str(word) for word in ("" if short else kind, *words) if word)
        case "prefix":
            return f"{value.get('addr')}/{value.get('len')}"
        case _:
            return f"{kind} {value.get('target', '')}".strip()


def _closing(matches: Sequence[Mapping[str, Any]]) -> Effect:
    """The effect of a rule that refuses under these conditions; an empty one is not understood."""
    if not matches:
        return Effect.CLOSES
    if len(matches) == 1:
        left, right = matches[0].get("left"), matches[0].get("right")
        accepting = matches[0].get("op") in ("==", "in")
        if accepting and left == {"ct": {"key": "state"}} and "new" in _words(right):
            return Effect.CLOSES
        if accepting and left in ({"meta": {"key": "l4proto"}}, {"meta": {"key": "nfproto"}}):
            return Effect.CLOSES_PARTLY
    return Effect.FILTERS


def _map_refuses(verdict_map: Mapping[str, Any]) -> bool:
    return _refused_by_map(verdict_map) != set()


def _refused_by_map(verdict_map: Mapping[str, Any]) -> set[str]:
    """The keys of a verdict map that may refuse; of a named map, which is not read, one unknown key."""
    data = verdict_map.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("set"), list):
        return {"?"}
    return {
        str(item[0]) if isinstance(item, list) and item else "?"
        for item in data["set"]
        if not (
            isinstance(item, list) and len(item) > 1 and isinstance(item[1], dict) and "accept" in item[1]
        )
    }


def _members(right: object) -> list[object]:
    """The members of a set, or the only value."""
    members = right.get("set") if isinstance(right, dict) else None
    return members if isinstance(members, list) else [right]


def _networks(right: object) -> Networks | None:
    """The networks of a comparison; None for a named set, or what is not understood."""
    found: list[Any] = []
    for value in _members(right):
        networks = network(_expression_text(value))
        if networks is None:
            return None
        found += networks
    return tuple(found)


def _ports(right: object) -> Ports | None:
    found = []
    for value in _members(right):
        first, _, last = _expression_text(value).partition("-")
        if not (first.isdigit() and (not last or last.isdigit())):
            return None
        found.append((int(first), int(last or first)))
    return tuple(found)
