"""The two options by which a verb that asks no daemon takes settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from vipd.cli.argument_types import FILE, SETTING

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
