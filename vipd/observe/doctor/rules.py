"""Rules of iptables as values, and where a forwarded flow of vipd ends in them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from vipd.dataplane.iptables.foreign_rules import (
    UFW_USER_INPUT,
    accepts_translated,
    effect_of,
    refusals_of,
    refuses,
)
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.saved_rules import SavedRule, SavedTables, read_tables
from vipd.dataplane.iptables.words import split_words
from vipd.dataplane.refusals import Refusal
from vipd.model.service import Family
from vipd.observe.simulator.errors import UnknownRule
from vipd.observe.simulator.iptables.matches import InState, Match
from vipd.observe.simulator.iptables.rules import parse_rule

VIPD_COMMENT = '"vipd services"'
"""On vipd's jumps, whatever its prefix."""
STEMS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}

_PREFIX = re.compile(r"^([A-Z][A-Z0-9]{0,6})-(?:SVC|SEP|SVL|EXT|FW|GRP)-[A-Z2-7]{16}$")
_REFUSALS = ("DROP", "REJECT")
_TRANSLATED = (InState(frozenset({"DNAT"})),)


class ForwardVerdict(Enum):
    """The effect of rules on a new flow that vipd translated."""

    PASSES = "passes"
    MAYBE = "maybe"
    """Some rule accepts, under a condition that may be true or false."""
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class NftForward:
    """A chain at the hook forward, whose rules are not interpreted."""

    family: str
    """`inet`, `ip` or `ip6`."""
    table: str
    name: str
    drops: bool
    """It drops by policy, and nothing in it lets pass what vipd translated, as far as is known."""

    def concerns(self, family: Family) -> bool:
        """Whether packets of a family pass it."""
        return self.family in ("inet", "ip" if family is Family.IPV4 else "ip6")


@dataclass(frozen=True, slots=True)
class Ruleset:
    """The rules of one iptables variant for one family."""

    family: Family
    variant: str
    tables: SavedTables

    @classmethod
    def of(cls, family: Family, variant: str, saved: str) -> Ruleset:
        """From the output of iptables-save. Raises MalformedRulesError for anything else."""
        return cls(family, variant, read_tables(saved))

    @property
    def program(self) -> str:
        """`iptables-nft` and the like."""
        return f"{STEMS[self.family]}-{self.variant}"

    def jumps_to(self, start: str, but: str = "") -> bool:
        """Whether a built-in chain jumps to a chain with the prefix `start`, except to `but`."""
        targets = (rule.target for chain in self.tables.policies for rule in self.tables.chains[chain])
        return any(target.startswith(start) and target != but for target in targets)

    def has(self, name: str) -> bool:
        """Whether any table has a chain of this name."""
        return any(chain == name for _, chain in self.tables.chains)

    def foreign_tables(self, prefix: str) -> tuple[str, ...]:
        """Tables with foreign rules, or a policy that refuses. Rules that lead to vipd's chains do not
        count."""
        found: dict[str, None] = {}
        ours = f"{prefix}-"
        for chain, rules in self.tables.chains.items():
            others = not chain.name.startswith(ours) and any(
                not rule.target.startswith(ours) for rule in rules
            )
            if others or self.tables.policies.get(chain, "ACCEPT") != "ACCEPT":
                found[chain.table] = None
        return tuple(found)

    def vipd_prefixes(self) -> frozenset[str]:
        """Prefixes of the chains of any vipd: the jump's comment distinguishes them from kube-proxy's."""
        jumped = {
            rule.target.partition("-")[0]
            for chain in self.tables.policies
            for rule in self.tables.chains[chain]
            if VIPD_COMMENT in rule.text and rule.target
        }
        named = {match[1] for _, name in self.tables.chains if (match := _PREFIX.match(name))}
        return frozenset(jumped | (named - {"KUBE"}))

    def forward_chain_verdict(self, prefix: str, table: str = "filter") -> ForwardVerdict:
        """The effect of FORWARD of a table on a new flow that vipd translated, as far as is known."""
        own = self.tables.rules(table, f"{prefix}-FORWARD") or ()
        maybe = False
        for rule in self.tables.rules(table, "FORWARD") or ():
            target, conditions = rule.target, self._conditions(rule, table)
            if target == f"{prefix}-FORWARD" and any(each.target == "ACCEPT" for each in own):
                return ForwardVerdict.PASSES
            if target == "ACCEPT" and conditions in ((), _TRANSLATED):
                return ForwardVerdict.PASSES
            if target in _REFUSALS and conditions == ():
                return ForwardVerdict.MAYBE if maybe else ForwardVerdict.BLOCKED
            maybe = maybe or (target == "ACCEPT" and not _for_answers_only(conditions))
        if self.tables.policies.get(ChainId(table, "FORWARD"), "ACCEPT") == "ACCEPT":
            return ForwardVerdict.PASSES
        return ForwardVerdict.MAYBE if maybe else ForwardVerdict.BLOCKED

    def forward_refusals(self, prefix: str) -> tuple[tuple[Refusal, ...], tuple[Refusal, ...]]:
        """The rules of others in FORWARD that may refuse flows which vipd translated: those that do so before
        vipd accepts them, and those that would, if they were not behind that."""
        names, foreign = Names(prefix), self.foreign_chains(prefix)
        before: list[Refusal] = []
        behind: list[Refusal] = []
        found = before
        for rule in self.tables.rules("filter", "FORWARD") or ():
            if rule.target == names.fixed("FORWARD") or accepts_translated(rule.text):
                found = behind
            elif not names.owns(ChainId("filter", rule.target)):
                effect = effect_of(rule.text, foreign)
                if found is before or effect.filters:
                    found += refusals_of(rule.text, "FORWARD", foreign)
        return tuple(before), tuple(behind)

    def ufw_denials(self, prefix: str) -> tuple[Refusal, ...]:
        """What ufw denies to this host itself, as an administrator told it; not its default."""
        found: list[Refusal] = []
        for name, rules in self.foreign_chains(prefix).items():
            if name in UFW_USER_INPUT:
                found += (each for rule in rules if refuses(rule) for each in refusals_of(rule, name, {}))
        return tuple(found)

    def foreign_chains(self, prefix: str) -> dict[str, tuple[str, ...]]:
        """The chains of the table filter that other programs made."""
        names = Names(prefix)
        return {
            chain.name: tuple(rule.text for rule in rules)
            for chain, rules in self.tables.chains.items()
            if chain.table == "filter" and chain not in self.tables.policies and not names.owns(chain)
        }

    def _conditions(self, rule: SavedRule, table: str) -> tuple[Match, ...] | None:
        """The conditions of a rule; None if unknown."""
        try:
            words = takewhile(lambda word: word not in ("-j", "-g"), split_words(rule.text))
            parsed = parse_rule(list(words), rule.text, table, self.family)
        except (UnknownRule, ValueError):
            return None
        return parsed.conditions if parsed.probability == 1 else None


def _for_answers_only(conditions: tuple[Match, ...] | None) -> bool:
    """Whether a rule is for established flows: no new flow matches it."""
    return any(
        isinstance(each, InState) and not each.negated and "ESTABLISHED" in each.states
        for each in conditions or ()
    )
