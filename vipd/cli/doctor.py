"""`vipctl doctor`: checks this host for every prerequisite and trap. Needs no daemon, changes nothing."""

from __future__ import annotations

from pathlib import Path

import click

from vipd.cli.argument_types import TARGET, settings_options
from vipd.cli.connection import chosen_socket
from vipd.cli.errors import FAILED, NOT_FOUND, OK, CliError
from vipd.cli.output import document, output_option, screen, socket_option
from vipd.host.settings.settings import Settings, load_settings
from vipd.host.settings.settings_file import DEFAULT_CONFIG, SettingsError, parse_assignments
from vipd.observe.doctor.collect.host import CollectOptions, UnknownTargetError, collect, is_root
from vipd.observe.doctor.diagnosis import diagnose
from vipd.observe.doctor.text import WIDEST, lines_of


@click.command()
@click.argument("target", metavar="[TARGET]", required=False, default="", type=TARGET)
@click.option("-q", "--quiet", is_flag=True, help="Show only what is not in order.")
@click.option("--all", "everything", is_flag=True, help="Show what is in order, too.")
@settings_options(
    "Settings of a daemon that does not run; default: vipd.yaml.", "One such setting; repeatable."
)
@output_option("text", "json", "yaml")
@socket_option
def doctor(
    target: str,
    quiet: bool,
    everything: bool,
    settings_file: str | None,
    assignments: tuple[str, ...],
    form: str,
) -> int:
    """Look for what is wrong on this host, and say how to mend it. Nothing is changed.

    Kernel, firewalls, routes, other proxies, files and the daemon are looked at. With TARGET only that
    service is; the host always. It connects to all backends of TARGET, and sends UDP ones an empty datagram;
    without TARGET it connects to those that take new flows unchecked, 256 at most, and to none by UDP.
    Without a daemon the services are those of the files, without root some checks are left out. Exit code 0
    when there is no problem, though warnings, else 1.
    """
    settings, faults = _settings(settings_file, assignments)
    socket = chosen_socket()
    try:
        facts = collect(CollectOptions(settings, faults, socket, target, as_root=is_root()))
    except UnknownTargetError:
        raise CliError(f"no service {target}", hint="vipctl list shows them", code=NOT_FOUND) from None
    found = diagnose(facts)
    if form == "text":
        terminal = screen()
        lines = lines_of(found, terminal.paint, terminal.width or WIDEST, quiet=quiet, everything=everything)
        text = "\n".join(lines).rstrip("\n")
        print(text, end="\n" if text else "")
    else:
        print(document({"diagnosis": found.view()}, form))
    return OK if found.healthy else FAILED


def _settings(file: str | None, assignments: tuple[str, ...]) -> tuple[Settings, tuple[str, ...]]:
    """The settings, or the defaults and why the settings cannot be used."""
    default = DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None
    try:
        return load_settings(Path(file) if file else default, parse_assignments(assignments)), ()
    except SettingsError as error:
        return Settings(), tuple(error.problems)
