"""The transactions that change a table as a difference of objects says. Pure.

One transaction is atomic: a lookup sees either the table before or the table after. But a packet makes
several lookups, and large loads take several transactions. So there is one order by class of object: sets,
chains and their numbers; what rules look up last; what leads there; what services share; and the deletion of
what only a packet from before looks up. After each of them every packet finds a whole way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import islice
from types import MappingProxyType

from vipd.dataplane.engine import Difference, ObjectId, Objects
from vipd.dataplane.nftables.base_chains import HOOKS
from vipd.dataplane.nftables.layout import (
    CLAIMED,
    DISPATCH_MAP,
    FRONTENDS,
    HAIRPIN,
    NODE_PORTS,
    NUMBER_TO_IPV6,
    PINGED,
    REPLY_FRONTENDS,
    REPLY_SOURCES,
    TABLE_COMMENT,
    UNUSED,
    NftSet,
    digest,
)
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.table import CHAIN, SET

BATCH_ELEMENTS = 60_000
"""Elements in a transaction: nft takes some 1.5 KB of memory for each while it works."""
ELEMENTS_A_COMMAND = 2000


class Class(IntEnum):
    """Classes of objects, in the order in which they are added."""

    STRUCTURE = 0
    """Sets, chains and their numbers: commands for nft."""
    EARLY = 1
    """Shared elements that must be there before anything leads to them."""
    TARGETS = 2
    """What rules look up last."""
    LEADING = 3
    """The elements that packets meet first."""
    LATE = 4
    """Other shared elements."""


_STRUCTURE = (SET, CHAIN, DISPATCH_MAP.name)
_CLASSES = {
    **dict.fromkeys(_STRUCTURE, Class.STRUCTURE),
    **dict.fromkeys((HAIRPIN.name, NUMBER_TO_IPV6.name), Class.EARLY),
    **dict.fromkeys((FRONTENDS.name, NODE_PORTS.name), Class.LEADING),
    **dict.fromkeys((PINGED.name, CLAIMED.name, REPLY_SOURCES.name, REPLY_FRONTENDS.name), Class.LATE),
}
"""By kind; all others are targets."""


def by_class(objects: Objects) -> list[dict[ObjectId, str]]:
    """The objects of each class."""
    parts: list[dict[ObjectId, str]] = [{} for _ in Class]
    for name, text in objects.items():
        parts[_CLASSES.get(name[0], Class.TARGETS)][name] = text
    return parts


@dataclass(frozen=True, slots=True)
class Transaction:
    """Commands for nft, then deletions and additions of elements, which take effect at once."""

    table: str
    commands: str = ""
    deleted: Objects = field(default_factory=dict)
    added: Objects = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of changed elements."""
        return len(self.deleted) + len(self.added)

    def __add__(self, other: Transaction) -> Transaction:
        """Both in one."""
        deleted, added = {**self.deleted, **other.deleted}, {**self.added, **other.added}
        return Transaction(self.table, self.commands + other.commands, deleted, added)

    def text(self) -> str:
        """The input of `nft -f -`."""
        return self.commands + elements_text(self.table, self.deleted, self.added)


