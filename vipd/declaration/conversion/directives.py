"""Configurations made of directives and blocks in braces, as nginx and keepalived have them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from vipd.declaration.fields import Report
from vipd.model import limits


class Sign(Enum):
    """What is no word."""

    OPEN = "{"
    CLOSE = "}"
    END = ";"
    """The end of a directive."""


Token = tuple[int, "str | Sign"]
"""A word or a sign, and its line."""


@dataclass(slots=True)
class Directive:
    """Words, and the directives in the braces behind them; `block` is None without braces."""

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

    def __str__(self) -> str:
        """How messages name it."""
        return " ".join(self.words[:4])


def tree_of(report: Report, tokens: Iterable[Token]) -> list[Directive]:
    """The directives of a file. A missing or surplus brace is reported; what was read up to there stays."""
    top: list[Directive] = []
    blocks = [top]
    words: list[str] = []
    start = 0
    for line, token in tokens:
        if isinstance(token, str):
            start = start if words else line
            words.append(token)
            continue
        if words or token is Sign.OPEN:
            blocks[-1].append(Directive(start if words else line, words or ["{"]))
            words = []
        if token is Sign.OPEN:
            blocks.append([])
            blocks[-2][-1].block = blocks[-1]
        elif token is Sign.CLOSE:
            blocks.pop()
        if not 0 < len(blocks) <= limits.YAML_DEPTH:
            why = "blocks are nested too deeply" if blocks else "a closing brace without an opening one"
            report.add(line, "", why, "the rest of the file was not read")
            return top
    if len(blocks) > 1 or words:
        report.add(start, " ".join(words[:4]), "the file ends within a block or a directive")
    return top


def named(directives: Iterable[Directive], *names: str) -> Iterator[Directive]:
    """Those of these names."""
    return (directive for directive in directives if directive.name in names)
