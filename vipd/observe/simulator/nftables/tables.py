"""Parses tables in the form of `nft list ruleset`, and of the input of `nft -f`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vipd.model.service import Family
from vipd.observe.simulator.errors import RulesetError, UnknownRule, chains_in_loops
from vipd.observe.simulator.nftables.base_chain import BaseChain, Chain, Hook
from vipd.observe.simulator.nftables.datatypes import DATATYPES, Datatype
from vipd.observe.simulator.nftables.reader import read_concatenation, read_many_elements
from vipd.observe.simulator.nftables.rules import parse_rule
from vipd.observe.simulator.nftables.sets import NftSet
from vipd.observe.simulator.nftables.statements import VerdictMap, VerdictStatement
from vipd.observe.simulator.nftables.words import Words, split_words
from vipd.observe.simulator.outcome import RuleVerdict

HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
_PRIORITIES = {"raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100}
_TYPES = ("nat", "filter")
_FAMILIES = {"ip": Family.IPV4, "ip6": Family.IPV6}
_ABOUT = frozenset({"size", "comment", "flags", "timeout", "gc-interval", "counter", "auto-merge", "policy"})
"""Lines of a map or set that have no effect on a lookup."""

_MAX_SHOWN = 100
"""Characters of a line in a message."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one family, ready to be traced."""

    family: Family
    chains: Mapping[tuple[str, str], Chain] = field(repr=False)
    """By table and name."""

    def base_chains(self, hook: str) -> list[BaseChain]:
        """The base chains of a hook in the order of the kernel."""
        found = [
            BaseChain(chain, chain.hook, self.chains)
            for chain in self.chains.values()
            if chain.hook is not None and chain.hook.name == hook
        ]
        return sorted(found, key=lambda chain: chain.hook.priority)


def parse_tables(text: str, family: Family) -> Tables:
    """The tables of a family, whole: those of the other family are left out.

    Raises:
        UnknownRule: a rule, or a part of a table, has a form that is not known.
        RulesetError: nft would reject the text: a chain that is missing, a loop, a missing end.
    """
    chains: dict[tuple[str, str], Chain] = {}
    for name, lines in _blocks(text.splitlines()):
        words = name.split()
        if len(words) != 3 or words[0] != "table" or words[1] not in _FAMILIES:
            raise UnknownRule(name, "it is no table of ip or ip6")
        if _FAMILIES[words[1]] is family:
            chains.update({(c.table, c.name): c for c in _table(" ".join(words[1:]), lines, family)})
    _check(chains)
    return Tables(family, chains)


