"""The iptables programs and the rules they hold, without a kernel: a `Runner` for tests.

Held to the real programs by `test_fake_kernel.py`. Spelling is not checked: a rule is kept as it is written,
but for what the kernel itself changes (probabilities), so callers must write what iptables-save would print.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.lab.inside import ProgramResult
from vipd.model.service import Family

BUILT_IN = {
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "raw": ("PREROUTING", "OUTPUT"),
}
USUAL_TARGETS = "ACCEPT DROP RETURN REJECT MARK CONNMARK DNAT SNAT MASQUERADE REDIRECT LOG NFLOG NFQUEUE"
TARGETS = frozenset(re.findall(r"\w+", USUAL_TARGETS))
LONGEST_NAME = 28
STEMS = {"iptables": Family.IPV4, "ip6tables": Family.IPV6}

_PROGRAM = re.compile(r"^(ip6?tables)(?:-(nft|legacy))?(?:-(save|restore))?$")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_JUMP = re.compile(r"(?:^| )-[jg] (\S+)")
_PROBABILITY = re.compile(r"(?<=--probability )\d\.\d+")
_STEPS = 2**31


class RefusedError(Exception):
    """What a program answers instead of doing it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Chain:
    """A chain; one with a policy is built in."""

    policy: str | None = None
    rules: list[str] = field(default_factory=list)


Table = dict[str, Chain]


@dataclass(frozen=True, slots=True)
class Block:
    """One `*table ... COMMIT` that was tried."""

    number: int
    """Counted from 1 over every restore."""
    program: str
    family: Family
    table: str
    lines: tuple[str, ...]
    done: bool

    @property
    def chains(self) -> frozenset[str]:
        """Chains that its lines name as what they change."""
        return frozenset(
            line[1:].split()[0] if line.startswith(":") else line.split()[1] for line in self.lines
        )


