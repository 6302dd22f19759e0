"""Writes a page in roff with the macros of man(7), for every reader of manual pages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from textwrap import wrap

from vipd.cli.manual.pages import Block, Entry, Example, Page, Paragraph, Subsection

_MARKUP = re.compile(r"`([^`]+)`|(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])")
_WIDTH = 78
"""Columns of lines in the source."""
_SENTENCE_END = re.compile(r"(?<=[^.\s][.?!])\s+(?=\S)(?=(?:[^`]*`[^`]*`)*[^`]*$)")
"""Not after dots of an ellipsis, and not within backquotes."""
_SPECIAL = {"\\": r"\e", "^": r"\(ha", "~": r"\(ti", "`": r"\(ga", "'": r"\(aq", '"': r"\(dq", "-": r"\-"}
"""Characters that roff would replace by others. A bare hyphen in prose may stay: there a line may break."""


def roff(page: Page, version: str, day: date | None) -> str:
    """The page's source. `day` is the date in its foot; without one the foot has none."""
    foot = f"{day.isoformat() if day else _argument('')} {_argument(f'vipd {version}')}"
    lines = [
        r".\" Made by python -m vipd.cli.manual of the program itself: change that, not this.",
        f".TH {_argument(page.name.upper())} {page.number} {foot} {_argument('vipd manual')}",
        ".SH NAME",
        rf"{_literal(page.name)} \- {_prose(page.summary)}",
    ]
    for section in page.sections:
        lines.append(f".SH {_argument(section.title)}")
        above: Block | None = None
        for block in section.blocks:
            lines += _block(block, first=above is None or isinstance(above, Subsection))
            above = block
    return "\n".join(lines) + "\n"


def _block(block: Block, *, first: bool) -> Iterator[str]:
    match block:
        case Subsection():
            yield f".SS {_argument(block.title)}"
        case Paragraph():
            if not first:
                yield ".PP"
            yield from _sentences(block.text)
        case Example():
            yield ".PP"
            yield from _example(block)
        case Entry():
            yield ".TP"
            yield _line(_inline(block.term))
            yield from _entry_blocks(block.blocks)


def _entry_blocks(blocks: tuple[Block, ...]) -> Iterator[str]:
    """The blocks indented below a term: a .PP would end it, so .IP without a term continues it."""
    for index, block in enumerate(blocks):
        if isinstance(block, Entry):
            yield ".RS"
            yield from _block(block, first=False)
            yield ".RE"
            continue
        if index:
            yield ".IP"
        if isinstance(block, Paragraph):
            yield from _sentences(block.text)
        elif isinstance(block, Example):
            yield from _example(block)


def _example(block: Example) -> Iterator[str]:
    yield ".nf"
    yield from (_line(_literal(line)) for line in block.text.rstrip("\n").split("\n"))
    yield ".fi"


def _sentences(text: str) -> Iterator[str]:
    """A new line for each sentence, so that all ends of sentences look the same."""
    for sentence in _SENTENCE_END.split(" ".join(text.split())):
        shown = _inline(sentence)
        yield from map(_line, wrap(shown, _WIDTH, break_long_words=False, break_on_hyphens=False))


def _inline(text: str) -> str:
    """`text` with its markup as fonts."""
    parts, end = [], 0
    for found in _MARKUP.finditer(text):
        parts.append(_prose(text[end : found.start()]))
        code, other = found.groups()
        parts.append(rf"\fB{_literal(code)}\fP" if code else rf"\fI{_literal(other)}\fP")
        end = found.end()
    return "".join([*parts, _prose(text[end:])])


def _literal(text: str) -> str:
    """Literal characters, to be copied from the page."""
    return "".join(_SPECIAL.get(character, _shown(character)) for character in text)


def _prose(text: str) -> str:
    return "".join(character if character == "-" else _literal(character) for character in text)


def _shown(character: str) -> str:
    return character if character.isascii() else f"\\[u{ord(character):04X}]"


def _line(text: str) -> str:
    """A line of text that roff does not parse as a request. Empty ones only occur in examples."""
    return rf"\&{text}" if text[:1] in (".", "'") else text


def _argument(text: str) -> str:
    return f'"{_literal(text)}"' if not text or " " in text else _literal(text)
