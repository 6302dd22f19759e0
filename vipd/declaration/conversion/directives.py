"""Directives: what the tokenizer of each format makes of a text, how the reader of declarations reads their
values, and what is reported of those without a counterpart. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vipd.declaration.problems import Note, Problem, ProblemList
from vipd.declaration.reader import path_text
from vipd.declaration.service import BACKEND, CHECK_KEYS
from vipd.declaration.syntax import period_text, quoted
from vipd.declaration.values import INVALID, Faults, Key, Path
from vipd.model import limits
from vipd.model.check import MAX_CHECK_SECONDS, MAX_COUNT, MIN_CHECK_SECONDS
from vipd.model.service import MAX_AFFINITY_SECONDS, MAX_WEIGHT
from vipd.model.text import shortened

NO_COUNTERPART = "has no counterpart"
AT_RANDOM = "has no counterpart: backends are chosen at random by weight"
NOT_CONVERTED = "is not converted: this has no counterpart"
ELSEWHERE = ("include", "@", "$", "~")
"""What names begin with that need the host or another file."""

_MAX_SHOWN_LENGTH = 120
"""Characters of a line of the configuration that a message quotes."""
_INTEGER = re.compile(r"-?[0-9]{1,10}")
_TIME_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(us|ms|s|m|h|d|w|M|y|$)")
_TIME = re.compile(rf"(?:{_TIME_PART.pattern})+")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_UNITS |= {"M": 2592000, "y": 31536000}

Keys: TypeAlias = dict[str, Any]
"""Keys of a declaration with their values."""


class Names:
    """Names that are listed in a text, with commas between them; `proxy_ssl_*` is all that begin so."""

    def __init__(self, text: str) -> None:
        names = text.split(", ")
        self._names = {name for name in names if name[-1] != "*"}
        self._starts = tuple(name[:-1] for name in names if name[-1] == "*")

    def __contains__(self, name: object) -> bool:
        return name in self._names or str(name).startswith(self._starts)


class Report:
    """The parts of one file that have no counterpart: problems where flows differ, and notes."""

    def __init__(self, program: str, file: str) -> None:
        """`program`: whose configuration it is."""
        self.program, self.file = program, file
        self.problems = ProblemList(most=limits.ALL_PROBLEMS)
        self._notes: dict[Note, None] = {}
        self._more_notes = 0

    def problem(self, line: int, text: str, reason: str, hint: str = "") -> None:
        """Add a problem of a part that the file names by this text."""
        self.problems.add(Problem(self.file, line, shortened(text, _MAX_SHOWN_LENGTH), reason, hint))

    def note(self, line: int, text: str, reason: str) -> None:
        """Add a note, which is no fault."""
        if len(self._notes) < limits.NOTES:
            self._notes[Note(self.file, line, f"{shortened(text, _MAX_SHOWN_LENGTH)}: {reason}")] = None
        else:
            self._more_notes += 1

    def notes(self) -> tuple[Note, ...]:
        """The notes in line order, each once, and the number of further ones."""
        notes = sorted(self._notes, key=lambda note: note.line)
        if self._more_notes:
            notes.append(Note(self.file, notes[-1].line, f"and {self._more_notes} more notes"))
        return tuple(notes)


@dataclass(slots=True)
class Directive:
    """Words of a configuration, and the directives in the block behind them. Its methods read values; they
    report what they cannot read."""

    report: Report = field(repr=False)
    line: int
    words: list[str]
    block: list[Directive] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first word."""
        return self.words[0]

    @property
    def arguments(self) -> list[str]:
        """The words after the first."""
        return self.words[1:]

    @property
    def first(self) -> str:
        """The first argument; empty without one."""
        return self.words[1] if len(self.words) > 1 else ""

    @property
    def value(self) -> str:
        """The arguments as one text."""
        return " ".join(self.words[1:])

    def __str__(self) -> str:
        """How messages name it."""
        return " ".join(self.words)

    def all(self, name: str) -> list[Directive]:
        """Every directive of this name in its block."""
        return [directive for directive in self.block if directive.name == name]

    def last(self, name: str) -> Directive | None:
        """The directive of this name that counts in its block."""
        return next((directive for directive in reversed(self.block) if directive.name == name), None)

    @property
    def settings(self) -> dict[str, Directive]:
        """The directives that count in its block: of each name the last one."""
        return {directive.name: directive for directive in self.block}

    def part(self, *words: str) -> Directive:
        """A part of it, or another name for it, in messages."""
        return Directive(self.report, self.line, list(words))

    def lost(self, reason: str = NO_COUNTERPART, hint: str = "") -> None:
        """Report what changes where flows go, or fails, and what the services do not have."""
        self.report.problem(self.line, str(self), reason, hint)

    def note(self, reason: str = "") -> None:
        """Report what was left out, and changes nothing about flows that vipd could do."""
        self.report.note(self.line, str(self), reason or f"concerns {self.report.program} itself")

    def read(self, read: Callable[[Any, Path, Faults], Any], value: object, path: Path = (0,)) -> Any:
        """What a part of the reader of declarations makes of a value; None after reporting its faults."""
        faults = Faults()
        result = read(value, path, faults)
        for fault in faults.kept:
            where, other = path_text(fault.path), f" {path_text(fault.other)}" if fault.other else ""
            text = f"{self}: {where}" if where else str(self)
            self.report.problem(self.line, text, f"{fault.what}{other}", fault.hint)
        return None if faults.kept or result is INVALID else result

    def not_read(self) -> None:
        """Report what depends on the host, or stands in another file."""
        self.lost("is not read", "write the lines that it means for this host into this file")

    def key(self, name: str, value: object = None, keys: Mapping[str, Key] = CHECK_KEYS) -> Keys:
        """The key of a check, or another one of these, with a value, else with the integer that is its first
        argument; none after a report."""
        value = number_in(self.first) if value is None else value
        return {} if self.read(keys[name].kind.read, value, ()) is None else {name: value}

    def port(self, text: str) -> int | None:
        """A port number; None after a report."""
        number: int | None = self.read(CHECK_KEYS["port"].kind.read, number_in(text))
        return number

    def time(self, unit: str = "s") -> float | None:
        """Seconds of its arguments, such as `1m30s`, without a unit in `unit`; None after a report."""
        if not _TIME.fullmatch(self.value):
            self.lost(f"{quoted(self.value)} is no time")
            return None
        return sum(float(number) * _UNITS[own or unit] for number, own in _TIME_PART.findall(self.value))

    def affinity(self, seconds: float | None) -> Keys:
        """Affinity for so long; None: for ever. What vipd cannot do is reported, and shortened."""
        if seconds is None or seconds > MAX_AFFINITY_SECONDS:
            self.lost("a client keeps its backend for one day at most", "1d was written")
            seconds = MAX_AFFINITY_SECONDS
        return {"affinity": {"by": "client-ip", "timeout": f"{max(1, round(seconds))}s"}}

    def timing(self, interval: float, timeout: float, rise: int, fall: int) -> Keys:
        """The keys of a check for these seconds and counts within the limits of vipd/v1; a note says what was
        changed."""
        longest = _within(interval, MIN_CHECK_SECONDS, MAX_CHECK_SECONDS)
        possible = {
            "interval": longest,
            "timeout": _within(timeout, MIN_CHECK_SECONDS, longest),
            "rise": rise,
            "fall": min(max(fall, 1), MAX_COUNT),
        }
        for (name, became), was in zip(possible.items(), (interval, timeout, rise, fall), strict=True):
            if abs(was - became) > 0.001:
                self.note(f"{name} {was:g} became {became:g}: a check of vipd allows no other")
        seconds = {name: period_text(possible[name]) for name in ("interval", "timeout")}
        return {**possible, **seconds}


