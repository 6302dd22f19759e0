"""Rules of iptables and nft as values, and where a forwarded flow of vipd ends in them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vipd.model import Family
from vipd.observe.tracer.tokens import target_of as word_after_jump

VIPD_COMMENT = '"vipd services"'
"""On vipd's jumps, whatever its prefix."""
STEMS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}

_COMMENT = re.compile(r'-m comment --comment (?:"(?:[^"\\]|\\.)*"|\S+) ?')
_OPENED = re.compile(r"\*(\S+)\s*")
_DECLARED = re.compile(r":(\S+) (\S+)")
_MOST_SHOWN = 80
_PREFIX = re.compile(r"^([A-Z][A-Z0-9]{0,6})-(?:SVC|SEP|SVL|EXT|FW|GRP)-[A-Z2-7]{16}$")
_REFUSALS = ("DROP", "REJECT")
_ESTABLISHED = {"established", "related"}


class MalformedRulesError(ValueError):
    """What was to be rules is something else."""


class Fate(Enum):
    """What rules do to a new flow that vipd translated."""

    PASSES = "passes"
    MAYBE = "maybe"
    """Some rule accepts, under a condition that may hold or not."""
    BLOCKED = "blocked"
    GOES_ON = "goes on"
    """They say nothing: what follows decides."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of iptables. Only built-in ones have a policy."""

    policy: str
    rules: tuple[str, ...]
    """Without their `-A CHAIN`."""


@dataclass(frozen=True, slots=True)
class Ruleset:
    """What one iptables variant holds for one family."""

    family: Family
    variant: str
    chains: Mapping[tuple[str, str], Chain]
    """By table and name."""

    @classmethod
    def of(cls, family: Family, variant: str, saved: str) -> Ruleset:
        """From what iptables-save prints. Raises MalformedRulesError for anything else."""
        policies: dict[tuple[str, str], str] = {}
        rules: dict[tuple[str, str], list[str]] = {}
        table = ""
        for number, line in enumerate(saved.splitlines(), 1):
            if opened := _OPENED.fullmatch(line):
                table = opened[1]
            elif table and line == "COMMIT":
                table = ""
            elif table and (declared := _DECLARED.match(line)):
                policies[table, declared[1]] = "" if declared[2] == "-" else declared[2]
            elif table and line.startswith("-A ") and (table, line.split(" ", 2)[1]) in policies:
                name, _, rule = line[3:].partition(" ")
                rules.setdefault((table, name), []).append(rule)
            elif line.strip() and not line.startswith("#"):
                raise MalformedRulesError(f"line {number} cannot be read: {line[:_MOST_SHOWN]!r}")
        if table:
            raise MalformedRulesError(f"they end within the table {table}")
        chains = {key: Chain(policy, tuple(rules.get(key, ()))) for key, policy in policies.items()}
        return cls(family, variant, chains)

    @property
    def program(self) -> str:
        """`iptables-nft` and the like."""
        return f"{STEMS[self.family]}-{self.variant}"

    def jumps_to(self, start: str) -> bool:
        """Whether a built-in chain jumps to a chain of such a name."""
        return any(
            target.startswith(start)
            for chain in self.chains.values()
            if chain.policy
            for rule in chain.rules
            if (target := target_of(rule))
        )

    def has(self, name: str) -> bool:
        """Whether any table has a chain of this name."""
        return any(chain == name for _, chain in self.chains)

    def foreign_tables(self, prefix: str) -> tuple[str, ...]:
        """Tables with rules of others, or a policy that refuses. Rules that lead to our chains are ours."""
        found: dict[str, None] = {}
        for (table, name), chain in self.chains.items():
            ours = f"{prefix}-"
            others = [r for r in chain.rules if not (target_of(r) or "").startswith(ours)]
            if chain.policy not in ("", "ACCEPT") or (others and not name.startswith(ours)):
                found[table] = None
        return tuple(found)

    def vipd_prefixes(self) -> frozenset[str]:
        """Prefixes of the chains that some vipd wrote: told from kube-proxy's by the jump's comment."""
        jumped = {
            target.partition("-")[0]
            for chain in self.chains.values()
            if chain.policy
            for rule in chain.rules
            if VIPD_COMMENT in rule and (target := target_of(rule))
        }
        named = {match[1] for _, name in self.chains if (match := _PREFIX.match(name))}
        return frozenset(jumped | (named - {"KUBE"}))

    def forward_fate(self, prefix: str) -> Fate:
        """What FORWARD of table filter does to a new flow that vipd translated, as far as can be told."""
        chain = self.chains.get(("filter", "FORWARD"), Chain("ACCEPT", ()))
        own = self.chains.get(("filter", f"{prefix}-FORWARD"), Chain("", ()))
        maybe = False
        for rule in map(_bare, chain.rules):
            target = target_of(rule)
            if target == f"{prefix}-FORWARD" and any(target_of(r) == "ACCEPT" for r in own.rules):
                return Fate.PASSES
            unconditional = rule.startswith(("-j", "-g"))
            if target == "ACCEPT" and (unconditional or rule.startswith("-m conntrack --ctstate DNAT -j")):
                return Fate.PASSES
            if target in _REFUSALS and unconditional:
                return Fate.MAYBE if maybe else Fate.BLOCKED
            maybe = maybe or (target == "ACCEPT" and "ESTABLISHED" not in rule)
        if chain.policy == "ACCEPT":
            return Fate.PASSES
        return Fate.MAYBE if maybe else Fate.BLOCKED


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

    def fate(self, flow_mark: int) -> Fate:
        """What it does to a new flow that vipd translated and marked so, as far as can be told."""
        found = self._walk(self.name, flow_mark, frozenset())
        if found in (Fate.PASSES, Fate.BLOCKED) or self.policy != "drop":
            return Fate.PASSES if found in (Fate.GOES_ON, Fate.MAYBE) else found
        return Fate.BLOCKED if found is Fate.GOES_ON else found

    def _walk(self, name: str, flow_mark: int, above: frozenset[str]) -> Fate:
        maybe = False
        for statements in self.chains.get(name, ()):
            verdict, target = _verdict(statements)
            matches = [s for s in statements if not _NEUTRAL.issuperset(s)]
            holds = all(_holds_for_translated(match, flow_mark) for match in matches)
            fate = Fate.GOES_ON
            if verdict in ("jump", "goto") and target not in above:
                fate = self._walk(target, flow_mark, above | {name})
            elif verdict == "accept":
                fate = Fate.PASSES
            elif verdict in ("drop", "reject"):
                fate = Fate.BLOCKED
            elif verdict == "return" and holds:
                break
            if holds and fate in (Fate.PASSES, Fate.BLOCKED):
                return Fate.MAYBE if maybe and fate is Fate.BLOCKED else fate
            accepts = fate in (Fate.PASSES, Fate.MAYBE) and (holds or not _for_answers_only(matches))
            maybe = maybe or accepts
            if verdict == "goto" and holds:
                break
        return Fate.MAYBE if maybe else Fate.GOES_ON


