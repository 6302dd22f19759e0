"""A kernel's tables without a kernel: executes what nft reads, and refuses what the kernel refuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.lab.inside import ProgramResult, ReadChain, ReadTable

_HOOKS = {"prerouting": 0, "input": 1, "output": 3, "postrouting": 4}


class RefusedError(Exception):
    """The kernel does not take it."""


@dataclass
class FakeTable:
    """One table."""

    comment: str
    sets: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Kind and declaration."""
    chains: dict[str, str] = field(default_factory=dict)
    """Hook, or nothing."""
    rules: dict[str, list[str]] = field(default_factory=dict)
    elements: dict[str, dict[str, str]] = field(default_factory=dict)

    def listing(self, name: str) -> str:
        """The table as nft lists it."""
        lines = [f"table {name} {{", f'\tcomment "{self.comment}"']
        for each, (kind, declaration) in self.sets.items():
            lines += [f"\t{kind} {each} {{", *(f"\t\t{part}" for part in declaration.rstrip(";").split("; "))]
            texts = [f"{key} : {value}" if value else key for key, value in self.elements[each].items()]
            lines += [f"\t\telements = {{ {', '.join(sorted(texts))} }}"] if texts else []
            lines.append("\t}")
        for each, hook in self.chains.items():
            lines += [f"\tchain {each} {{", *([f"\t\t{hook}"] if hook else [])]
            lines += [*(f"\t\t{rule}" for rule in self.rules[each]), "\t}"]
        return "\n".join([*lines, "}", ""])

    def needed(self, verdicts_only: bool = False) -> Iterator[str]:
        """`@SET` of each rule, and the chain of each verdict."""
        for rules in self.rules.values():
            for rule in rules:
                yield from re.findall(r"(?:goto|jump) (\S+)" if verdicts_only else r"(@\w+)", rule)
        if verdicts_only:
            for elements in self.elements.values():
                for value in elements.values():
                    yield from re.findall(r"^(?:goto|jump) (\S+)$", value)


class FakeNft:
    """What `synced` runs in place of nft."""

    def __init__(self) -> None:
        self.tables: dict[str, FakeTable] = {}
        self.refused = ""
        """A text that is not taken in any rule or element that is added."""
        self.fails = False
        self.started = 0
        """How often it was run."""
        self.states: list[dict[str, FakeTable]] = []
        """What there was after each transaction."""

    async def __call__(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        self.started += 1
        if "--version" in argv:
            return ProgramResult(0, "nftables v1.0.6\n", "")
        if self.fails:
            return ProgramResult(1, "", "nft: Operation not permitted\n")
        if "vipd-probe" in stdin:
            return ProgramResult(0, "", "")
        tables = copy.deepcopy(self.tables)
        for line in stdin.splitlines():
            try:
                if self.refused and self.refused in line and line.startswith("add "):
                    raise RefusedError("is refused by the test")
                _execute(tables, line)
            except RefusedError as error:
                return ProgramResult(1, "", f"Error: {error}\n{line}\n")
        if "--check" not in argv:
            self.tables = tables
            self.states.append(tables)
        return ProgramResult(0, "", "")

    def listing(self) -> str:
        return "".join(table.listing(name) for name, table in sorted(self.tables.items()))

    def reader(self, family: Any, table: str = "", open_socket: object = None) -> FakeReader:
        """In place of vipd's reader of tables."""
        return FakeReader(self, f"{'ip' if str(family) == 'ipv4' else 'ip6'} {table}")


class FakeReader:
    def __init__(self, nft: FakeNft, table: str) -> None:
        self._table = nft.tables.get(table)

    def __enter__(self) -> FakeReader:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def structure(self) -> Any:
        if self._table is None:
            return ReadTable(None, {}, {})
        sets = {name: _comment(declaration) for name, (_, declaration) in self._table.sets.items()}
        chains = {
            name: ReadChain(_hook(hook), tuple(map(_comment, self._table.rules[name])))
            for name, hook in self._table.chains.items()
        }
        return ReadTable(self._table.comment, sets, chains)

    def elements(self, sets: Collection[Any]) -> dict[tuple[str, str], str]:
        assert self._table is not None
        return {(s.name, key): value for s in sets for key, value in self._table.elements[s.name].items()}

    def table_flags(self) -> dict[tuple[str, str], int]:
        return {}


def _comment(text: str) -> str:
    found = re.search(r'comment "([^"]*)"', text)
    return found[1] if found else ""


def _hook(text: str) -> tuple[int, int] | None:
    found = re.search(r"hook (\w+) priority (-?\d+)", text)
    return (_HOOKS[found[1]], int(found[2])) if found else None


def _execute(tables: dict[str, FakeTable], line: str) -> None:
    verb, kind, family, name, *rest = line.split(" ", 4)
    place, arguments = f"{family} {name}", rest[0] if rest else ""
    if kind == "table" and verb == "add":
        tables.setdefault(place, FakeTable(_comment(arguments)))
        return
    if place not in tables:
        raise RefusedError("No such file or directory")
    if kind == "table":
        del tables[place]
        return
    what, _, body = arguments.partition(" ")
    changes = {"element": _change_elements, "rule": _add_rule, "chain": _change_chain}
    changes.get(kind, partial(_change_set, kind))(tables[place], verb, what, body)


def _change_set(kind: str, table: FakeTable, verb: str, name: str, body: str) -> None:
    if verb == "add":
        table.sets.setdefault(name, (kind, body.removeprefix("{ ").removesuffix(" }")))
        table.elements.setdefault(name, {})
        return
    if name not in table.sets:
        raise RefusedError("No such file or directory")
    if f"@{name}" in table.needed():
        raise RefusedError("Device or resource busy")
    del table.sets[name], table.elements[name]


def _change_chain(table: FakeTable, verb: str, name: str, body: str) -> None:
    if verb == "add":
        table.chains.setdefault(name, body.removeprefix("{ ").removesuffix(" }"))
        table.rules.setdefault(name, [])
        return
    if name not in table.chains:
        raise RefusedError("No such file or directory")
    if verb == "flush":
        table.rules[name] = []
        return
    if name in table.needed(verdicts_only=True):
        raise RefusedError("Device or resource busy")
    del table.chains[name], table.rules[name]


def _add_rule(table: FakeTable, verb: str, chain: str, rule: str) -> None:
    missing = [name for name in re.findall(r"@(\w+)", rule) if name not in table.sets]
    missing += [name for name in re.findall(r"(?:goto|jump) (\S+)", rule) if name not in table.chains]
    if missing or chain not in table.chains:
        raise RefusedError("No such file or directory")
    table.rules[chain].append(rule)


def _change_elements(table: FakeTable, verb: str, name: str, body: str) -> None:
    if name not in table.sets:
        raise RefusedError("No such file or directory")
    elements = table.elements[name]
    for each in body.removeprefix("{ ").removesuffix(" }").split(", "):
        key, _, value = each.partition(" : ")
        if verb == "delete":
            if elements.pop(key, None) is None:
                raise RefusedError("No such file or directory")
        elif elements.setdefault(key, value) != value:
            raise RefusedError("File exists")
        elif value.startswith(("goto ", "jump ")) and value.split(" ")[1] not in table.chains:
            raise RefusedError("No such file or directory")
