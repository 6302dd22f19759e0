"""Rules of iptables as values, and where a forwarded flow of vipd ends in them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vipd.dataplane.forward_accept.chain_verdicts import ForwardVerdict
from vipd.dataplane.iptables.words import target_of as word_after_jump
from vipd.model.service import Family

VIPD_COMMENT = '"vipd services"'
"""On vipd's jumps, whatever its prefix."""
STEMS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}

_COMMENT = re.compile(r'-m comment --comment (?:"(?:[^"\\]|\\.)*"|\S+) ?')
_OPENED = re.compile(r"\*(\S+)\s*")
_DECLARED = re.compile(r":(\S+) (\S+)")
_MOST_SHOWN = 80
_PREFIX = re.compile(r"^([A-Z][A-Z0-9]{0,6})-(?:SVC|SEP|SVL|EXT|FW|GRP)-[A-Z2-7]{16}$")
_REFUSALS = ("DROP", "REJECT")


class MalformedRulesError(ValueError):
    """What was to be rules is something else."""


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

    def jumps_to(self, start: str, but: str = "") -> bool:
        """Whether a built-in chain jumps to a chain whose name begins so, and is not `but`."""
        return any(
            target.startswith(start) and target != but
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

    def forward_chain_verdict(self, prefix: str, table: str = "filter") -> ForwardVerdict:
        """What FORWARD of a table does to a new flow that vipd translated, as far as can be told."""
        chain = self.chains.get((table, "FORWARD"), Chain("ACCEPT", ()))
        own = self.chains.get((table, f"{prefix}-FORWARD"), Chain("", ()))
        maybe = False
        for rule in map(_bare, chain.rules):
            target = target_of(rule)
            if target == f"{prefix}-FORWARD" and any(target_of(r) == "ACCEPT" for r in own.rules):
                return ForwardVerdict.PASSES
            unconditional = rule.startswith(("-j", "-g"))
            if target == "ACCEPT" and (unconditional or rule.startswith("-m conntrack --ctstate DNAT -j")):
                return ForwardVerdict.PASSES
            if target in _REFUSALS and unconditional:
                return ForwardVerdict.MAYBE if maybe else ForwardVerdict.BLOCKED
            maybe = maybe or (target == "ACCEPT" and "ESTABLISHED" not in rule)
        if chain.policy == "ACCEPT":
            return ForwardVerdict.PASSES
        return ForwardVerdict.MAYBE if maybe else ForwardVerdict.BLOCKED


def target_of(rule: str) -> str | None:
    """Where an iptables rule leads: a chain, ACCEPT, DROP; None for a rule that only counts."""
    return word_after_jump(rule) or None


def _bare(rule: str) -> str:
    return _COMMENT.sub("", rule)