class FakeKernel:
    """Both families' tables, for the nft and for the legacy programs, which do not see each other's rules."""

    def __init__(self, default: str = "nft", version: str = "1.8.9") -> None:
        self.default, self.version = default, version
        self.absent: set[str] = set()
        """Programs that are not installed: `ip6tables` (with its -save and -restore), `nft` and so on."""
        self.processes: list[tuple[str, ...]] = []
        """The command line of every process."""
        self.blocks: list[Block] = []
        self.failing: dict[int, str] = {}
        """Block numbers that fail, and what the program says then."""
        self.before_block: Callable[[int], None] = lambda number: None
        """Called before each block is tried: another program that writes rules."""
        self.after_block: Callable[[Block], None] = lambda block: None
        """Called after each block that was committed."""
        self._tables: dict[tuple[str, Family], dict[str, Table]] = {
            (variant, family): {} for variant in ("nft", "legacy") for family in Family
        }

    async def run(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        """Answer as the program would. FileNotFoundError when it is not installed."""
        program = argv[0]
        if re.sub(r"-(save|restore)$", "", program) in self.absent:
            raise FileNotFoundError(program)
        self.processes.append(tuple(argv))
        try:
            return ProgramResult(0, self._answer(program, tuple(argv[1:]), stdin), "")
        except RefusedError as refused:
            return ProgramResult(refused.code, "", f"{program}: {refused}\n")

    def count(self, ending: str) -> int:
        """How many processes so far had a name that ends like this."""
        return sum(argv[0].endswith(ending) for argv in self.processes)

    def restore(self, text: str, family: Family = Family.IPV4, variant: str = "") -> None:
        """Write rules as another program would, unlogged. RefusedError when they are wrong."""
        for table, lines, start in _blocks(text):
            self._commit(variant or self.default, family, table, lines, start)

    def saved(self, family: Family = Family.IPV4, variant: str = "") -> str:
        """What iptables-save prints, but for its comments."""
        tables = self._tables[variant or self.default, family]
        return "".join(_printed(name, tables[name]) for name in BUILT_IN if name in tables)

    def chains(self, table: str, family: Family = Family.IPV4, variant: str = "") -> dict[str, list[str]]:
        """The rules of each chain of a table; no chain at all when there is no such table."""
        found = self._tables[variant or self.default, family].get(table, {})
        return {name: list(chain.rules) for name, chain in found.items()}

    def _answer(self, program: str, arguments: tuple[str, ...], stdin: str) -> str:
        if program == "nft":
            raise RefusedError(1, "Error: nft has no kernel here")
        match = _PROGRAM.match(program)
        assert match, f"no such program is faked: {program}"
        family, variant = STEMS[match[1]], match[2] or self.default
        if arguments == ("--version",):
            return f"{match[1]} v{self.version} ({'nf_tables' if variant == 'nft' else variant})\n"
        if match[3] == "save":
            assert arguments in ((), ("-c",)), f"iptables-save is faked without such options: {arguments}"
            saved = self.saved(family, variant)
            if arguments:
                saved = re.sub(r"^-A", "[0:0] -A", saved, flags=re.MULTILINE)
            return f"# Generated by {program}\n{saved}# Completed\n"
        assert arguments[:2] == ("--noflush", "-w"), (
            f"iptables-restore is faked with --noflush -w only: {arguments}"
        )
        self._restore(program, family, variant, stdin)
        return ""

    def _restore(self, program: str, family: Family, variant: str, text: str) -> None:
        for table, lines, start in _blocks(text):
            number = len(self.blocks) + 1
            self.before_block(number)
            done = False
            try:
                if number in self.failing:
                    raise RefusedError(1, self.failing[number])
                self._commit(variant, family, table, lines, start)
                done = True
            finally:
                self.blocks.append(Block(number, program, family, table, lines, done))
            self.after_block(self.blocks[-1])

    def _commit(self, variant: str, family: Family, table: str, lines: Sequence[str], start: int) -> None:
        if table not in BUILT_IN:
            raise RefusedError(2, f"line {start} table name '{table}' invalid")
        tables = self._tables[variant, family]
        before = tables.get(table) or {name: Chain("ACCEPT") for name in BUILT_IN[table]}
        if variant == "legacy":  # naming a table brings it into being
            tables[table] = before
        elif not lines:
            return
        after = {name: Chain(chain.policy, chain.rules.copy()) for name, chain in before.items()}
        for number, line in enumerate(lines, start + 1):
            _Change(after, variant, number).run(line)
        tables[table] = after


@dataclass(slots=True)
class _Change:
    """One line of a block, done to a table."""

    table: Table
    variant: str
    number: int

    def run(self, line: str) -> None:
        if line.startswith(":"):
            self._declare(*line[1:].split(" ")[:2])
            return
        verb, _, rest = line.partition(" ")
        name, _, rule = rest.partition(" ")
        if name not in self.table:
            raise self._refused("No chain/target/match by that name.")
        chain = self.table[name]
        if verb == "-A":
            chain.rules.append(self._checked(rule))
        elif verb == "-I":
            self._insert(chain, rule)
        elif verb == "-D":
            self._delete(chain, rule)
        elif verb == "-F":
            chain.rules.clear()
        elif verb == "-X":
            self._remove(name)
        else:
            raise AssertionError(f"not faked: {line}")

    def _declare(self, name: str, policy: str) -> None:
        if policy != "-":
            self.table[name].policy = policy
        elif len(name) > LONGEST_NAME:
            raise self._refused("chain name too long (must be under 29 chars)", 2)
        else:
            self.table[name] = Chain()

    def _insert(self, chain: Chain, rest: str) -> None:
        place, _, rule = rest.partition(" ")
        if int(place) > len(chain.rules) + 1:
            raise self._refused("Index of insertion too big.")
        chain.rules.insert(int(place) - 1, self._checked(rule))

    def _delete(self, chain: Chain, rule: str) -> None:
        rule = self._checked(rule)
        if rule not in chain.rules:
            raise self._refused("Bad rule (does a matching rule exist in that chain?).")
        chain.rules.remove(rule)

    def _remove(self, name: str) -> None:
        if self.table[name].policy:
            raise self._refused("Incompatible with this kernel.")
        users = (rule for chain in self.table.values() for rule in chain.rules if name in rule)
        if self.table[name].rules or any(target_of(rule) == name for rule in users):
            raise self._refused(
                f"CHAIN_DEL failed (Device or resource busy): chain {name}", 4 if self.variant == "nft" else 1
            )
        del self.table[name]

    def _checked(self, rule: str) -> str:
        target = target_of(rule)
        if target and target not in TARGETS and target not in self.table:
            raise self._refused(f"Chain '{target}' does not exist", 2)
        return _PROBABILITY.sub(lambda match: f"{round(float(match[0]) * _STEPS) / _STEPS:.11f}", rule)

    def _refused(self, why: str, code: int = 1) -> RefusedError:
        return RefusedError(code, f"line {self.number} failed: {why}")


def target_of(rule: str) -> str:
    """The chain or target that a rule jumps to; empty when it has none."""
    found = _JUMP.search(_QUOTED.sub('""', rule))
    return found[1] if found else ""


def _blocks(text: str) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Table, lines, and the number of its first line, of each block. One by one: an error ends the rest."""
    table, lines, start, number = "", list[str](), 0, 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("*"):
            table, lines, start = line[1:].strip(), [], number
        elif line == "COMMIT":
            yield table, tuple(lines), start
            table = ""
        elif line and not line.startswith("#"):
            lines.append(line)
    if table:
        raise RefusedError(1, f"COMMIT expected at line {number + 1}")


def _printed(name: str, table: Table) -> str:
    own = sorted(set(table) - set(BUILT_IN[name]))
    order = [*BUILT_IN[name], *own]
    declared = [f":{chain} {table[chain].policy or '-'} [0:0]" for chain in order]
    rules = [f"-A {chain} {rule}" for chain in order for rule in table[chain].rules]
    return "\n".join([f"*{name}", *declared, *rules, "COMMIT", ""])
