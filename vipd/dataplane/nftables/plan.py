"""Computes the transactions that change the installed table to the wanted one. Pure.

One transaction is atomic: a lookup sees either the table before or the table after. So a change is one, but
large loads write whole forwardings in batches. And a packet makes several lookups: if a service moves to
chains of another kind, a second transaction deletes what the old chains look up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from vipd.dataplane.nftables.base_chains import HOOKS, Hook
from vipd.dataplane.nftables.compile import ElementKey
from vipd.dataplane.nftables.layout import (
    DISPATCH_MAP,
    FORMAT,
    HAIRPIN,
    NUMBER_TO_IPV6,
    UNUSED,
    Rules,
    digest,
)
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.table import Step, Structure

BATCH_ELEMENTS = 60_000
"""Elements in a transaction: nft takes some 1.5 KB of memory for each while it works."""
ELEMENTS_A_COMMAND = 2000

COMMENT_START = "vipd format "
TABLE_COMMENT = f"{COMMENT_START}{FORMAT}"
"""Identifies a table as vipd's, and its format."""

NOTHING = Step((), {}, {})


@dataclass(frozen=True, slots=True)
class FoundChain:
    """A chain as read: its hook (name, number, priority), and the digests in its rules' comments."""

    hook: tuple[int, int] | None
    rules: tuple[str, ...]


