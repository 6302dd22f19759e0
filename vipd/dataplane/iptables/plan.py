"""Computes the restores that change the installed rules to the wanted ones. Pure.

Make before break, in an order in which no packet meets a partly programmed service (guarantee G1):
refusals that become needed, new and changed leaf chains, the one restore that makes them reachable, chains
that are no longer reachable, refusals no longer needed. A refusal and a translation may coexist:
a translated packet no longer has the address that the refusal matches.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.restore_text import (
    NFT_BATCHES,
    Batches,
    delete_block,
    delete_blocks,
    joined,
    line_count,
    load_blocks,
    write_block,
)
from vipd.dataplane.iptables.ruleset import DesiredChains
from vipd.dataplane.iptables.words import target_of

ORDERED_DIFF_MAX_RULES = 200
"""Above this many rules (old plus new), the diff of a chain ignores their order: an ordered diff is too slow.
"""

_DISPATCH = re.compile(r"-(SERVICES|NODEPORTS|GRP-\w+)$")
"""The chains that lead to a service port's own chains."""


@dataclass(slots=True)
class Installed:
    """The known state of one family in the kernel."""

    chains: dict[ChainId, Rules] = field(default_factory=dict)
    """vipd's own chains."""
    builtins: dict[ChainId, Rules] = field(default_factory=dict)
    """Built-in chains: their rules, of all programs."""


@dataclass(frozen=True, slots=True)
class Change:
    """One chain before and after; None where it does not exist."""

    chain: ChainId
    before: Rules | None
    after: Rules | None
    builtin: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Restores to run in order. `bool()` is False when the kernel is as desired; `str()` is the diff of the
    rules."""

    restores: tuple[str, ...] = ()
    """Complete inputs for `iptables-restore --noflush`."""
    changes: tuple[Change, ...] = ()
    other_variant: Plan | None = None
    """Runs afterwards: removes vipd's rules from the other iptables variant."""

    def __bool__(self) -> bool:
        return bool(self.changes or self.other_variant)

    def __str__(self) -> str:
        former = f"# in the other iptables variant\n{self.other_variant}" if self.other_variant else ""
        return "".join(f"{line}\n" for change in self.changes for line in _difference(change)) + former

    def record_applied(self, installed: Installed) -> None:
        """Record in `installed` that this plan was written."""
        for change in self.changes:
            holder = installed.builtins if change.builtin else installed.chains
            if change.after is None:
                holder.pop(change.chain, None)
            else:
                holder[change.chain] = change.after


def make_plan(
    desired: DesiredChains, installed: Installed, names: Names, batches: Batches = NFT_BATCHES
) -> Plan:
    """The plan that makes `installed` equal to `desired`, in as few restores as is safe."""
    chains = installed.chains
    groups = tuple(changed for group in desired.service_chains if (changed := _changed_chains(group, chains)))
    shared = _changed_chains(desired.shared, chains)
    gone = tuple(sorted(chain for chain in desired.obsolete if chain in chains))
    jumps = tuple(_jump_changes(desired.jumps, installed.builtins, names))
    written = [item for group in (*groups, shared) for item in group.items()]
    changes = (
        *(Change(chain, chains.get(chain), rules) for chain, rules in written),
        *(Change(chain, chains[chain], None) for chain in gone),
        *(jump.change for jump in jumps),
    )
    steps = _RestoreBuilder(groups, shared, desired.shared, gone, jumps, chains, batches)
    return Plan(steps.restores(), changes)


@dataclass(frozen=True, slots=True)
class _JumpChange:
    change: Change
    lines: tuple[str, ...]
    """Deletions of vipd's old jumps, then insertions at the head."""
    has_jumps: bool


