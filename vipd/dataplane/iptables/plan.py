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
from itertools import chain as concatenated
from types import MappingProxyType

from vipd.dataplane.iptables.digest import Digest, KnownRules, digest_of, same_rules, text_of
from vipd.dataplane.iptables.jump_order import JumpNeighbours, JumpOrder
from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.restore_text import (
    NFT_BATCHES,
    Batches,
    Group,
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

    chains: dict[ChainId, KnownRules] = field(default_factory=dict)
    """vipd's own chains. The chains of a forwarding have only a digest, except as they were just read."""
    builtins: dict[ChainId, Rules] = field(default_factory=dict)
    """Built-in chains: their rules, of all programs."""
    foreign: dict[str, Rules] = field(default_factory=dict)
    """Other programs' chains of the table filter, as far as they have been read."""
    neighbours: JumpNeighbours = field(default_factory=dict)
    """The rules around vipd's jumps as they were last seen."""

    def keep_digests(self, wanted: Mapping[ChainId, Digest]) -> None:
        """Keep no rules, but the digest, of each chain that is as wanted."""
        found = self.chains
        same = {c: each for c, each in wanted.items() if c in found and digest_of(found[c]) == each}
        # A new dict: this may run in a thread, and the same objects as in `wanted` take less memory.
        self.chains = {**same, **{chain: rules for chain, rules in found.items() if chain not in same}}


@dataclass(frozen=True, slots=True)
class Change:
    """One chain before and after; None where it does not exist."""

    chain: ChainId
    before: KnownRules | None
    after: KnownRules | None
    builtin: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Restores to run in order. `bool()` is False when the kernel is as desired; `str()` is the diff of the
    rules, as far as they are known."""

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
            if change.builtin:
                installed.builtins[change.chain] = text_of(change.after)
                # Jumps that vipd itself deletes are inserted as new ones, if they are wanted again.
                for jump in set(text_of(change.before)) - set(text_of(change.after)):
                    installed.neighbours.pop((change.chain, jump), None)
            elif change.after is None:
                installed.chains.pop(change.chain, None)
            else:
                installed.chains[change.chain] = change.after


def make_plan(
    desired: DesiredChains,
    installed: Installed,
    names: Names,
    batches: Batches = NFT_BATCHES,
    digests: Mapping[ChainId, Digest] = MappingProxyType({}),
) -> Plan:
    """The plan that makes `installed` equal to `desired`, in as few restores as is safe.

    Its changes contain the given digests in place of the rules of these chains.
    """
    chains, changes = installed.chains, list[Change]()
    groups = _changed_groups(desired.service_chains, chains, digests, changes)
    shared = _changed_chains(desired.shared, chains)
    gone = tuple(sorted(chain for chain in desired.obsolete if chain in chains))
    order = JumpOrder(names, installed.foreign, installed.neighbours, desired.first)
    jumps = tuple(_jump_changes(desired.jumps, installed.builtins, order))
    steps = _RestoreBuilder(groups, shared, desired.shared, gone, jumps, chains, batches)
    restores = steps.restores()
    changes += (Change(chain, chains.get(chain), rules) for chain, rules in shared.items())
    changes += (Change(chain, chains[chain], None) for chain in gone)
    changes += (jump.change for jump in jumps)
    return Plan(restores, tuple(changes))


@dataclass(frozen=True, slots=True)
class _JumpChange:
    change: Change
    lines: tuple[str, ...]
    """Deletions of vipd's old jumps, then insertions."""
    has_jumps: bool


@dataclass(frozen=True, slots=True)
class _RestoreBuilder:
    """The parts of a plan, laid out as restore inputs."""

    groups: Iterator[Group]
    shared: Mapping[ChainId, Rules]
    """The shared chains that change."""
    all_shared: Mapping[ChainId, Rules]
    obsolete: Sequence[ChainId]
    jumps: Sequence[_JumpChange]
    installed: Mapping[ChainId, KnownRules]
    batches: Batches

    def restores(self) -> tuple[str, ...]:
        nat = _table("nat", self.shared)
        jumps = self._jump_lines("nat", has_jumps=True) + self._jump_lines("nat", has_jumps=False)
        deletions = delete_blocks(self._obsolete_in("nat"), self.batches.deletions)
        before, after = self._refusals_before(), self._refusals_after()
        first = self._first_groups()
        if sum(map(line_count, first)) <= self.batches.lines:
            # One process for the usual small change; each block is still a separate transaction.
            reachable = write_block("nat", {**joined(first), **nat}, jumps)
            return _nonempty(["".join([before, reachable, *deletions, after])])
        late: list[Group] = []
        batches = [
            *load_blocks(self._early(concatenated(first, self.groups), late), self.installed, self.batches)
        ]
        commit = write_block("nat", {**joined(late), **nat}, jumps)
        return _nonempty([before, *batches, commit, *deletions, after])

    def _first_groups(self) -> list[Group]:
        """All groups, or as many as are too much for one restore."""
        found, lines = list[Group](), 0
        for group in self.groups:
            found.append(group)
            lines += line_count(group)
            if lines > self.batches.lines:
                break
        return found

    def _early(self, groups: Iterable[Group], late: list[Group]) -> Iterator[Group]:
        """The groups to write before the dispatch. `late` gets those that must change in one transaction with
        it: chains that other frontends lead to already. These are few, so the last restore stays small."""
        reached, wanted = _incoming_rules(self.installed), _incoming_rules(self.all_shared)
        for group in groups:
            moved = any(reached.get(c.name) and reached.get(c.name) != wanted.get(c.name) for c in group)
            if moved and any(c in self.installed for c in group):
                late.append(group)
            else:
                yield group

    def _refusals_before(self) -> str:
        """Filter chains with their new rules added and the obsolete ones still there."""
        gaining = {
            chain: (*rules, *self._lost_rules(chain, rules))
            for chain, rules in _table("filter", self.shared).items()
            if chain not in self.installed or not set(rules) <= set(self._before(chain))
        }
        return write_block("filter", gaining, self._jump_lines("filter", has_jumps=True))

    def _refusals_after(self) -> str:
        """Filter chains in their final form, where the first restore left obsolete rules."""
        losing = {
            chain: rules
            for chain, rules in _table("filter", self.shared).items()
            if self._lost_rules(chain, rules) or set(rules) == set(self._before(chain))
        }
        last = self._jump_lines("filter", has_jumps=False)
        return write_block("filter", losing, last) + delete_block(self._obsolete_in("filter"))

    def _lost_rules(self, chain: ChainId, rules: Rules) -> Rules:
        kept = frozenset(rules)
        return tuple(rule for rule in self._before(chain) if rule not in kept)

    def _before(self, chain: ChainId) -> Rules:
        """The installed rules of a shared chain."""
        return text_of(self.installed.get(chain))

    def _jump_lines(self, table: str, has_jumps: bool) -> tuple[str, ...]:
        return tuple(
            line
            for jump in self.jumps
            if jump.change.chain.table == table and jump.has_jumps is has_jumps
            for line in jump.lines
        )

    def _obsolete_in(self, table: str) -> list[ChainId]:
        return [chain for chain in self.obsolete if chain.table == table]


def _changed_groups(
    groups: Iterable[Group],
    installed: Mapping[ChainId, KnownRules],
    digests: Mapping[ChainId, Digest],
    changes: list[Change],
) -> Iterator[Group]:
    """What differs of each group, if anything; adds the changes."""
    for group in groups:
        if changed := _changed_chains(group, installed):
            changes += (Change(c, installed.get(c), digests.get(c, rules)) for c, rules in changed.items())
            yield changed


def _changed_chains(
    wanted: Mapping[ChainId, Rules], installed: Mapping[ChainId, KnownRules]
) -> Mapping[ChainId, Rules]:
    return {
        chain: rules
        for chain, rules in wanted.items()
        if (found := installed.get(chain)) != rules and not same_rules(found, rules)
    }


def _jump_changes(
    wanted: Mapping[ChainId, Rules], builtins: Mapping[ChainId, Rules], order: JumpOrder
) -> Iterator[_JumpChange]:
    """The changes of vipd's jumps that are missing, duplicated, outdated or misplaced."""
    for builtin in sorted(wanted.keys() | builtins.keys()):
        rules, jumps = builtins.get(builtin, ()), wanted.get(builtin, ())
        arrangement = order.arranged(builtin, rules, jumps)
        if arrangement.lines:
            change = Change(builtin, rules, arrangement.rules, builtin=True)
            yield _JumpChange(change, arrangement.lines, bool(jumps))


def _incoming_rules(chains: Mapping[ChainId, KnownRules]) -> Mapping[str, frozenset[str]]:
    """The rules of the nat dispatch that lead to each chain, by that chain's name."""
    ways: dict[str, set[str]] = {}
    for chain, rules in chains.items():
        if chain.table == "nat" and _DISPATCH.search(chain.name):
            for rule in text_of(rules):
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
    before, after = text_of(change.before), text_of(change.after)
    if len(before) + len(after) <= ORDERED_DIFF_MAX_RULES:
        lines = difflib.ndiff(before, after)
        yield from (f"{line[0]} -A {name} {line[2:]}" for line in lines if line[0] in "+-")
        return
    # ndiff also looks for similarities within rules, which takes minutes for thousands.
    kept = Counter(before) & Counter(after)
    yield from (f"- -A {name} {rule}" for rule in (Counter(before) - kept).elements())
    yield from (f"+ -A {name} {rule}" for rule in (Counter(after) - kept).elements())
