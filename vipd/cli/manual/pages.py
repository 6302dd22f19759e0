"""A manual page as a value: sections of blocks. Pure.

In texts, `word` is literal text of a file or a command line, and *word* is a placeholder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Prose, filled to the width of the screen."""

    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """Lines that are shown unchanged, without markup; `language` is `yaml`, `settings` or `shell`."""

    text: str
    language: str = "shell"


@dataclass(frozen=True, slots=True)
class Entry:
    """A term with its description, indented below."""

    term: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Subsection:
    """A heading within a section."""

    title: str


Block: TypeAlias = Paragraph | Example | Entry | Subsection


@dataclass(frozen=True, slots=True)
class Section:
    """The content below one heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """One page; `summary` follows the name in lists of pages. NAME is no section of it, but made of these."""

    name: str
    number: int
    summary: str
    sections: tuple[Section, ...]

    @property
    def file(self) -> str:
        """`vipctl.1`."""
        return f"{self.name}.{self.number}"

    def examples(self) -> Iterator[Example]:
        """Every example, in order."""
        for section in self.sections:
            yield from _examples(section.blocks)


def entry(term: str, text: str) -> Entry:
    """An entry of one paragraph."""
    return Entry(term, (Paragraph(text),))


def _examples(blocks: tuple[Block, ...]) -> Iterator[Example]:
    for block in blocks:
        if isinstance(block, Example):
            yield block
        elif isinstance(block, Entry):
            yield from _examples(block.blocks)
