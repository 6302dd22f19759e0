"""A recording of a terminal: its file in the format asciicast v2, and the rows that it shows. Pure.

The format: https://docs.asciinema.org/manual/asciicast/v2/. `asciinema play` plays such a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

VERSION = 2
TYPED = 4
"""A row whose characters appear at so many moments or more was typed."""

_PART = re.compile(r"\x1b\[(?P<codes>[0-9;]*)m|(?P<newline>\r*\n)|(?P<character>[^\x00-\x1f\x7f])")
_STYLES = {"1": "bold", "2": "dim", "31": "red", "32": "green", "33": "yellow", "36": "cyan"}


@dataclass(frozen=True, slots=True)
class Output:
    """Text that appears on the terminal, `at` seconds from the start of the recording."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Recording:
    """What a terminal of that size in characters has shown."""

    width: int
    height: int
    idle_limit: float
    """A player shortens longer pauses to so many seconds."""
    outputs: tuple[Output, ...]

    @property
    def text(self) -> str:
        return "".join(f"{row.text.rstrip()}\n" for row in rows(self))

    def write(self) -> str:
        head = {
            "version": VERSION,
            "width": self.width,
            "height": self.height,
            "idle_time_limit": self.idle_limit,
        }
        lines = [head, *([round(output.at, 3), "o", output.text] for output in self.outputs)]
        return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)

    @classmethod
    def read(cls, text: str) -> Recording:
        """The recording in the text of a file. Raises ValueError when it is none."""
        head, *lines = map(json.loads, text.splitlines())
        if head.get("version") != VERSION:
            raise ValueError(f"asciicast of version {head.get('version')}; only {VERSION} is known")
        outputs = tuple(Output(at, said) for at, kind, said in lines if kind == "o")
        return cls(head["width"], head["height"], head["idle_time_limit"], outputs)

    def shortened(self) -> Recording:
        """The same with each longer pause cut to `idle_limit`."""
        outputs, saved, before = [], 0.0, 0.0
        for output in self.outputs:
            saved += max(0.0, output.at - before - self.idle_limit)
            before = output.at
            outputs.append(Output(output.at - saved, output.text))
        return Recording(self.width, self.height, self.idle_limit, tuple(outputs))


@dataclass(frozen=True, slots=True)
class Cell:
    """A character, its styles, and when it appeared."""

    character: str
    styles: frozenset[str]
    at: float


@dataclass(slots=True)
class Row:
    at: float
    cells: list[Cell] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(cell.character for cell in self.cells)

    @property
    def typed_from(self) -> int:
        """The column of the first character that was typed: those after it appear one by one. The width of
        the row when nothing was."""
        times = [cell.at for cell in self.cells]
        if len(set(times)) < TYPED:
            return len(times)
        return next(column for column, at in enumerate(times) if at != times[0])

    def runs(self) -> Iterator[tuple[int, str, frozenset[str]]]:
        """Column, text and styles of each part that has one style."""
        column = 0
        for styles, cells in groupby(self.cells, key=lambda cell: cell.styles):
            text = "".join(cell.character for cell in cells)
            yield column, text, styles
            column += len(text)


def rows(recording: Recording) -> list[Row]:
    """The rows from the first one on, also those that have left the screen. Raises ValueError for
    anything but text, newlines and colours: what moves the cursor would be drawn wrongly."""
    found = [Row(0.0)]
    styles: frozenset[str] = frozenset()
    for output in recording.outputs:
        end = 0
        while end < len(output.text):
            part = _PART.match(output.text, end)
            if part is None:
                raise ValueError(f"{output.text[end : end + 8]!r} is not drawn")
            end = part.end()
            if part["character"]:
                if len(found[-1].cells) == recording.width:
                    found.append(Row(output.at))
                found[-1].cells.append(Cell(part["character"], styles, output.at))
            elif part["newline"]:
                found.append(Row(output.at))
            else:
                styles = _styled(styles, part["codes"])
    return found


def _styled(styles: frozenset[str], codes: str) -> frozenset[str]:
    for code in codes.split(";"):
        if code in ("", "0"):
            styles = frozenset()
        elif code in _STYLES:
            styles |= {_STYLES[code]}
        else:
            raise ValueError(f"colour {code} is not drawn")
    return styles