def number_in(text: str) -> int | str:
    """The integer that a text is, or the text, which the reader then refuses."""
    return int(text) if _INTEGER.fullmatch(text) else text


def _within(seconds: float, low: float, high: float) -> float:
    """The seconds within limits, in whole milliseconds."""
    return round(min(max(seconds, low), high) * 1000) / 1000


Table: TypeAlias = Mapping[str, Callable[[Directive], Keys]]
"""What each directive becomes: keys of a declaration, or none."""


def keys_of(
    directives: Iterable[Directive], table: Table, ignored: Container[str], elsewhere: Container[str] = ()
) -> Keys:
    """The keys that directives become by their table; of those with one name the last counts. Every other
    one is reported, by a note if it is `ignored`, unless it is read `elsewhere`."""
    keys: Keys = {}
    counting: dict[str, Directive] = {}
    for directive in directives:
        if directive.name in table:
            counting.pop(directive.name, None)  # the order is that of the directives that count
            counting[directive.name] = directive
        elif directive.name in elsewhere:
            continue
        elif directive.name.startswith(ELSEWHERE):
            directive.not_read()
        elif directive.name in ignored:
            directive.note()
        else:
            directive.lost()
    for name, directive in counting.items():
        keys |= table[name](directive)
    return keys


def weight(directive: Directive) -> Keys:
    """The weight of a backend. A larger one than vipd has is reported, and becomes the largest."""
    number = number_in(directive.first)
    if isinstance(number, int) and number > MAX_WEIGHT:
        directive.lost(f"the largest weight is {MAX_WEIGHT}", "divide all weights of this service")
        return {"weight": MAX_WEIGHT}
    return directive.key("weight", number, BACKEND.keys)


def max_connections(directive: Directive) -> Keys:
    """The limit of connections of a backend, 0 meaning none."""
    number = number_in(directive.first)
    return directive.key("max_connections", number, BACKEND.keys) if number else {}


def lost(directive: Directive) -> Keys:
    """Report that a directive has no counterpart."""
    directive.lost()
    return {}


IMPOSSIBLE = "impossible"
"""A key that stands for what vipd cannot do for a listener or a server, without which it does not work."""


def impossible(directive: Directive) -> Keys:
    """Report that a listener or a server cannot be converted, since it needs this."""
    directive.lost(NOT_CONVERTED)
    return {IMPOSSIBLE: True}


Token: TypeAlias = tuple[int, str, str]
"""A line, and what stands there: one of the signs `{`, `}` and `;`, which ends a directive, or no sign and a
word."""


def tree_of(report: Report, tokens: Iterable[Token]) -> list[Directive]:
    """The directives of a file. A missing or surplus brace is reported; what was read up to there stays."""
    top: list[Directive] = []
    blocks = [top]
    words: list[str] = []
    start = 0
    for line, sign, word in tokens:
        if not sign:
            start = start if words else line
            words.append(word)
            continue
        if words or sign == "{":
            blocks[-1].append(Directive(report, start if words else line, words or ["{"]))
            words = []
        if sign == "{":
            blocks.append(blocks[-1][-1].block)
        elif sign == "}":
            blocks.pop()
        if not 0 < len(blocks) <= limits.YAML_DEPTH:
            reason = "blocks are nested too deeply" if blocks else "a closing brace without an opening one"
            report.problem(line, "", reason, "the rest of the file was not read")
            return top
    if len(blocks) > 1 or words:
        Directive(report, start, words).lost("the file ends within a block or a directive")
    return top


def split_address(text: str) -> tuple[str, str]:
    """Address and port of `ADDR:PORT` or `[ADDR]:PORT`; without a port, the text and nothing."""
    address, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text.strip("[]"), ""
    return address.strip("[]"), port
