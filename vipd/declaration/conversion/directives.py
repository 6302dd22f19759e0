"""Directives: what the tokenizer of each format makes of a text, how their values are read, and what is
reported of those that have no counterpart. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vipd.declaration.dns_names import is_bare_name, parse_backend_address
from vipd.declaration.problems import Note, Problem, ProblemList
from vipd.declaration.syntax import (
    FORBIDDEN_BACKEND_KINDS,
    MAX_PORT,
    InvalidTextError,
    address_kind,
    parse_address,
    period_text,
    quoted,
)
from vipd.model import limits
from vipd.model.check import MAX_CHECK_SECONDS, MAX_COUNT, MIN_CHECK_SECONDS
from vipd.model.flow_limits import MAX_CONNECTIONS
from vipd.model.service import MAX_AFFINITY_SECONDS, MAX_WEIGHT
from vipd.model.text import shortened

AT_RANDOM = "has no counterpart: backends are chosen at random by weight"
NOT_CONVERTED = "is not converted: this has no counterpart"

_MAX_SHOWN_LENGTH = 120
"""Characters of a line of the configuration that a message quotes."""
_SHOWN_WORDS = 4
_INTEGER = re.compile(r"[0-9]{1,10}")
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")
_TIME_PART = re.compile(r"([0-9]{1,9})(us|ms|s|m|h|d|w|M|y)?")
_TIME = re.compile(rf"(?:{_TIME_PART.pattern})+")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_UNITS |= {"M": 2592000, "y": 31536000}


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
    """Words of a configuration, and the directives in the braces behind them; `block` is None without
    braces. Its methods read values; they report what they cannot read."""

    report: Report = field(repr=False)
    line: int
    words: list[str]
    block: list[Directive] | None = None

    @property
    def name(self) -> str:
        """The first word."""
        return self.words[0]

    @property
    def arguments(self) -> list[str]:
        """The words after the first."""
        return self.words[1:]

    @property
    def value(self) -> str:
        """The arguments as one text."""
        return " ".join(self.words[1:])

    def __str__(self) -> str:
        """How messages name it."""
        return " ".join(self.words[:_SHOWN_WORDS])

    def part(self, *words: str) -> Directive:
        """A part of it, or another name for it, in messages."""
        return Directive(self.report, self.line, list(words))

    def lost(self, reason: str, hint: str = "") -> None:
        """Report what changes where flows go, or fails, and what the services do not have."""
        self.report.problem(self.line, str(self), reason, hint)

    def note(self, reason: str) -> None:
        """Report what was left out, and changes nothing about flows that vipd could do."""
        self.report.note(self.line, str(self), reason)

    def leave_out(self, without_effect: bool = False, hint: str = "") -> None:
        """Report a directive that is no key of a declaration; one `without_effect` on flows by a note."""
        if without_effect:
            self.note(f"concerns {self.report.program} itself")
        else:
            self.lost("has no counterpart", hint)

    def address(self, text: str) -> str | None:
        """A canonical address; None after a report."""
        try:
            return parse_address(text)
        except InvalidTextError as error:
            self.lost(error.what, error.hint)
            return None

    def integer(self, text: str, low: int, high: int) -> int | None:
        """A whole number within limits; None after a report."""
        if _INTEGER.fullmatch(text) and low <= int(text) <= high:
            return int(text)
        self.lost(f"{quoted(text)} is not a whole number from {low} to {high}")
        return None

    def port(self, text: str) -> int | None:
        """A port number; None after a report."""
        return self.integer(text, 1, MAX_PORT)

    def weight(self, text: str) -> int:
        """A weight. A larger one than vipd has is reported, and becomes the largest; any other text 1."""
        if _INTEGER.fullmatch(text) and int(text) > MAX_WEIGHT:
            self.lost(f"the largest weight is {MAX_WEIGHT}", "divide all weights of this service")
            return MAX_WEIGHT
        weight = self.integer(text, 0, MAX_WEIGHT)
        return 1 if weight is None else weight

    def max_connections(self, text: str) -> int | None:
        """A limit of connections, 0 meaning none; also none after a report."""
        return self.integer(text, 0, MAX_CONNECTIONS) or None

    def seconds(self, text: str) -> float | None:
        """A decimal number of seconds; None after a report."""
        if _SECONDS.fullmatch(text):
            return float(text)
        self.lost(f"{quoted(text)} is not a number of seconds")
        return None

    def time(self, text: str, unit: str) -> float | None:
        """Seconds of a time such as `1m30s`, without a unit in `unit`; None after a report."""
        if not _TIME.fullmatch(text):
            self.lost(f"{text} is no time")
            return None
        return sum(int(number) * _UNITS[written or unit] for number, written in _TIME_PART.findall(text))

    def affinity(self, seconds: float | None) -> dict[str, str]:
        """Affinity for so long; None: for ever. What vipd cannot do is reported, and shortened."""
        if seconds is None or seconds > MAX_AFFINITY_SECONDS:
            self.lost("a client keeps its backend for one day at most", "1d was written")
            seconds = MAX_AFFINITY_SECONDS
        return {"by": "client-ip", "timeout": f"{max(1, round(seconds))}s"}

    def timing(self, interval: float, timeout: float, rise: int, fall: int) -> dict[str, object]:
        """The keys of a check for these seconds and counts within the limits of vipd/v1; a note says what was
        changed."""
        longest = _within(interval, MIN_CHECK_SECONDS, MAX_CHECK_SECONDS)
        possible = {
            "interval": longest,
            "timeout": _within(timeout, MIN_CHECK_SECONDS, longest),
            "rise": min(max(rise, 1), MAX_COUNT),
            "fall": min(max(fall, 1), MAX_COUNT),
        }
        for (name, became), was in zip(possible.items(), (interval, timeout, rise, fall), strict=True):
            if abs(was - became) > 0.001:
                self.note(f"{name} {was:g} became {became:g}: a check of vipd allows no other")
        seconds = {name: period_text(possible[name]) for name in ("interval", "timeout")}
        return {**possible, **seconds}

    def server_address(self, text: str) -> str | None:
        """The address of a server; None after a report."""
        try:
            address = parse_backend_address(text)
        except InvalidTextError as error:
            self.lost(error.what, error.hint)
            return None
        kind = address_kind(address)
        if kind in FORBIDDEN_BACKEND_KINDS and not (kind == "link-local" and ":" not in address):
            self.lost(f"{address} is {kind}, and cannot be a backend", FORBIDDEN_BACKEND_KINDS[kind])
            return None
        return address

    def server_host(self, text: str) -> str | None:
        """As `server_address`, but empty for a name, which `named_server` takes."""
        return "" if is_bare_name(text) else self.server_address(text)


def _within(seconds: float, low: float, high: float) -> float:
    """The seconds within limits, in whole milliseconds."""
    return round(min(max(seconds, low), high) * 1000) / 1000


Token = tuple[int, str, str]
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
            blocks.append([])
            blocks[-2][-1].block = blocks[-1]
        elif sign == "}":
            blocks.pop()
        if not 0 < len(blocks) <= limits.YAML_DEPTH:
            reason = "blocks are nested too deeply" if blocks else "a closing brace without an opening one"
            report.problem(line, "", reason, "the rest of the file was not read")
            return top
    if len(blocks) > 1 or words:
        Directive(report, start, words).lost("the file ends within a block or a directive")
    return top


def named(directives: Iterable[Directive], *names: str) -> Iterator[Directive]:
    """Those of these names."""
    return (directive for directive in directives if directive.name in names)


def split_address(text: str) -> tuple[str, str]:
    """Address and port of `ADDR:PORT` or `[ADDR]:PORT`; without a port, the text and nothing."""
    address, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text.strip("[]"), ""
    return address.strip("[]"), port
