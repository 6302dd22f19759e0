"""Command lines of the documentation, read by the programs' own parsers: test_pages runs them."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator

import click

from tests.docs.markdown import Block
from tests.docs.transcript import steps_of
from vipd.cli.errors import CliError
from vipd.cli.main import cli
from vipd.host.settings.command_line import argument_parser as vipd_parser

PROGRAMS = ("vipctl", "vipd")
_PREFIXES = ("sudo", "exec", "do", "until", "while", "if", "!")


def command_lines(block: Block) -> Iterator[tuple[str, ...]]:
    """The commands of a shell block as words. In `console` they follow a prompt; the rest is output."""
    if block.language == "console":
        for step in steps_of(block):
            yield from _commands(step.command.replace("\\\n", " "))
        return
    for line in block.text.splitlines():
        yield from _commands(line)


def calls_of_ours(block: Block) -> Iterator[tuple[str, ...]]:
    """Those of `vipctl` or `vipd`, without `sudo`, `ip netns exec` and the program's directory."""
    for words in command_lines(block):
        rest = list(words)
        if rest[:3] == ["ip", "netns", "exec"]:
            rest = rest[4:]
        while rest and (rest[0] in _PREFIXES or "=" in rest[0]):
            rest = rest[1:]
        program = rest[0].rpartition("/")[2] if rest else ""
        if program in PROGRAMS:
            yield (program, *rest[1:])


def fault_of(call: tuple[str, ...], *, fragment: bool = False) -> str:
    """Why the program would not take these words; empty when it would.

    A `fragment` may lack arguments and have words such as N in place of values.
    """
    try:
        if call[0] == "vipd":
            _read_by_vipd(call[1:])
        else:
            _read_by_vipctl(call[1:])
    except (click.MissingParameter, click.BadParameter) as error:
        # NoSuchOption is neither of the two.
        return "" if fragment else error.format_message()
    except click.UsageError as error:
        return error.format_message()
    except CliError as error:
        return error.message
    return ""


def _read_by_vipctl(words: tuple[str, ...]) -> None:
    group = click.Context(cli, info_name="vipctl", **cli.context_settings)
    # The group's own options stand before the verb.
    _, rest, _ = cli.make_parser(group).parse_args(list(words))
    if not rest:
        return
    name, command, arguments = cli.resolve_command(group, rest)
    assert command is not None
    command.make_context(name, arguments, parent=group)


def _read_by_vipd(words: tuple[str, ...]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            vipd_parser().parse_args(words)
    except SystemExit as end:
        if end.code:
            raise click.UsageError(said.getvalue().strip().rpartition("\n")[2]) from None


_DESCRIPTOR = re.compile(r"(?<!\S)\d(?=[<>])")
"""The number before a redirection: it would look like an argument."""


def _commands(line: str) -> Iterator[tuple[str, ...]]:
    """The commands that a shell line consists of, redirections left out."""
    reader = shlex.shlex(_DESCRIPTOR.sub("", line), posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in reader:
        if set(word) <= set("<>&|;()"):
            redirected = word[0] in "<>"
            if not redirected and words:
                yield tuple(words)
                words = []
        elif not redirected:
            words.append(word)
        else:
            redirected = False
    if words:
        yield tuple(words)
