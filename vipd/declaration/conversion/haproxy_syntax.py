"""The sections, lines and words of haproxy.cfg. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vipd.declaration.conversion.draft import Conversion

SECTIONS = (
    "global",
    "defaults",
    "frontend",
    "backend",
    "listen",
    "peers",
    "userlist",
    "resolvers",
    "mailers",
    "cache",
    "program",
    "ring",
    "http-errors",
    "log-forward",
    "log-profile",
    "fcgi-app",
    "crt-store",
    "acme",
    "traces",
)
PROXIES = ("frontend", "backend", "listen")

_PIECE = re.compile(
    r"(?P<space>\s+)|(?P<comment>#.*)|\\(?P<escaped>.)|'(?P<strong>[^']*)'?"
    r"|\"(?P<weak>(?:\\.|[^\"\\])*)\"?|(?P<plain>[^\s#\\'\"]+)|(?P<rest>.)"
)
_VARIABLE = re.compile(r"(?<!\\)\$[A-Za-z_{]")
_ESCAPE = re.compile(r"\\(.)")
_TIME = re.compile(r"([0-9]{1,12})(us|ms|s|m|h|d)?")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TWO_WORDS = frozenset({"option", "timeout", "http-check", "tcp-check", "stick", "no", "stats", "rate-limit"})


class Line(NamedTuple):
    """A line of a section."""

    number: int
    words: list[str]

    @property
    def key(self) -> str:
        """The keyword, with its second word where that says which: `option tcplog`."""
        return " ".join(self.words[: 2 if self.words[0] in _TWO_WORDS else 1])

    @property
    def arguments(self) -> list[str]:
        """The words after the keyword."""
        return self.words[len(self.key.split(" ")) :]

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(slots=True)
class Section:
    """A proxy, with the lines of its defaults before its own."""

    line: int
    kind: str
    name: str
    lines: list[Line] = field(default_factory=list)

    def last(self, key: str) -> Line | None:
        """The line with this key that counts."""
        return next((line for line in reversed(self.lines) if line.key == key), None)

    def option(self, name: str) -> Line | None:
        """The line that turns an option on; None if it is off."""
        keys = {f"option {name}": True, f"no option {name}": False}
        for line in reversed(self.lines):
            key = " ".join(line.words[:3]) if line.words[0] == "no" else line.key
            if key in keys:
                return line if keys[key] else None
        return None

    def all(self, key: str) -> list[Line]:
        """Every line with this key."""
        return [line for line in self.lines if line.key == key]

    @property
    def mode(self) -> str:
        """The mode; HAProxy's default is tcp."""
        line = self.last("mode")
        return line.arguments[0] if line and line.arguments else "tcp"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def read_sections(conversion: Conversion, text: str) -> list[Section]:
    """The proxies of a file."""
    found: list[Section] = []
    named: dict[str, Section] = {}
    defaults = Section(0, "defaults", "")
    current = Section(0, "", "")
    for line in _lines(conversion, text):
        kind = line.words[0]
        if kind not in SECTIONS:
            current.lines.append(line)
            continue
        name, base = _heading(line)
        current = Section(line.number, kind, name)
        if kind == "defaults":
            defaults = named[name] = current
            current.lines += named[base].lines if base in named else []
        elif kind in PROXIES:
            current.lines += (named.get(base, defaults) if base else defaults).lines
            if len(line.words) > 2 and line.words[2] != "from":
                current.lines.append(Line(line.number, ["bind", *line.words[2:]]))
            found.append(current)
        elif kind != "global":
            conversion.note(line.number, str(line), "concerns HAProxy itself")
    return found


def _heading(line: Line) -> tuple[str, str]:
    """The name of a section, and that of the defaults that it is `from`."""
    words = line.words[1:]
    base = words[words.index("from") + 1] if "from" in words[:-1] else ""
    return (words[0] if words and words[0] != "from" else ""), base


def _lines(conversion: Conversion, text: str) -> Iterator[Line]:
    """The lines with words. Those that depend on the host are reported, and left out."""
    conditions = 0
    for number, line in enumerate(text.split("\n"), 1):
        words, variable = split_line(line)
        if not words:
            continue
        if words[0].startswith("."):
            conditions += {".if": 1, ".endif": -1}.get(words[0], 0)
            if words[0] == ".if":
                why = "depends on the host: the lines up to its .endif were not read"
                conversion.lost(number, " ".join(words), why, "keep those that this host needs, without .if")
        elif conditions <= 0 and variable:
            why = "has a variable of the environment, and was not read"
            conversion.lost(number, " ".join(words), why, "write its value")
        elif conditions <= 0:
            yield Line(number, words)


def split_line(line: str) -> tuple[list[str], bool]:
    """The words of a line, and whether one of them needs a variable of the environment."""
    words: list[str] = []
    parts: list[str] = []
    started = False
    variable = False
    for found in _PIECE.finditer(line):
        kind = found.lastgroup
        if kind in ("space", "comment"):
            if started:
                words.append("".join(parts))
            parts, started = [], False
            if kind == "comment":
                break
            continue
        part = found[kind or 0]
        if kind == "weak":
            variable = variable or bool(_VARIABLE.search(part))
            part = _ESCAPE.sub(r"\1", part)
        parts.append(part)
        started = True
    if started:
        words.append("".join(parts))
    return words, variable


def read_time(conversion: Conversion, line: int, what: str, text: str) -> float | None:
    """Seconds of a time, which is in milliseconds without a unit; None after a report."""
    found = _TIME.fullmatch(text)
    if found is None:
        conversion.lost(line, what, f"{text} is no time")
        return None
    return int(found[1]) * _UNITS[found[2] or "ms"]


def read_parameters(words: Sequence[str], arity: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The parameters of a bind or server line, each with its values; those of unknown ones are none."""
    place = 0
    while place < len(words):
        name, place = words[place], place + 1
        end = place + arity.get(name, 0)
        # A source address may be followed by what it is used for.
        if name == "source" and end < len(words) and words[end] in ("usesrc", "interface"):
            end += 2
        yield name, " ".join(words[place:end])
        place = end
