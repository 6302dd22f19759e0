"""Tables of chains, built line by line as iptables-restore would build them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vipd.dataplane.iptables.words import split_words
from vipd.model.service import Family
from vipd.observe.simulator.errors import RulesetError, UnknownRule, chains_in_loops
from vipd.observe.simulator.iptables.base_chain import BuiltInChain
from vipd.observe.simulator.iptables.options import Cursor
from vipd.observe.simulator.iptables.rules import Rule, parse_rule
from vipd.observe.simulator.iptables.targets import Jump
from vipd.observe.simulator.outcome import RuleVerdict

BUILT_IN = {
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
}
"""The tables that are traced and the chains the kernel calls in them."""

_ORDER = (("nat", "filter"), ("filter", "nat"))
"""By hook: destinations are translated before the filter, sources after it (input alone has both)."""


@dataclass(slots=True)
class _Table:
    """A table while lines change it."""

    policies: dict[str, RuleVerdict]
    chains: dict[str, list[Rule]]


@dataclass(frozen=True)
class Ruleset:
    """Rules of one family, ready to be traced. Tables that the text does not name are empty."""

    family: Family
    policies: Mapping[str, Mapping[str, RuleVerdict]]
    """Table, built-in chain: the verdict for a packet that no rule decided on."""
    chains: Mapping[str, Mapping[str, tuple[Rule, ...]]] = field(repr=False)
    """Table, chain: its rules in order."""

    def base_chains(self, hook: str) -> list[BuiltInChain]:
        """The built-in chains of a hook in the order of the kernel."""
        name = hook.upper()
        return [
            BuiltInChain(table, name, self.policies[table][name], self.chains[table])
            for table in _ORDER[hook == "input"]
            if name in BUILT_IN[table]
        ]


def parse_ruleset(text: str, family: Family) -> Ruleset:
    """The rules after `text` is restored into an empty network namespace.

    `text` is iptables-save output, restore input of new chains, or several such texts in a row.

    Raises:
        UnknownRule: a rule form is not known, or a rule is in a table other than nat and filter.
        RulesetError: iptables-restore would reject the text: a chain or a COMMIT that is missing, a loop.
    """
    builder = _Builder(family)
    for raw in text.splitlines():
        line = raw.strip()
        if line and not line.startswith("#"):
            builder.read(line)
    return builder.finish()


class _Builder:
    def __init__(self, family: Family) -> None:
        self._family = family
        self._tables = {
            name: _Table(dict.fromkeys(hooks, RuleVerdict.ACCEPT), {hook: [] for hook in hooks})
            for name, hooks in BUILT_IN.items()
        }
        self._open = ""

    def read(self, line: str) -> None:
        """Apply one line."""
        if line.startswith("*"):
            self._begin(line)
        elif not self._open:
            raise RulesetError(line, "line outside a table")
        elif line == "COMMIT":
            self._commit()
        elif self._open not in self._tables:
            if not line.startswith(":"):
                raise UnknownRule(line, f"rule in table {self._open}, which is not traced")
        elif line.startswith(":"):
            self._declare(line)
        else:
            self._append(line)

    def finish(self) -> Ruleset:
        """The ruleset after the last line."""
        if self._open:
            raise RulesetError(f"*{self._open}", "table without COMMIT")
        return Ruleset(
            self._family,
            {name: dict(table.policies) for name, table in self._tables.items()},
            {name: {c: tuple(r) for c, r in table.chains.items()} for name, table in self._tables.items()},
        )

    @property
    def _table(self) -> _Table:
        return self._tables[self._open]

    def _begin(self, line: str) -> None:
        if self._open:
            raise RulesetError(line, f"table {self._open} has no COMMIT before")
        self._open = line[1:].strip()

    def _commit(self) -> None:
        table = self._tables.get(self._open)
        if table is not None:
            _check_jumps(table)
            _check_loops(table)
        self._open = ""

    def _declare(self, line: str) -> None:
        parts = line[1:].split()
        chain, policy = (*parts[:2], "")[:2] if len(parts) > 1 else ("", "")
        if chain in BUILT_IN[self._open]:
            self._set_policy(chain, policy, line)
        elif chain and policy == "-":
            self._table.chains[chain] = []
        else:
            raise RulesetError(line, "chain line is not known", ":CHAIN - [0:0] for a user chain")

    def _set_policy(self, chain: str, policy: str, line: str) -> None:
        if policy == "-":
            return
        if policy not in (RuleVerdict.ACCEPT, RuleVerdict.DROP):
            raise RulesetError(line, f"policy {policy} is not known")
        self._table.policies[chain] = RuleVerdict(policy)

    def _append(self, line: str) -> None:
        try:
            words = split_words(line)
            # `iptables-save -c` puts the counters of a rule first.
            cursor = Cursor(words[1:] if words[0].startswith("[") else words)
            verb, chain = cursor.take(), cursor.take()
            rest = [cursor.take() for _ in iter(cursor.__bool__, False)]
        except ValueError as error:
            raise UnknownRule(line, f"unknown line ({error})") from None
        if verb not in ("-A", "--append"):
            raise UnknownRule(line, "unknown command")
        if chain not in self._table.chains:
            raise RulesetError(line, f"table {self._open} has no chain {chain}")
        self._table.chains[chain].append(parse_rule(rest, line, self._open, self._family))


def _goes_to(rule: Rule) -> str | None:
    return rule.target.chain if isinstance(rule.target, Jump) else None


def _check_jumps(table: _Table) -> None:
    """Every jump has a target: this finds mistyped and unknown ones."""
    for rules in table.chains.values():
        for rule in rules:
            name = _goes_to(rule)
            if name is not None and (name not in table.chains or name in table.policies):
                raise UnknownRule(rule.text, f"unknown rule ({name} is neither a known target nor a chain)")


def _check_loops(table: _Table) -> None:
    """No chain leads back to itself: the kernel rejects such a table."""
    next_of = {
        chain: {name for rule in rules if (name := _goes_to(rule)) in table.chains}
        for chain, rules in table.chains.items()
    }
    if names := chains_in_loops(next_of):
        raise RulesetError("", f"chains form a loop or hang from one: {', '.join(names)}")
