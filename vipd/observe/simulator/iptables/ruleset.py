"""Tables of chains, built line by line as iptables-restore --noflush would build them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vipd.dataplane.iptables.words import split_words
from vipd.model.service import Family
from vipd.observe.simulator.errors import RulesetError, UnknownRule, chains_in_loops
from vipd.observe.simulator.iptables.base_chain import BuiltInChain
from vipd.observe.simulator.iptables.matches import OverLimit, RecentlySeen
from vipd.observe.simulator.iptables.options import Cursor, number
from vipd.observe.simulator.iptables.rules import WITHOUT_VERDICT, Rule, parse_rule, partial_rule
from vipd.observe.simulator.iptables.targets import Jump, Opaque
from vipd.observe.simulator.outcome import RuleVerdict

BUILT_IN = {
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
}
"""The tables that are traced and the chains the kernel calls in them."""

OTHERS_BUILT_IN = {
    "raw": ("PREROUTING", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    **BUILT_IN,
    "security": ("INPUT", "FORWARD", "OUTPUT"),
}
"""The same of all tables, which other programs use."""

_PRIORITIES = {"raw": -300, "mangle": -150, "filter": 0, "security": 50}
"""include/uapi/linux/netfilter_ipv4.h; the table nat has one for destinations and one for sources."""
_NAT = {"PREROUTING": -100, "OUTPUT": -100, "INPUT": 100, "POSTROUTING": 100}

_MAX_RULES = 2**31


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
        found = [
            BuiltInChain(
                table, name, policies[name], self.chains[table], _PRIORITIES.get(table, _NAT.get(name, 0))
            )
            for table, policies in self.policies.items()
            if name in policies
        ]
        return sorted(found, key=lambda chain: chain.priority)


def parse_ruleset(text: str, family: Family, *, strict: bool = True, prefix: str = "") -> Ruleset:
    """The rules after `text` is restored with --noflush into an empty network namespace.

    `text` is iptables-save output, restore input, or several such texts in a row. With `strict` off, an
    unknown rule raises only when a packet reaches it that meets all of its conditions that are known, and all
    tables are traced: for hosts with rules of other programs. What such a rule remembers of clients, or
    counts, is unknown, unless its chain's name has vipd's `prefix`.

    Raises:
        UnknownRule: a rule form is not known, or a rule is in a table other than nat and filter.
        RulesetError: iptables-restore would reject the text: a chain that is missing or still in use,
            a missing COMMIT, a loop.
    """
    builder = _Builder(family, strict, prefix)
    for raw in text.splitlines():
        line = raw.strip()
        if line and not line.startswith("#"):
            builder.read(line)
    return builder.finish()


class _Builder:
    def __init__(self, family: Family, strict: bool, prefix: str) -> None:
        self._family = family
        self._strict = strict
        self._own = f"{prefix}-"
        self._tables = {
            name: _Table(dict.fromkeys(hooks, RuleVerdict.ACCEPT), {hook: [] for hook in hooks})
            for name, hooks in (BUILT_IN if strict else OTHERS_BUILT_IN).items()
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
            self._command(line)

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
            if self._strict:
                _check_jumps(table)
            _check_loops(table)
        self._open = ""

    def _declare(self, line: str) -> None:
        parts = line[1:].split()
        chain, policy = (*parts[:2], "")[:2] if len(parts) > 1 else ("", "")
        if chain in self._table.policies:
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

    def _command(self, line: str) -> None:
        try:
            words = split_words(line)
            # `iptables-save -c` puts the counters of a rule first.
            cursor = Cursor(words[1:] if words[0].startswith("[") else words)
            verb, chain = cursor.take(), cursor.take()
            rest = [cursor.take() for _ in iter(cursor.__bool__, False)]
        except ValueError as error:
            raise UnknownRule(line, f"unknown line ({error})") from None
        if verb in ("-N", "--new-chain"):
            return self._create(chain, line)
        if chain not in self._table.chains:
            raise RulesetError(line, f"table {self._open} has no chain {chain}")
        return self._change(verb, chain, rest, line)

    def _change(self, verb: str, chain: str, rest: list[str], line: str) -> None:
        match verb:
            case "-A" | "--append":
                self._table.chains[chain].append(self._rule(chain, rest, line))
            case "-I" | "--insert":
                self._insert(chain, rest, line)
            case "-D" | "--delete":
                self._delete(chain, rest, line)
            case "-F" | "--flush" if not rest:
                self._table.chains[chain].clear()
            case "-X" | "--delete-chain" if not rest:
                self._remove(chain, line)
            case "-P" | "--policy" if len(rest) == 1 and chain in self._table.policies:
                self._set_policy(chain, rest[0], line)
            case _:
                raise UnknownRule(line, "unknown command")

    def _create(self, chain: str, line: str) -> None:
        if chain in self._table.chains:
            raise RulesetError(line, f"chain {chain} is there already")
        self._table.chains[chain] = []

    def _insert(self, chain: str, rest: list[str], line: str) -> None:
        rules = self._table.chains[chain]
        place, rest = _place(rest)
        place = 1 if place is None else place
        if not 1 <= place <= len(rules) + 1:
            raise RulesetError(line, f"chain {chain} has no place {place}")
        rules.insert(place - 1, self._rule(chain, rest, line))

    def _delete(self, chain: str, rest: list[str], line: str) -> None:
        rules = self._table.chains[chain]
        place, rest = _place(rest)
        if place is not None and (rest or not 1 <= place <= len(rules)):
            raise RulesetError(line, f"chain {chain} has no rule {place}")
        if place is not None:
            del rules[place - 1]
            return
        rule = self._rule(chain, rest, line)
        if rule not in rules:
            raise RulesetError(line, f"chain {chain} has no such rule")
        rules.remove(rule)

    def _remove(self, chain: str, line: str) -> None:
        if chain in self._table.policies:
            raise RulesetError(line, f"{chain} is a built-in chain")
        if self._table.chains[chain]:
            raise RulesetError(line, f"chain {chain} is not empty")
        if any(_goes_to(rule) == chain for rules in self._table.chains.values() for rule in rules):
            raise RulesetError(line, f"chain {chain} is still jumped to")
        del self._table.chains[chain]

    def _rule(self, chain: str, words: list[str], line: str) -> Rule:
        try:
            rule = parse_rule(words, line, self._open, self._family)
        except UnknownRule as error:
            if self._strict:
                raise
            return partial_rule(words, line, self._open, self._family, error.why)
        if self._strict or chain.startswith(self._own):
            return rule
        if isinstance(rule.target, Jump) and rule.target.chain in WITHOUT_VERDICT:
            return replace(rule, target=None)
        known = tuple(m for m in rule.matches if not isinstance(m, RecentlySeen | OverLimit))
        if len(known) == len(rule.matches):
            return rule
        return Rule(line, known, rule.target and Opaque(tuple(words), "it depends on earlier packets"))


def _place(words: list[str]) -> tuple[int | None, list[str]]:
    if words and words[0].isdigit():
        return number(words[0], _MAX_RULES), words[1:]
    return None, words


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
