"""One rule: its text parsed strictly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vipd.model.service import Family
from vipd.observe.simulator.errors import UnknownRule
from vipd.observe.simulator.iptables import match_options, target_options
from vipd.observe.simulator.iptables.matches import (
    Always,
    AtRandom,
    HasProtocol,
    InPrefix,
    Match,
    NotSimulated,
    Side,
)
from vipd.observe.simulator.iptables.options import (
    Cursor,
    Extension,
    GivenOptions,
    Option,
    prefix,
    protocol_number,
)
from vipd.observe.simulator.iptables.targets import Target

_HEADER = {
    "-s": "-s", "--source": "-s", "--src": "-s",
    "-d": "-d", "--destination": "-d", "--dst": "-d",
    "-i": "-i", "--in-interface": "-i",
    "-o": "-o", "--out-interface": "-o",
    "-p": "-p", "--protocol": "-p", "--proto": "-p",
}  # fmt: skip
_MATCH = frozenset({"-m", "--match"})
_TARGET = {"-j": False, "--jump": False, "-g": True, "--goto": True}


@dataclass(frozen=True)
class Rule:
    """A rule of one chain."""

    text: str
    matches: tuple[Match, ...]
    """Header conditions in a fixed order, then those of extensions in their own order."""
    target: Target

    @cached_property
    def conditions(self) -> tuple[Match, ...]:
        """The matches that can refuse a packet."""
        return tuple(m for m in self.matches if not isinstance(m, Always | AtRandom))

    @cached_property
    def probability(self) -> float:
        """The probability that the rule applies to a packet that meets its conditions, 0..1."""
        product = 1.0
        for match in self.matches:
            product *= match.probability if isinstance(match, AtRandom) else 1.0
        return product

    @property
    def comment(self) -> str:
        """The rule's comment, or nothing."""
        return next((m.text for m in self.matches if isinstance(m, Always) and m.kind == "comment"), "")


def parse_rule(words: list[str], text: str, table: str, family: Family) -> Rule:
    """Parses `words`, the text after `-A CHAIN`.

    Raises:
        UnknownRule: an option, match, target or value is not known, or iptables would reject the combination.
    """
    try:
        return _Reader(words, table, family).rule(text)
    except ValueError as error:
        raise UnknownRule(text, f"unknown rule ({error})") from None


class _Reader:
    """Collects the options of one rule by the extension they belong to."""

    def __init__(self, words: list[str], table: str, family: Family) -> None:
        self._cursor = Cursor(words)
        self._table = table
        self._family = family
        self._header: dict[str, Option] = {}
        self._loaded: list[tuple[str, list[Option]]] = []
        self._target: tuple[str, bool] | None = None
        self._target_options: list[Option] = []

    def rule(self, text: str) -> Rule:
        """Read every word."""
        while self._cursor:
            name = self._cursor.take()
            negated = name == "!"
            if negated:
                name = self._cursor.take(after="!")
            self._read(name, negated)
        return Rule(text, (*self._header_matches(), *self._extension_matches()), self._built_target())

    def _read(self, name: str, negated: bool) -> None:
        if name in _HEADER:
            self._read_header(name, negated)
        elif negated and (name in _MATCH or name in _TARGET):
            raise ValueError(f"! {name} is not known")
        elif name in _MATCH:
            self._load(self._cursor.take(after=name))
        elif name in _TARGET:
            if self._target:
                raise ValueError("there is a second target")
            self._target = (self._cursor.take(after=name), _TARGET[name])
        else:
            self._read_extension(name, negated)

    def _read_header(self, name: str, negated: bool) -> None:
        plain = _HEADER[name]
        if plain in self._header:
            raise ValueError(f"{name} stands twice")
        self._header[plain] = Option(plain, self._cursor.take(after=name), negated)

    def _load(self, name: str) -> None:
        if name not in match_options.EXTENSIONS:
            raise ValueError(f"match {name} is not known")
        self._loaded.append((name, []))

    def _read_extension(self, name: str, negated: bool) -> None:
        spec, options = self._owner_of(name)
        if any(o.name == name for o in options):
            raise ValueError(f"{name} stands twice")
        value = self._cursor.take(after=name) if name in spec.with_value else ""
        value += f" {self._cursor.take(after=name)}" if name in spec.with_two else ""
        options.append(Option(name, value, negated))

    def _owner_of(
        self, name: str
    ) -> tuple[Extension[Target] | Extension[match_options.Matches], list[Option]]:
        """The target first, then the match loaded last, then the one `-p` implies: iptables' own order."""
        if self._target:
            spec = self._target_extension()
            if name in spec.with_value or name in spec.flags:
                return spec, self._target_options
        implied = match_options.IMPLIED.get(self._protocol())
        for loaded, options in reversed(self._loaded):
            known = match_options.EXTENSIONS[loaded]
            if name in known.with_value or name in known.flags:
                return known, options
        if implied and name in match_options.EXTENSIONS[implied].with_value:
            self._load(implied)
            return match_options.EXTENSIONS[implied], self._loaded[-1][1]
        raise ValueError(f"option {name} is not known here")

    def _protocol(self) -> str:
        option = self._header.get("-p")
        return "" if option is None or option.negated else option.value.lower()

    def _header_matches(self) -> list[Match]:
        found: list[Match] = []
        for name, side in (("-s", Side.SOURCE), ("-d", Side.DESTINATION)):
            if option := self._header.get(name):
                found.append(InPrefix(side, *prefix(option.value, self._family), negated=option.negated))
        found += [NotSimulated(name) for name in ("-i", "-o") if name in self._header]
        if option := self._header.get("-p"):
            number = protocol_number(option.value)
            if number == 0 and option.negated:
                raise ValueError("! -p all can never match")
            found.extend([HasProtocol(number, option.negated)] if number else [])
        return found

    def _extension_matches(self) -> list[Match]:
        found: list[Match] = []
        for name, options in self._loaded:
            found.extend(match_options.EXTENSIONS[name].build(self._given(options)))
        return found

    def _built_target(self) -> Target:
        return self._target_extension().build(self._given(self._target_options)) if self._target else None

    def _target_extension(self) -> Extension[Target]:
        name, goto = self._target or ("", False)
        known = None if goto else target_options.EXTENSIONS.get(name)
        if known is None:
            return target_options.chain_target(name, goto)
        if target_options.OWN_TABLE.get(name, self._table) != self._table:
            raise ValueError(f"{name} has no place in table {self._table}")
        return known

    def _given(self, options: list[Option]) -> GivenOptions:
        return GivenOptions(self._family, tuple(options), self._protocol())