_VERDICTS = ("accept", "drop", "reject", "jump", "goto", "return")
_NEUTRAL = {*_VERDICTS, "counter", "log", "comment"}


def target_of(rule: str) -> str | None:
    """Where an iptables rule leads: a chain, ACCEPT, DROP; None for a rule that only counts."""
    return word_after_jump(rule) or None


def read_nft_table(listed: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Sequence[Mapping[str, Any]], ...]]:
    """The rules of every chain in the objects that `nft -j list table` prints. A statement of another form is
    one that is not known. Raises KeyError, TypeError and AttributeError for objects that hold no rules."""
    chains: dict[str, list[Sequence[Mapping[str, Any]]]] = {}
    for item in listed:
        if "chain" in item:
            chains.setdefault(item["chain"]["name"], [])
        elif "rule" in item:
            statements = [
                each if isinstance(each, dict) else {"unknown": each} for each in item["rule"]["expr"]
            ]
            chains.setdefault(item["rule"]["chain"], []).append(statements)
    return {name: tuple(rules) for name, rules in chains.items()}


def _bare(rule: str) -> str:
    return _COMMENT.sub("", rule)


def _verdict(statements: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    for statement in statements:
        for verdict in _VERDICTS:
            if verdict in statement:
                body = statement[verdict]
                return verdict, str(body["target"]) if isinstance(body, dict) and "target" in body else ""
    return "", ""


def _holds_for_translated(statement: Mapping[str, Any], flow_mark: int) -> bool:
    """Whether a condition holds for every flow that vipd translated: by its status, or vipd's mark."""
    match = _match(statement)
    left, right = match.get("left"), match.get("right")
    if left == {"ct": {"key": "status"}}:
        return match.get("op") in ("in", "==") and (right == "dnat" or "dnat" in _words(right))
    marked = {"&": [{"ct": {"key": "mark"}}, flow_mark]}
    return bool(left == marked and (match.get("op"), right) in (("==", flow_mark), ("!=", 0)))


def _for_answers_only(matches: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rule is for established flows, or for the loopback device: no new forwarded flow meets it."""
    return any(
        match.get("left") == {"ct": {"key": "state"}} and _ESTABLISHED.issuperset(_words(match.get("right")))
        for match in map(_match, matches)
    ) or any(_match(statement).get("right") == "lo" for statement in matches)


def _match(statement: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a statement compares; empty for one that compares nothing."""
    found = statement.get("match")
    return found if isinstance(found, dict) else {}


def _words(right: object) -> list[str]:
    if isinstance(right, dict):
        right = right.get("set", [])
    return [str(word) for word in right] if isinstance(right, list) else [str(right)]
