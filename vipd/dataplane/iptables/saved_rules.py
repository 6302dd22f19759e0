"""Reads the rules that iptables-save prints, and those that `iptables -S` prints of one chain. Pure.

All readers of such text use it. It does not interpret rules: see `vipd.observe.simulator.iptables`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vipd.dataplane.iptables.names import TABLES, ChainId, Names, Rules
from vipd.dataplane.iptables.plan import Installed
from vipd.dataplane.iptables.words import target_of

_MOST_SHOWN = 80
"""Characters shown of a line that is not understood."""
_LEFT_OUT = re.compile(r"^# Table `(\w+)' is incompatible", re.MULTILINE)
_UNKNOWN_LINE = re.compile(r"^(?!#|\*\S|:\S+ \S|(?:\[\d+:\d+\] )?-A \S|COMMIT$|[ \t]*$).*", re.MULTILINE)
"""A line that iptables-save never prints: such text must not count as no rules, or all would be rewritten."""
_SEARCHED_AT_ONCE = 200_000
"""Characters: some milliseconds."""
_COUNTED = re.compile(r"(.*)(?:^| )-c (\d+) (\d+)((?: -[jg] .*)?)")


class MalformedRulesError(ValueError):
    """The text is not output of iptables-save, or is truncated."""


class Count(NamedTuple):
    """The kernel's counters: for nat rules, which see only the first packet of a flow, new flows."""

    packets: int
    bytes: int

    def __add__(self, other: object) -> Count:
        """Both together."""
        if not isinstance(other, Count):
            return NotImplemented
        return Count(self.packets + other.packets, self.bytes + other.bytes)


class SavedRule(NamedTuple):
    """One rule: its text after `-A CHAIN `, its counters (None if the text has none), and its number in its
    chain, from 1 (0: unknown)."""

    text: str
    counted: Count | None
    number: int = 0

    @property
    def target(self) -> str:
        """The word after `-j` or `-g`: a chain or one of the kernel's targets; empty when it has none."""
        return target_of(self.text)

    @property
    def place(self) -> str:
        """Where it is in its chain: `number 3`; empty if that is unknown."""
        return f"number {self.number}" if self.number else ""


@dataclass(frozen=True, slots=True)
class SavedTables:
    """The chains of all tables, with their rules in order."""

    chains: Mapping[ChainId, tuple[SavedRule, ...]]
    policies: Mapping[ChainId, str]
    """For built-in chains."""

    def rules(self, table: str, chain: str) -> tuple[SavedRule, ...] | None:
        """A chain's rules; None if there is no such chain."""
        return self.chains.get(ChainId(table, chain))


def check_saved(text: str) -> None:
    """Raises MalformedRulesError for a truncated text, or one with a line that iptables-save never prints.

    Takes a fraction of the time of reading it: a tenth of a second for 10,000 services.
    """
    if text.count("\nCOMMIT") != text.count("\n*") + text.startswith("*"):
        raise MalformedRulesError("what it printed has no end")
    start = 0
    while start < len(text):
        # In parts: a search holds Python's lock, in a thread as well.
        end = text.find("\n", start + _SEARCHED_AT_ONCE) + 1 or len(text)
        if unknown := _UNKNOWN_LINE.search(text, start, end):
            raise MalformedRulesError(f"it printed {unknown[0][:_MOST_SHOWN]!r}")
        start = end


def left_out_tables(text: str) -> list[str]:
    """The tables that iptables-nft-save omits because they contain a rule that only nft can show."""
    # Searching a text for a word takes a tenth of the time of trying a pattern at each of its lines.
    return _LEFT_OUT.findall(text) if "# Table `" in text else []


def read_tables(text: str) -> SavedTables:
    """The tables in the output of iptables-save, with `-c` or without, or in the input of iptables-restore,
    where built-in chains need no line. Raises MalformedRulesError."""
    chains: dict[ChainId, list[SavedRule]] = {}
    policies = {}
    for table, line in _table_lines(text):
        if line.startswith(":"):
            name, policy, *_ = [*line[1:].split(" ", 2), ""]
            if not (name and policy):
                raise _unreadable(line)
            chains[ChainId(table, name)] = []
            if policy != "-":
                policies[ChainId(table, name)] = policy
            continue
        rest, counted = split_counters(line)
        name, _, rule = rest[3:].partition(" ")
        if not rest.startswith("-A "):
            raise _unreadable(line)
        rules = chains.setdefault(ChainId(table, name), [])
        rules.append(SavedRule(rule, counted, len(rules) + 1))
    return SavedTables({chain: tuple(rules) for chain, rules in chains.items()}, policies)


def _table_lines(text: str) -> Iterator[tuple[str, str]]:
    """The lines between `*TABLE` and `COMMIT`, each with its table."""
    table = ""
    for line in text.splitlines():
        if line.startswith("*") and not table:
            table = line[1:].strip()
        elif table and line == "COMMIT":
            table = ""
        elif line.strip() and not line.startswith("#"):
            if not table:
                raise _unreadable(line)
            yield table, line
    if table:
        raise MalformedRulesError(f"the table {table} has no end")


def _unreadable(line: str) -> MalformedRulesError:
    return MalformedRulesError(f"the line {line[:_MOST_SHOWN]!r} cannot be read")


def split_counters(line: str) -> tuple[str, Count | None]:
    """A line without the counters that `-c` puts before it, and those counters."""
    if not line.startswith("["):
        return line, None
    packets, _, rest = line[1:].partition(":")
    octets, _, rule = rest.partition("] ")
    if not (packets.isdigit() and octets.isdigit()):
        return line, None
    return rule, Count(int(packets), int(octets))


def listed_rules(output: str, chain: str) -> Rules:
    """The rules in the output of `iptables -S CHAIN`."""
    head = f"-A {chain} "
    return tuple(line.removeprefix(head) for line in output.splitlines() if line.startswith(head))


def listed_policy(output: str, chain: str) -> str:
    """The policy in the output of `iptables -S CHAIN`; empty for a chain without one."""
    head = f"-P {chain} "
    return next((line.removeprefix(head) for line in output.splitlines() if line.startswith(head)), "")


def listed_rule(text: str) -> SavedRule:
    """A rule in the form of `iptables -v -S`: its counters precede the target."""
    found = _COUNTED.fullmatch(text)
    if found is None:
        return SavedRule(text, None)
    return SavedRule(f"{found[1]}{found[4]}".strip(), Count(int(found[2]), int(found[3])))


def read_saved(text: str, names: Names) -> Installed:
    """The chains in a dump: vipd's, the built-in ones (with a policy), and others' of the table filter."""
    rules: dict[ChainId, list[str]] = {}
    builtins: set[ChainId] = set()
    table = ""
    for line in text.splitlines():
        if line.startswith("*") or table not in TABLES:
            table = line[1:].strip() if line.startswith("*") else ""
        elif line.startswith(":"):
            name, policy = line[1:].split(" ", 2)[:2]
            chain = ChainId(table, name)
            if policy != "-":
                builtins.add(chain)
            if chain in builtins or table == "filter" or names.owns(chain):
                rules[chain] = []
        elif line.startswith("-A "):
            name, _, rule = line[3:].partition(" ")
            rules.get(ChainId(table, name), []).append(rule)
    read = {chain: tuple(found) for chain, found in rules.items()}
    return Installed(
        {chain: found for chain, found in read.items() if chain not in builtins and names.owns(chain)},
        {chain: found for chain, found in read.items() if chain in builtins},
        {
            chain.name: found
            for chain, found in read.items()
            if chain not in builtins and not names.owns(chain)
        },
    )
