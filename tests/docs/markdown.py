"""The project's Markdown as values: fenced blocks, table rows, links, headings, words in code type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"\s*```(\w*)\s*$")
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
_REQUEST = re.compile(r"`(GET|POST|PATCH|DELETE) ([^`?]+)[^`]*`")
_CELL_BORDER = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `line` is that of its first line of text, 1-based."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of prose, which stands in no fenced block."""

    page: Path
    number: int
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.number}"

    def code(self) -> list[str]:
        """What stands in backticks."""
        return _CODE.findall(self.text)

    def links(self) -> list[str]:
        """The targets of its links."""
        return _LINK.findall(_CODE.sub("", self.text))


def name_of(page: Path) -> str:
    """The page as the project's files are called: `docs/api.md`."""
    return page.relative_to(ROOT).as_posix()


def pages() -> tuple[Path, ...]:
    """What is written for users."""
    return (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def all_pages() -> tuple[Path, ...]:
    """Those, and what is written for developers beside the code."""
    return (*pages(), ROOT / "CHANGELOG.md", *sorted((ROOT / "vipd").rglob("*.md")))


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The fenced blocks of these languages, of every one if none is named."""
    for part in parts(page):
        if isinstance(part, Block) and (not languages or part.language in languages):
            yield part


def prose(page: Path) -> Iterator[Line]:
    """Every line outside of fenced blocks."""
    return (part for part in parts(page) if isinstance(part, Line))


def rows(page: Path, heading: str = "") -> Iterator[list[str]]:
    """The cells of every table row below a heading, titles and rulers left out; "" is the whole page."""
    within, titled = not heading, False
    for line in prose(page):
        text = line.text
        if text.startswith("#"):
            within = not heading or text.lstrip("#").strip() == heading
        if not text.startswith("|"):
            titled = False
        elif within and titled and not text.startswith("|--"):
            yield [cell.strip().replace(r"\|", "|") for cell in _CELL_BORDER.split(text)[1:-1]]
        else:
            titled = True


def described_requests() -> set[tuple[str, str]]:
    """Method and path of every request that docs/api.md has a row for."""
    cells = (row[0] for row in rows(ROOT / "docs" / "api.md"))
    return {(method, path.strip()) for cell in cells for method, path in _REQUEST.findall(cell)}


def anchors(page: Path) -> set[str]:
    """What `#...` in a link may name: the headings as GitHub and its kin spell them."""
    titles = (line.text.lstrip("#").strip() for line in prose(page) if line.text.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def parts(page: Path) -> Iterator[Block | Line]:
    """Fenced blocks and lines of prose in their order; raises ValueError for a block without an end."""
    text: list[str] | None = None
    language, first = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and text is None:
            text, language, first = [], fence[1], number + 1
        elif fence and text is not None:
            yield Block(page, first, language, "".join(f"{each}\n" for each in text))
            text = None
        elif text is not None:
            text.append(line)
        else:
            yield Line(page, number, line)
    if text is not None:
        raise ValueError(f"{name_of(page)}:{first}: this block does not end")