@dataclass(frozen=True, slots=True)
class _RestoreBuilder:
    """The parts of a plan, laid out as restore inputs."""

    groups: Sequence[Mapping[ChainId, Rules]]
    shared: Mapping[ChainId, Rules]
    """The shared chains that change."""
    all_shared: Mapping[ChainId, Rules]
    obsolete: Sequence[ChainId]
    jumps: Sequence[_JumpChange]
    installed: Mapping[ChainId, Rules]
    batches: Batches

    def restores(self) -> tuple[str, ...]:
        nat = _table("nat", self.shared)
        jumps = self._jump_lines("nat", has_jumps=True) + self._jump_lines("nat", has_jumps=False)
        deletions = delete_blocks(self._obsolete_in("nat"), self.batches.deletions)
        before, after = self._refusals_before(), self._refusals_after()
        if sum(map(line_count, self.groups)) <= self.batches.lines:
            # One process for the usual small change; each block is still a separate transaction.
            reachable = write_block("nat", {**joined(self.groups), **nat}, jumps)
            return _nonempty(["".join([before, reachable, *deletions, after])])
        early, late = self._split_by_reachability()
        batches = load_blocks(early, self.installed, self.batches)
        commit = write_block("nat", {**joined(late), **nat}, jumps)
        return _nonempty([before, *batches, commit, *deletions, after])

    def _split_by_reachability(self) -> tuple[list[Mapping[ChainId, Rules]], list[Mapping[ChainId, Rules]]]:
        """The groups to write before the dispatch, and those that must change in one transaction with it:
        chains that other frontends lead to already. These are few, so the last restore stays small."""
        reached, wanted = _incoming_rules(self.installed), _incoming_rules(self.all_shared)
        early: list[Mapping[ChainId, Rules]] = []
        late: list[Mapping[ChainId, Rules]] = []
        for group in self.groups:
            moved = any(reached.get(c.name) and reached.get(c.name) != wanted.get(c.name) for c in group)
            (late if moved and any(c in self.installed for c in group) else early).append(group)
        return early, late

    def _refusals_before(self) -> str:
        """Filter chains with their new rules added and the obsolete ones still there."""
        gaining = {
            chain: (*rules, *self._lost_rules(chain, rules))
            for chain, rules in _table("filter", self.shared).items()
            if chain not in self.installed or not set(rules) <= set(self.installed[chain])
        }
        return write_block("filter", gaining, self._jump_lines("filter", has_jumps=True))

    def _refusals_after(self) -> str:
        """Filter chains in their final form, where the first restore left obsolete rules."""
        losing = {
            chain: rules
            for chain, rules in _table("filter", self.shared).items()
            if self._lost_rules(chain, rules) or set(rules) == set(self.installed.get(chain, ()))
        }
        last = self._jump_lines("filter", has_jumps=False)
        return write_block("filter", losing, last) + delete_block(self._obsolete_in("filter"))

    def _lost_rules(self, chain: ChainId, rules: Rules) -> Rules:
        kept = frozenset(rules)
        return tuple(rule for rule in self.installed.get(chain, ()) if rule not in kept)

    def _jump_lines(self, table: str, has_jumps: bool) -> tuple[str, ...]:
        return tuple(
            line
            for jump in self.jumps
            if jump.change.chain.table == table and jump.has_jumps is has_jumps
            for line in jump.lines
        )

    def _obsolete_in(self, table: str) -> list[ChainId]:
        return [chain for chain in self.obsolete if chain.table == table]


def _changed_chains(
    wanted: Mapping[ChainId, Rules], installed: Mapping[ChainId, Rules]
) -> Mapping[ChainId, Rules]:
    return {chain: rules for chain, rules in wanted.items() if installed.get(chain) != rules}


def _jump_changes(
    wanted: Mapping[ChainId, Rules], builtins: Mapping[ChainId, Rules], names: Names
) -> Iterator[_JumpChange]:
    """The changes of vipd's jumps that are missing, duplicated, outdated or not first in their chain."""
    for builtin in sorted(wanted.keys() | builtins.keys()):
        rules, jumps = builtins.get(builtin, ()), wanted.get(builtin, ())
        ours = [rule for rule in rules if names.owns(ChainId(builtin.table, target_of(rule)))]
        if tuple(ours) == jumps and rules[: len(jumps)] == jumps:
            continue
        after = (*jumps, *(rule for rule in rules if rule not in ours))
        lines = (
            *(f"-D {builtin.name} {rule}" for rule in ours),
            *(f"-I {builtin.name} {place} {rule}" for place, rule in enumerate(jumps, 1)),
        )
        yield _JumpChange(Change(builtin, rules, after, builtin=True), lines, bool(jumps))


def _incoming_rules(chains: Mapping[ChainId, Rules]) -> Mapping[str, frozenset[str]]:
    """The rules of the nat dispatch that lead to each chain, by that chain's name."""
    ways: dict[str, set[str]] = {}
    for chain, rules in chains.items():
        if chain.table == "nat" and _DISPATCH.search(chain.name):
            for rule in rules:
                ways.setdefault(target_of(rule), set()).add(rule)
    return {target: frozenset(rules) for target, rules in ways.items()}


def _table(table: str, chains: Mapping[ChainId, Rules]) -> Mapping[ChainId, Rules]:
    return {chain: rules for chain, rules in chains.items() if chain.table == table}


def _nonempty(restores: Iterable[str]) -> tuple[str, ...]:
    return tuple(restore for restore in restores if restore)


def _difference(change: Change) -> Iterator[str]:
    """The change as lines of a diff, in the spelling of iptables-save."""
    table, name = change.chain
    yield f"{table} {name}" + (
        " (new)" if change.before is None else " (removed)" if change.after is None else ""
    )
    before, after = change.before or (), change.after or ()
    if len(before) + len(after) <= ORDERED_DIFF_MAX_RULES:
        lines = difflib.ndiff(before, after)
        yield from (f"{line[0]} -A {name} {line[2:]}" for line in lines if line[0] in "+-")
        return
    # ndiff also looks for similarities within rules, which takes minutes for thousands.
    kept = Counter(before) & Counter(after)
    yield from (f"- -A {name} {rule}" for rule in (Counter(before) - kept).elements())
    yield from (f"+ -A {name} {rule}" for rule in (Counter(after) - kept).elements())
