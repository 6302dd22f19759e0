"""The command line of `vipctl` as values, read from click's own objects, and thus always up to date."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc

import click

from vipd.cli.argument_types import WORDS, Word
from vipd.cli.main import VERB_GROUPS, cli


@dataclass(frozen=True, slots=True)
class Offer:
    """A shell's suggestions for a word: `source` as in `vipd.cli.argument_types`, "" for none."""

    source: str = ""
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `metavar` is empty, and `offer` None, for one that takes no value."""

    names: tuple[str, ...]
    metavar: str
    help: str
    offer: Offer | None
    default: str = ""
    required: bool = False
    repeatable: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. `repeated` ones take all remaining words."""

    metavar: str
    offer: Offer
    repeated: bool


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. `help` is its paragraphs; those that begin with a backspace keep their line breaks."""

    name: str
    group: str
    summary: str
    help: tuple[str, ...]
    options: tuple[Option, ...]
    arguments: tuple[Argument, ...]


HELP = Option(("-h", "--help"), "", "Show a short help and exit.", None)


def verbs() -> tuple[Verb, ...]:
    """Every verb in the order of the help, without hidden ones."""
    return tuple(_verbs())


def group_options() -> tuple[Option, ...]:
    """The options before a verb."""
    return _options(cli)


def _verbs() -> Iterator[Verb]:
    context = click.Context(cli, info_name="vipctl", **cli.context_settings)
    for family, names in VERB_GROUPS.items():
        for name, verb in names.items():
            command = cli.get_command(context, name)
            if command is None or command.hidden:
                continue
            paragraphs = tuple(cleandoc(command.help or "").split("\n\n"))
            arguments = tuple(map(_argument, _shown(command, click.Argument)))
            yield Verb(name, family, verb.summary, paragraphs, _options(command), arguments)


def _options(command: click.Command) -> tuple[Option, ...]:
    found = [_option(each) for each in _shown(command, click.Option)]
    return (*found, HELP)


def _shown(command: click.Command, kind: type[click.Parameter]) -> list[click.Parameter]:
    return [each for each in command.params if isinstance(each, kind) and not getattr(each, "hidden", False)]


def _option(parameter: click.Parameter) -> Option:
    assert isinstance(parameter, click.Option)  # noqa: S101 (`_shown` chose it)
    names = tuple(sorted(parameter.opts, key=len))
    if parameter.is_flag:
        return Option(names, "", parameter.help or "", None)
    choices = "|".join(parameter.type.choices) if isinstance(parameter.type, click.Choice) else ""
    limits = f" {_limits(parameter.type)}" if isinstance(parameter.type, click.IntRange) else ""
    return Option(
        names,
        parameter.metavar or choices or str(parameter.name).upper(),
        f"{parameter.help or ''}{limits}",
        _offer(parameter.type),
        _default(parameter),
        parameter.required,
        parameter.multiple,
    )


def _default(parameter: click.Option) -> str:
    """The default where it is one of a few words, or where click is to show it."""
    # click 8.1 has None if nothing is set, later versions a special object.
    told = isinstance(parameter.type, click.Choice) or parameter.show_default
    return parameter.default if told and isinstance(parameter.default, str) else ""


def _limits(numbers: click.IntRange) -> str:
    return f"From {numbers.min} to {numbers.max}."


def _argument(parameter: click.Parameter) -> Argument:
    metavar = parameter.metavar or str(parameter.name).upper()
    return Argument(metavar, _offer(parameter.type), parameter.nargs == -1)


def _offer(kind: object) -> Offer:
    if isinstance(kind, Word):
        return Offer(kind.source, kind.words)
    if isinstance(kind, click.Choice):
        return Offer(WORDS, tuple(map(str, kind.choices)))
    return Offer()
