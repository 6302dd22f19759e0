"""Output of verbs: tables that fit the screen, colour if wanted, JSON and YAML."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TextIO

import click

from vipd.cli.connection import EXACT
from vipd.cli.terminal import control
from vipd.model.text import display_width as width_of
from vipd.model.text import json_text, one_line
from vipd.observe.api_client import Json

API_VERSION = "vipd/v1"

STORES = ("file", "etcd")


MIN_PROSE_WIDTH = 40
"""Sentences are not broken into lines shorter than this, however narrow the terminal."""

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


class Cell(NamedTuple):
    """A text and the colour it has where colours are shown."""

    text: str
    colour: str = ""


class Column(NamedTuple):
    """A table's column. To fit the screen its texts may be truncated to `min_width` columns; 0: never."""

    title: str
    min_width: int = 0
    right: bool = False
    prose: bool = False
    """The last column may be one of sentences: on a screen too narrow for one it stands below its row."""


class Screen(NamedTuple):
    """The destination of output: `width` in columns, None if nothing must be truncated."""

    width: int | None
    colour: bool

    def paint(self, text: str, colour: str) -> str:
        """`text` in that colour, if this screen shows colours."""
        if not (self.colour and colour and text):
            return text
        return f"{control(f'[{_COLOURS[colour]}m')}{text}{control('[0m')}"


def screen(stream: TextIO | None = None) -> Screen:
    """Standard output, or another stream: it has a width and colours only when it is a terminal."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return Screen(None, False)
    try:
        width = int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 80
    return Screen(width or 80, "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb")


def prose(text: str, terminal: Screen, indent: str = "") -> list[str]:
    """The lines of a sentence: one, unless the screen is too narrow for it; further ones are indented."""
    if terminal.width is None or len(indent) + width_of(text) <= terminal.width:
        return [indent + text]
    # Imported here because only text that does not fit a terminal needs it.
    import textwrap

    return textwrap.wrap(
        text,
        max(terminal.width, MIN_PROSE_WIDTH),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,  # an address or a path cut in two is none any more
        break_on_hyphens=False,
    )


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Cell]],
    terminal: Screen,
    *,
    headers: bool = True,
    indent: str = "",
) -> list[str]:
    """The lines of a table. The last column is not padded; one of prose may take several lines."""
    cells = [[_clean(cell if isinstance(cell, Cell) else Cell(cell)) for cell in row] for row in rows]
    if headers:
        cells.insert(0, [Cell(column.title, "bold") for column in columns])
    widths = [max((width_of(row[i].text) for row in cells), default=0) for i in range(len(columns))]
    if terminal.width is not None:
        _shrink(widths, columns, terminal.width - len(indent) - 2 * (len(columns) - 1))
    lines = []
    for row in cells:
        line = indent + _line(row, columns, widths, terminal)
        text, colour = row[-1]
        wide = len(indent) + sum(widths[:-1]) + 2 * (len(columns) - 1) + width_of(text)
        if columns[-1].prose and terminal.width is not None and wide > terminal.width:
            line = indent + _line([*row[:-1], Cell("")], columns, widths, terminal)
            below = prose(text, terminal, indent + "    ")
            lines += [line, *(terminal.paint(part, colour) for part in below)]
        else:
            lines.append(line)
    return lines


def _clean(cell: Cell) -> Cell:
    return Cell(one_line(cell.text), cell.colour)


def _shrink(widths: list[int], columns: Sequence[Column], room: int) -> None:
    spare = {i: widths[i] - column.min_width for i, column in enumerate(columns) if column.min_width}
    for _ in range(sum(widths) - room):
        widest = max(spare, key=lambda i: spare[i], default=None)
        if widest is None or spare[widest] <= 0:
            return
        spare[widest] -= 1
        widths[widest] -= 1


def _line(row: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], terminal: Screen) -> str:
    parts: list[str] = []
    for i, (cell, column, width) in enumerate(zip(row, columns, widths, strict=True)):
        text = truncate_middle(cell.text.rstrip(), width) if column.min_width else cell.text
        painted = terminal.paint(text, cell.colour)
        padding = " " * (width - width_of(text))
        last = i == len(row) - 1
        parts.append(padding + painted if column.right else painted if last else painted + padding)
    return "  ".join(parts).rstrip()


def truncate_middle(text: str, width: int) -> str:
    """`text` in at most `width` columns, without its middle: names and addresses differ at their ends."""
    if width_of(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{truncate_end(text, width - 1 - tail)}…{truncate_end(text[::-1], tail)[::-1]}"


def truncate_end(text: str, room: int) -> str:
    """As much of the text as has room in so many columns."""
    if text.isascii():
        return text[:room]
    end, taken = 0, 0
    while end < len(text) and (taken := taken + width_of(text[end])) <= room:
        end += 1
    return text[:end]


def document(content: Json, form: str) -> str:
    """`content` as JSON or YAML (`form` is "json" or "yaml"), with `apiVersion` first."""
    whole = {"apiVersion": API_VERSION} | content
    if form == "json":
        return json_text(whole, indent=2)
    # Imported here because only YAML output needs it, and it costs as much as click.
    from vipd.declaration.yaml_text import dump_yaml

    return dump_yaml(whole).rstrip("\n")


def output_option(*forms: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command `-o` with these forms, the first being the default, and `--json`; it takes `form`."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @click.option(
            "-o", "--output", type=click.Choice(forms), default=forms[0], help="Form of the output."
        )
        @click.option("--json", "as_json", is_flag=True, help="Short for -o json.")
        @wraps(command)
        def with_form(*args: Any, output: str, as_json: bool, **options: Any) -> int:
            form = "json" if as_json else output
            click.get_current_context().meta[EXACT] = form in ("json", "yaml")
            return command(*args, form=form, **options)

        return with_form

    return decorate


def socket_option(command: Callable[..., int]) -> Callable[..., int]:
    """Accept `--socket` after the verb, too."""
    from vipd.cli.argument_types import FILE
    from vipd.cli.connection import choose_socket

    def remember(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
        choose_socket(ctx, path)

    option = click.option(
        "--socket",
        metavar="PATH",
        type=FILE,
        expose_value=False,
        callback=remember,
        help="The daemon's socket.",
    )
    return option(command)


def store_option(command: Callable[..., int]) -> Callable[..., int]:
    """Accept `--store` after the verb, too."""
    from vipd.cli.connection import choose_store

    def remember(ctx: click.Context, _: click.Parameter, store: str | None) -> None:
        choose_store(ctx, store)

    option = click.option(
        "--store",
        type=click.Choice(STORES),
        expose_value=False,
        callback=remember,
        help="Where services are kept: on this host, or for all.",
    )
    return option(command)
