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
    sources: Networks | None = None
    destinations: Networks | None = None
    original: Networks | None = None
    protocols: frozenset[str] | None = None
    ports: Ports | None = None
    only_invalid = any(
        _refused_by_map(statement["vmap"]) == {"invalid"} for statement in statements if "vmap" in statement
    )
    for match in map(_match, statements):
        left, values = match.get("left"), _words(match.get("right"))
        if match.get("op") not in ("==", "in") or not isinstance(left, dict):
            continue
        payload, state = left.get("payload", {}), left.get("ct", {})
        if payload.get("field") == "saddr":
            sources = _networks(match.get("right"))
        elif payload.get("field") == "daddr":
            destinations = _networks(match.get("right"))
        elif state.get("key") == "daddr" and state.get("dir") == "original":
            original = _networks(match.get("right"))
        elif payload.get("field") == "dport":
            ports = _ports(match.get("right"))
            protocols = frozenset({payload["protocol"]}) if payload.get("protocol") != "th" else protocols
        elif left.get("meta") == {"key": "l4proto"}:
            protocols = frozenset(values)
        elif state.get("key") == "state" and values == ["invalid"]:
            only_invalid = True
    return Scope(sources, destinations, original, protocols, ports, only_invalid)


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
    match expression:
        case {"payload": {"protocol": protocol, "field": name}}:
            return f"{protocol} {name}"
        case {"meta": {"key": "iifname" | "oifname" | "iif" | "oif" as key}}:
            return str(key)
        case {"meta": {"key": key}}:
            return f"meta {key}"
        case {"ct": {"key": key}}:
            return f"ct {key}"
        case {"prefix": {"addr": address, "len": length}}:
            return f"{address}/{length}"
        case {"range": [first, last]}:
            return f"{first}-{last}"
        case {"set": list(values)}:
            return f"{{ {', '.join(map(_expression_text, values))} }}"
        case [key, value]:
            return f"{_expression_text(key)} : {_expression_text(value)}"
        case {**other} if len(other) == 1:
            ((key, value),) = other.items()
            return f"{key} {value['target']}" if isinstance(value, dict) and "target" in value else str(key)
    return str(expression)


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


def _networks(right: object) -> Networks | None:
    """The networks of a comparison; None for a named set, or what is not understood."""
    values = right["set"] if isinstance(right, dict) and "set" in right else [right]
    found: list[Any] = []
    for value in values:
        networks = network(_expression_text(value))
        if networks is None:
            return None
        found += networks
    return tuple(found)


def _ports(right: object) -> Ports | None:
    values = right["set"] if isinstance(right, dict) and "set" in right else [right]
    found = []
    for value in values:
        first, _, last = _expression_text(value).partition("-")
        if not (first.isdigit() and (not last or last.isdigit())):
            return None
        found.append((int(first), int(last or first)))
    return tuple(found)
