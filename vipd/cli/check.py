"""`vipctl check`: every problem of declarations, found without a daemon and without root."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice

import click

from vipd.cli.argument_types import DIRECTORY, FILE, settings_options
from vipd.cli.errors import FAILED, OK
from vipd.cli.inputs import DEFAULT_SERVICES_DIR, Inputs, problem_count, read_inputs
from vipd.cli.offline import admitted, host_addresses, host_facts, read_settings
from vipd.cli.output import document, output_option, prose, screen
from vipd.declaration.problems import Note, Problem
from vipd.health.host_problems import program_problems
from vipd.host.settings.settings_file import DEFAULT_CONFIG
from vipd.model import limits
from vipd.model.check import ExecProbe
from vipd.model.formatting import counted
from vipd.model.service import Service


@click.command()
@click.argument("files", metavar="[FILE]...", nargs=-1, type=FILE)
@click.option(
    "--services-dir",
    metavar="DIR",
    type=DIRECTORY,
    default=DEFAULT_SERVICES_DIR,
    show_default=True,
    help="What to check when no FILE is given.",
)
@settings_options("Settings, instead of /etc/vipd/vipd.yaml.")
@click.option("-q", "--quiet", is_flag=True, help="Print problems only.")
@output_option("text", "json", "yaml")
def check(
    files: tuple[str, ...],
    services_dir: str,
    settings_file: str | None,
    assignments: tuple[str, ...],
    quiet: bool,
    form: str,
) -> int:
    """Look for problems in declarations. FILE may be a directory, or - for standard input.

    Every problem is a line on stderr: file:line: path: what; hint. Exit code 1 when there is one. What is
    left out of Kubernetes objects is told as file:line: note: text, and so is a program of a check that
    this host lacks. No daemon is asked, so that claims of vipctl add, of etcd and of files not named here
    are not seen.

    \b
    vipctl check
    vipctl check dns.yaml --set allowed_addresses=10.96.0.0/16
    """
    settings = read_settings(settings_file, assignments)
    own = host_addresses(settings)
    # Without the settings of a daemon nothing says that the files are for a host without etcd.
    lan_holders = settings.etcd is not None or not (settings_file or DEFAULT_CONFIG.exists())
    facts = host_facts(settings, own)
    inputs = admitted(read_inputs(files or (services_dir,)), settings, own, facts, lan_holders=lan_holders)
    if not quiet:
        inputs = inputs._replace(notes=(*inputs.notes, *_program_notes(inputs.services)))
        inputs.print_notes()
    if form != "text":
        problems = [_plain(problem) for problem in inputs.problems]
        print(document({"ok": not problems, "services": len(inputs.services), "problems": problems}, form))
    else:
        _print_text(inputs, quiet)
    return FAILED if inputs.problems else OK


def _print_text(inputs: Inputs, quiet: bool) -> None:
    if inputs.problems:
        terminal = screen(sys.stderr)
        for problem in inputs.problems:
            print("\n".join(prose(str(problem), terminal)), file=sys.stderr)
        print(problem_count(inputs.problems), file=sys.stderr)
    elif not quiet:
        services = counted(len(inputs.services), "service")
        files = counted(len(inputs.files), "file")
        print(f"ok: {services} in {files}; vipd was not asked whether others claim the same")


def _program_notes(services: Iterable[Service]) -> Iterable[Note]:
    """A note for each program of a check that cannot run here, at the first service that names it. It is no
    problem: the files may be meant for another host."""
    first: dict[str, Service] = {}
    for service in services:
        own = (backend.check for backend in (*service.backends, *service.fallback))
        for check in (service.check, *own):
            if check is not None and isinstance(check.probe, ExecProbe) and check.probe.command:
                first.setdefault(check.probe.command[0], service)
    found = (
        Note(service.origin.path, service.origin.line, f"{service.name}: {problem.replace('; hint: ', '; ')}")
        for program, service in first.items()
        for problem in program_problems((program,))
    )
    return islice(found, limits.NOTES)


def _plain(problem: Problem) -> dict[str, object]:
    """A problem as JSON; a traceback is for the log of the daemon alone."""
    found = asdict(problem)
    del found["trace"], found["more"], found["partial"]
    return found