@dataclass(frozen=True, slots=True)
class Plan:
    """A change of the table. False when the kernel is as wanted; as text, the difference."""

    options: TableOptions
    change: Difference = field(default_factory=Difference)
    sets: Mapping[str, NftSet] = field(default_factory=dict)
    exists: bool = True
    """There is a table of the right format."""
    obstacle: Objects = field(default_factory=dict)
    """The objects of a table that has to be deleted first."""
    parts_late: bool = False
    """Elements that nothing leads to are deleted in a separate transaction: packets may still look them
    up."""

    def __bool__(self) -> bool:
        return bool(self.change or self.obstacle)

    def __str__(self) -> str:
        lines = [f"delete table {self.options.table}"] if self.obstacle else []
        lines += self._commands(self.structure())
        for sign, objects in (("-", self.change.removed), ("+", self.change.added)):
            lines += [
                f"{sign}{kind} {name}" + (f" : {value}" if value else "")
                for (kind, name), value in objects.items()
                if kind not in _STRUCTURE
            ]
        return "".join(f"{line}\n" for line in lines)

    @property
    def replaces(self) -> bool:
        """Whether the whole table is replaced, and so in one transaction."""
        return bool(self.obstacle and self.change.added)

    def transactions(self) -> Iterator[Transaction]:
        """Each transaction but those of `parting`."""
        table = self.options.table
        structure = self.structure()
        commands = "".join(f"{command}\n" for command in self._commands(structure))
        if self.obstacle:
            if self.replaces and (CHAIN, UNUSED) in self.obstacle:
                # Deleting a table empties its maps, but not its sets: a packet in it would count as one for
                # an unused port. If it is dropped, its client retransmits.
                yield Transaction(table, f"flush chain {table} {UNUSED}\nadd rule {table} {UNUSED} drop\n")
            _, *elements = by_class(self.change.added)
            added = {name: value for part in elements for name, value in part.items()}
            yield Transaction(table, f"delete table {table}\n{commands}", {}, added)
            return
        yield from self._in_order(commands, structure)

    def _in_order(self, commands: str, structure: Objects) -> Iterator[Transaction]:
        _, early, targets, leading, late = by_class(self.change.added)
        gone = {n: v for n, v in self.change.removed.items() if n not in self.change.added}
        _, early_gone, parting, ways, late_gone = by_class(gone)
        first, last = self._replacing(early), self._replacing(late, {**early_gone, **late_gone})
        batches = list(self._batches(targets, leading, ways, {} if self.parts_late else parting))
        if batches and any(n[0] == CHAIN and n not in self.change.removed for n in structure):
            # A packet that meets a new chain when it is written finds it empty, so nothing must lead there
            # yet; one that looks up its frontend before a transaction, and its claim after it, is refused.
            parts = [replace(first, commands=commands), *batches, last]
        else:
            parts = batches or [Transaction(self.options.table)]
            parts[0] = replace(first + parts[0], commands=commands)
            parts[-1] += last
        yield from (part for part in parts if part.commands or part.size)

    def _batches(
        self, targets: Objects, leading: Objects, ways: Objects, rest: Objects
    ) -> Iterator[Transaction]:
        """The elements of forwardings: what is looked up last, what leads there, and what goes: ways there,
        then the rest."""
        size = len(targets) + len(leading) + len(ways) + len(rest)
        if size > BATCH_ELEMENTS:
            for part in (*_parts(targets), *_parts(leading)):
                yield self._replacing(part)
            for part in (*_parts(ways), *_parts(rest)):
                yield Transaction(self.options.table, "", part)
        elif size:
            yield self._replacing({**targets, **leading}, {**ways, **rest})

    def _replacing(self, added: Objects, gone: Objects = MappingProxyType({})) -> Transaction:
        """The addition of elements in place of those with their keys, and the deletion of others."""
        removed = self.change.removed
        replaced = {name: removed[name] for name in added if name in removed} if removed else {}
        return Transaction(self.options.table, "", {**replaced, **gone}, added)

    def parting(self) -> Iterator[str]:
        """The transactions, for `nft -f -`, that come last: they delete elements which packets may have been
        about to look up."""
        if self.parts_late and not self.obstacle:
            added = self.change.added
            gone = {n: v for n, v in self.change.removed.items() if n not in added}
            for part in _parts(by_class(gone)[Class.TARGETS]):
                yield elements_text(self.options.table, part, {})

    def structure(self) -> dict[ObjectId, str]:
        """The objects that the commands of the first transaction write."""
        return {name: text for name, text in self.change.added.items() if name[0] in _STRUCTURE}

    def _commands(self, added: Objects) -> list[str]:
        """Commands for the table, its sets, its chains and their numbers, as far as they are added."""
        table, removed = self.options.table, self.change.removed
        if not added:
            return []
        commands = (
            []
            if self.exists and not self.obstacle
            else [f'add table {table} {{ comment "{TABLE_COMMENT}"; }}']
        )
        names = [name for kind, name in added if kind == SET]
        for nft_set in map(self.sets.__getitem__, names):
            commands.append(
                f"add {nft_set.kind} {table} {nft_set.name} {{ {nft_set.declaration(self.options.family)} }}"
            )
        chains = {name: text for (kind, name), text in added.items() if kind == CHAIN}
        for name in chains:
            if (CHAIN, name) in removed:
                commands.append(f"flush chain {table} {name}")
            else:
                hook = HOOKS.get(name)
                commands.append(f"add chain {table} {name}" + (f" {{ {hook} }}" if hook else ""))
        commands += [
            f'add rule {table} {name} {rule} comment "{digest(rule)}"'
            for name, text in chains.items()
            for rule in text.split("\n")[1:]
        ]
        numbers = {name: value for (kind, name), value in added.items() if kind == DISPATCH_MAP.name}
        place = f"element {table} {DISPATCH_MAP.name}"
        commands += [
            f"delete {place} {{ {number} }}" for number in numbers if (DISPATCH_MAP.name, number) in removed
        ]
        return commands + [f"add {place} {{ {number} : {verdict} }}" for number, verdict in numbers.items()]


def removals(table: str, left: Iterable[ObjectId]) -> tuple[str, ...]:
    """Transactions that delete sets and chains that nothing needs any more: first whatever leads to those
    chains, then they themselves."""
    names: dict[str, list[str]] = {SET: [], CHAIN: [], DISPATCH_MAP.name: []}
    for kind, name in sorted(left):
        names[kind].append(name)
    numbers = ", ".join(names[DISPATCH_MAP.name])
    emptied = [f"delete element {table} {DISPATCH_MAP.name} {{ {numbers} }}\n"] if numbers else []
    emptied += [f"flush chain {table} {name}\n" for name in names[CHAIN]]
    emptied += [f"delete set {table} {name}\n" for name in names[SET]]
    deleted = [f"delete chain {table} {name}\n" for name in names[CHAIN]]
    return tuple(text for text in ("".join(emptied), "".join(deleted)) if text)


def elements_text(table: str, deleted: Objects, added: Objects) -> str:
    """Commands that delete elements, then add others."""
    names: dict[str, list[str]] = {}
    values: dict[str, list[str]] = {}
    for kind, key in deleted:
        names.setdefault(kind, []).append(key)
    for (kind, key), value in added.items():
        values.setdefault(kind, []).append(f"{key} : {value}" if value else key)
    return "".join((*_element_commands("delete", table, names), *_element_commands("add", table, values)))


def _element_commands(verb: str, table: str, by_set: Mapping[str, list[str]]) -> Iterator[str]:
    for name, elements in by_set.items():
        for at in range(0, len(elements), ELEMENTS_A_COMMAND):
            listed = ", ".join(elements[at : at + ELEMENTS_A_COMMAND])
            yield f"{verb} element {table} {name} {{ {listed} }}\n"


def _parts(objects: Objects) -> Iterator[dict[ObjectId, str]]:
    rest = iter(objects.items())
    while part := dict(islice(rest, BATCH_ELEMENTS)):
        yield part
