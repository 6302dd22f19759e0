"""Types of arguments: the suggestions of a shell for a word.

`python -m vipd.cli.manual` generates the shells' scripts from this. Every verb imports this module, so it
must stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

FILES = "files"
DIRECTORIES = "directories"
WORDS = "words"
SETTINGS = "settings"
"""Words that end in =, a value following."""


class Word(click.types.StringParamType):
    """Text without conversion. A shell suggests what `source` names: one of the words above, which
    the scripts contain themselves, or one of `ASKED`. `words` are those of `WORDS`; others are accepted too.
    """

    def __init__(self, source: str, words: Sequence[str] = ()) -> None:
        self.source = source
        self.words = tuple(words)


FILE = Word(FILES)
DIRECTORY = Word(DIRECTORIES)
SETTING = Word(SETTINGS)
TARGET = Word("targets")
"""Any service, by name or frontend."""
OWN_TARGET = Word("own-targets")
"""A service that vipctl may change."""
SERVICE_BACKEND = Word("places")
"""A backend of any service, after the service and a slash."""
OWN_SERVICE_BACKEND = Word("own-places")
"""Such a service, or a backend of any service after a slash."""
BACKEND = Word("backends")
"""A backend of the service that the first argument names."""

DAEMON_SOURCES = tuple(
    kind.source for kind in (TARGET, OWN_TARGET, SERVICE_BACKEND, OWN_SERVICE_BACKEND, BACKEND)
)
"""Sources for which a shell calls `vipctl complete`, which queries the daemon."""

Command = Callable[..., Any]


def settings_options(
    file_help: str, one_help: str = "One setting; repeatable."
) -> Callable[[Command], Command]:
    """Give a command `--settings FILE` as `settings_file`, and `--set KEY=VALUE` as `assignments`."""
    file = click.option("--settings", "settings_file", metavar="FILE", type=FILE, help=file_help)
    one = click.option(
        "--set", "assignments", metavar="KEY=VALUE", type=SETTING, multiple=True, help=one_help
    )
    return lambda command: file(one(command))


def files_argument(command: Command) -> Command:
    """Give a command any number of FILE as `files`, and each `-f FILE` as one of `named`."""
    named = click.option(
        "-f",
        "--file",
        "named",
        metavar="FILE",
        type=FILE,
        multiple=True,
        help="The same as FILE; repeatable.",
    )
    return click.argument("files", metavar="[FILE]...", nargs=-1, type=FILE)(named(command))