def _blocks(of: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """The text before each `{` at the end of a line, and the lines up to its end."""
    head, lines, depth = "", list[str](), 0
    for raw in of:
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        depth += line.count("{") - line.count("}")
        if not head:
            if not line.endswith("{"):
                raise UnknownRule(line, "unknown line outside a table")
            head = line.removesuffix("{").strip()
        elif depth:
            lines.append(line)
        else:
            yield head, lines
            head, lines = "", []
    if head:
        raise RulesetError(head, "it has no end")


def _table(name: str, lines: list[str], family: Family) -> Iterator[Chain]:
    commented = bool(lines) and lines[0].startswith("comment ")
    blocks = list(_blocks(lines[1:] if commented else lines))
    nft_sets: dict[str, NftSet] = {}
    for head, content in blocks:
        kind, _, of = head.partition(" ")
        if kind in ("map", "set"):
            nft_sets[of] = _read_set(of, kind, content, nft_sets)
    for head, content in blocks:
        kind, _, of = head.partition(" ")
        if kind == "chain":
            yield _chain(name, of, content, family, nft_sets)
        elif kind not in ("map", "set"):
            raise UnknownRule(head, f"a {kind} is not known")


def _read_set(name: str, kind: str, lines: list[str], known: dict[str, NftSet]) -> NftSet:
    nft_set = NftSet(name)
    for line in _statements(lines):
        word, _, rest = line.partition(" ")
        try:
            if word in ("type", "typeof"):
                nft_set.keys, nft_set.values = _types(word, rest.rstrip("; "))
            elif word == "elements":
                read_many_elements(rest.removeprefix("="), nft_set)
            elif word not in _ABOUT:
                raise ValueError(f"{word} is not known")
        except ValueError as error:
            raise UnknownRule(_cut(line), f"unknown line of {kind} {name} ({error})") from None
    if not nft_set.keys or bool(nft_set.values) is (kind == "set"):
        raise RulesetError(f"{kind} {name}", "it has no type, or not one of its kind")
    return nft_set


def _statements(lines: list[str]) -> Iterator[str]:
    """Each line; those of an element list as one."""
    waiting: list[str] = []
    for line in lines:
        waiting.append(line)
        joined = line if len(waiting) == 1 else ""
        if "{" in waiting[0] and "}" not in line:
            continue
        yield joined or " ".join(waiting)
        waiting = []
    if waiting:
        raise RulesetError(waiting[0], "it has no end")


def _types(word: str, text: str) -> tuple[tuple[Datatype, ...], tuple[Datatype, ...]]:
    keys, _, values = text.partition(" : ")
    return _datatypes(word, keys), _datatypes(word, values) if values else ()


def _datatypes(word: str, text: str) -> tuple[Datatype, ...]:
    if word == "typeof":
        words = Words(split_words(text))
        found = read_concatenation(words, {}).types
        if words:
            raise ValueError(f"{words.next} is not known")
        return found
    names = text.split(" . ")
    unknown = next((name for name in names if name not in DATATYPES), None)
    if unknown is not None:
        raise ValueError(f"type {unknown} is not known")
    return tuple(DATATYPES[name] for name in names)


def _chain(table: str, name: str, lines: list[str], family: Family, nft_sets: dict[str, NftSet]) -> Chain:
    hook: Hook | None = None
    rules = []
    for line in lines:
        if line.startswith("type "):
            hook = _hook(line)
        elif not line.startswith("comment "):
            rules.append(parse_rule(line.rstrip("; "), family, nft_sets))
    return Chain(table, name, tuple(rules), hook)


def _hook(line: str) -> Hook:
    words = Words(split_words(line))
    try:
        words.take("type")
        type_ = words.take(*_TYPES)
        words.take("hook")
        name = words.take(*HOOKS)
        words.take("priority")
        priority = _priority(words)
        words.accept(";")
        policy = words.take("accept", "drop") if words.accept("policy") else "accept"
        words.accept(";")
        if words:
            raise ValueError(f"{words.next} is not known")
    except ValueError as error:
        raise UnknownRule(line, f"unknown base chain ({error})") from None
    return Hook(type_, name, priority, RuleVerdict(policy.upper()))


def _priority(words: Words) -> int:
    first = words.take()
    if first not in _PRIORITIES:
        return int(first)
    sign = words.accept("+", "-")
    return _PRIORITIES[first] + (int(f"{sign}{words.take()}") if sign else 0)


def _check(chains: Mapping[tuple[str, str], Chain]) -> None:
    """Every chain that a verdict names is there, no base chain, and leads nowhere back to itself."""
    led = {place: {(place[0], name) for name in _leads(chain)} for place, chain in chains.items()}
    for place, named in led.items():
        for other in named:
            if other not in chains or chains[other].hook is not None:
                raise RulesetError(f"{' '.join(place)} leads to {other[1]}", "it is no chain that can be")
    if names := chains_in_loops(led):
        raise RulesetError("", f"chains form a loop or hang from one: {', '.join(n for _, n in names)}")


def _leads(chain: Chain) -> Iterator[str]:
    for rule in chain.rules:
        for statement in rule.statements:
            if isinstance(statement, VerdictStatement) and statement.verdict.chain:
                yield statement.verdict.chain
            elif isinstance(statement, VerdictMap):
                yield from statement.nft_set.chains()


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."