@dataclass(slots=True)
class Installed:
    """The known state of the kernel, without the elements of services."""

    comment: str | None = None
    """The table's comment; None while there is no table."""
    sets: dict[str, str] = field(default_factory=dict)
    """Digest of each holder's declaration."""
    chains: dict[str, FoundChain] = field(default_factory=dict)
    dispatch_map: dict[str, str] = field(default_factory=dict)
    """Number -> verdict."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Commands for nft, and changes of elements, which take effect at once."""

    table: str
    commands: str = ""
    parts: Sequence[Step] = ()
    steps: Sequence[Step] = ()
    """Those of the parts that change forwardings."""

    @property
    def size(self) -> int:
        """Number of changed elements."""
        return sum(len(part.deleted) + len(part.added) for part in self.parts)

    def text(self) -> str:
        """The input of `nft -f -`."""
        return self.commands + elements_text(self.table, self.parts)

    def deleted(self) -> Iterator[tuple[ElementKey, str]]:
        """The elements that it deletes."""
        return chain.from_iterable(part.deleted.items() for part in self.parts)

    def added(self) -> Iterator[tuple[ElementKey, str]]:
        """The elements that it adds, after all deletions."""
        return chain.from_iterable(part.added.items() for part in self.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Transactions to run in order. False when the kernel is as wanted; as text, the difference."""

    table: str
    structure: tuple[str, ...] = ()
    """Commands that run first."""
    early: Step = NOTHING
    """Shared elements that are added."""
    steps: tuple[Step, ...] = ()
    late: Step = NOTHING
    """Other shared elements: those that are removed, and claims of addresses."""
    replaces: bool = False
    """The whole table is replaced, and so in one transaction."""
    first: str = ""
    """A transaction before all others."""
    prepares: bool = False
    """The structure is a separate transaction, as are the late elements. A packet that meets the new chains
    when it ends finds them empty, so nothing must lead there yet."""
    installed_after: Installed | None = None
    """The state afterwards, without elements. None: unchanged."""

    def __bool__(self) -> bool:
        return bool(self.structure or self.early or self.steps or self.late)

    def __str__(self) -> str:
        lines = [f"{command}\n" for command in self.structure]
        for step in (self.early, *self.steps, self.late):
            lines += [f"-{_slot_text(slot, value)}\n" for slot, value in step.deleted.items()]
            lines += [f"+{_slot_text(slot, value)}\n" for slot, value in step.added.items()]
            lines += [f"-{_slot_text(slot, value)}\n" for slot, value in step.deferred_deletes.items()]
        return "".join(lines)

    def transactions(self) -> Iterator[Transaction]:
        """Each transaction. `deferred_deletes` come after them."""
        batches = [list(self.steps)] if self.replaces else list(_batches(self.steps)) or [[]]
        common = self.without_steps()
        if self.first:
            yield Transaction(self.table, self.first)
        if self.prepares:
            yield common
            common = Transaction(self.table)
            # A packet that looks up its frontend before a transaction, and the claim after it, is refused.
            batches.append([])
        for number, batch in enumerate(batches, 1):
            late = (self.late,) if number == len(batches) else ()
            parts = (*common.parts, *batch, *late)
            found = Transaction(self.table, common.commands, parts, batch)
            if found.commands or found.size:
                yield found
            common = Transaction(self.table)

    def deferred_deletes(self) -> Iterator[str]:
        """The transactions, for `nft -f -`, that delete elements which packets may have been about to look
        up."""
        parting = chain.from_iterable(step.deferred_deletes.items() for step in self.steps)
        while found := dict(islice(parting, BATCH_ELEMENTS)):
            yield elements_text(self.table, [Step((), found, {})])

    def without_steps(self) -> Transaction:
        """The first transaction without the steps of forwardings."""
        commands = "".join(f"{command}\n" for command in self.structure)
        return Transaction(self.table, commands, (self.early,))


def make_plan(
    options: TableOptions, desired: Structure, installed: Installed, steps: Sequence[Step], shared: Step
) -> Plan:
    """The plan that makes the kernel as wanted. `steps` and `shared` are differences of elements; if the
    table must be replaced (see `must_replace`) they must be relative to an empty one."""
    table = options.table
    if not desired.chains:
        gone = (f"delete table {table}",) if installed.comment is not None else ()
        return Plan(table, gone, installed_after=Installed())
    replaces = must_replace(options, desired, installed)
    base = Installed() if replaces else installed
    commands = [f"delete table {table}"] if replaces else []
    commands += structure_commands(options, desired, base)
    needed = {
        slot: v for slot, v in shared.added.items() if slot.set_name in (HAIRPIN.name, NUMBER_TO_IPV6.name)
    }
    rest = {slot: value for slot, value in shared.added.items() if slot not in needed}
    return Plan(
        table,
        tuple(commands),
        Step((), {}, needed),
        tuple(merge_dependent_steps(steps)),
        Step((), shared.deleted, rest),
        replaces,
        _drop_during_replace(table, installed) if replaces else "",
        prepares=not replaces and bool(steps) and bool(desired.chains.keys() - installed.chains.keys()),
        installed_after=_afterwards(options, desired, base),
    )


def _drop_during_replace(table: str, installed: Installed) -> str:
    """Drops packets that would be refused, so that their clients retransmit. Deleting a table empties its
    maps, but not its sets: a packet in it would count as one for an unused port."""
    there = UNUSED in installed.chains
    return f"flush chain {table} {UNUSED}\nadd rule {table} {UNUSED} drop\n" if there else ""


def must_replace(options: TableOptions, wanted: Structure, installed: Installed) -> bool:
    """Whether there is a table that cannot be repaired piece by piece."""
    if installed.comment is None:
        return False
    digests = {name: holder.digest(options.family) for name, holder in wanted.sets.items()}
    other = any(installed.sets.get(name, right) != right for name, right in digests.items())
    hooks = any(
        name in installed.chains and installed.chains[name].hook != _hooked(HOOKS.get(name))
        for name in wanted.chains
    )
    return installed.comment != TABLE_COMMENT or other or hooks


def structure_commands(options: TableOptions, wanted: Structure, installed: Installed) -> list[str]:
    """Commands for missing holders, and for chains and numbers that are missing or wrong."""
    table, commands = options.table, []
    if installed.comment is None:
        commands.append(f'add table {table} {{ comment "{TABLE_COMMENT}"; }}')
    for name, holder in wanted.sets.items():
        if name not in installed.sets:
            commands.append(f"add {holder.kind} {table} {name} {{ {holder.declaration(options.family)} }}")
    wrong = {name: rules for name, rules in wanted.chains.items() if not _right(name, rules, installed)}
    for name in wrong:
        if name in installed.chains:
            commands.append(f"flush chain {table} {name}")
        else:
            hook = HOOKS.get(name)
            commands.append(f"add chain {table} {name}" + (f" {{ {hook} }}" if hook else ""))
    commands += [
        f'add rule {table} {name} {rule} comment "{digest(rule)}"'
        for name, rules in wrong.items()
        for rule in rules
    ]
    return commands + _dispatch_commands(options, wanted, installed)


def _dispatch_commands(options: TableOptions, wanted: Structure, installed: Installed) -> list[str]:
    wrong = {
        n: verdict for n, verdict in wanted.dispatch_map.items() if installed.dispatch_map.get(n) != verdict
    }
    place = f"element {options.table} {DISPATCH_MAP.name}"
    commands = [f"delete {place} {{ {number} }}" for number in wrong if number in installed.dispatch_map]
    return commands + [f"add {place} {{ {number} : {verdict} }}" for number, verdict in wrong.items()]


def removals(options: TableOptions, wanted: Structure, installed: Installed) -> tuple[str, ...]:
    """Transactions that delete the holders and chains that nothing needs any more: first whatever leads to
    those chains, then they themselves."""
    table = options.table
    chains = sorted(installed.chains.keys() - wanted.chains.keys())
    holders = sorted(installed.sets.keys() - wanted.sets.keys())
    numbers = ", ".join(sorted(installed.dispatch_map.keys() - wanted.dispatch_map.keys()))
    emptied = [f"delete element {table} {DISPATCH_MAP.name} {{ {numbers} }}\n"] if numbers else []
    emptied += [f"flush chain {table} {name}\n" for name in chains]
    emptied += [f"delete set {table} {name}\n" for name in holders]
    return tuple(
        text
        for text in ("".join(emptied), "".join(f"delete chain {table} {name}\n" for name in chains))
        if text
    )


def merge_dependent_steps(steps: Sequence[Step]) -> Iterator[Step]:
    """The same steps; steps that move an element between forwardings are merged into one."""
    leaving = {
        slot: number for number, step in enumerate(steps) for slot in (*step.deleted, *step.deferred_deletes)
    }
    if not leaving:
        yield from steps
        return
    tied = {
        tie
        for number, step in enumerate(steps)
        for slot in step.added
        if (other := leaving.get(slot, number)) != number
        for tie in (number, other)
    }
    for number, step in enumerate(steps):
        if number not in tied:
            yield step
    if tied:
        parts = [steps[number] for number in sorted(tied)]
        added = {slot: value for step in parts for slot, value in step.added.items()}
        parting = {slot: value for step in parts for slot, value in step.deferred_deletes.items()}
        deleted = {slot: value for slot, value in parting.items() if slot in added}
        deleted.update({slot: value for step in parts for slot, value in step.deleted.items()})
        keys = tuple(key for step in parts for key in step.keys)
        late = {slot: value for slot, value in parting.items() if slot not in added}
        yield replace(Step.between(keys, deleted, added), deferred_deletes=late)


def elements_text(table: str, steps: Iterable[Step]) -> str:
    """Commands that delete and add the elements of some steps, all deletions first. Excludes `parting`."""
    deleted: dict[str, list[str]] = {}
    added: dict[str, list[str]] = {}
    for step in steps:
        for slot in step.deleted:
            deleted.setdefault(slot.set_name, []).append(slot.key)
        for slot, value in step.added.items():
            added.setdefault(slot.set_name, []).append(f"{slot.key} : {value}" if value else slot.key)
    return "".join((*_commands("delete", table, deleted), *_commands("add", table, added)))


def _commands(verb: str, table: str, found: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for holder, elements in found.items():
        for at in range(0, len(elements), ELEMENTS_A_COMMAND):
            listed = ", ".join(elements[at : at + ELEMENTS_A_COMMAND])
            yield f"{verb} element {table} {holder} {{ {listed} }}\n"


def _batches(steps: Iterable[Step]) -> Iterator[list[Step]]:
    batch: list[Step] = []
    size = 0
    for step in steps:
        batch.append(step)
        size += len(step.deleted) + len(step.added)
        if size >= BATCH_ELEMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _afterwards(options: TableOptions, wanted: Structure, installed: Installed) -> Installed:
    holders = {name: holder.digest(options.family) for name, holder in wanted.sets.items()}
    chains = {name: found_chain(name, rules) for name, rules in wanted.chains.items()}
    return Installed(
        TABLE_COMMENT,
        {**installed.sets, **holders},
        {**installed.chains, **chains},
        {**installed.dispatch_map, **wanted.dispatch_map},
    )


def found_chain(name: str, rules: Rules) -> FoundChain:
    """A chain as it will be read once these rules are written."""
    return FoundChain(_hooked(HOOKS.get(name)), tuple(digest(rule) for rule in rules))


def _right(name: str, rules: Rules, installed: Installed) -> bool:
    return installed.chains.get(name) == found_chain(name, rules)


def _hooked(hook: Hook | None) -> tuple[int, int] | None:
    return (hook.number, hook.priority) if hook else None


def _slot_text(slot: ElementKey, value: str) -> str:
    return f"{slot.set_name} {slot.key}" + (f" : {value}" if value else "")
