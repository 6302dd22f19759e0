"""`vipctl check`: every problem of declarations, found without a daemon and without root."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from vipd.cli.argument_types import DIRECTORY, FILE, settings_options
from vipd.cli.errors import FAILED, OK
from vipd.cli.inputs import DEFAULT_SERVICES_DIR, Inputs, problem_count, read_inputs
from vipd.cli.offline import admitted, host_addresses, host_facts, read_settings
from vipd.cli.output import document, output_option, prose, screen
from vipd.declaration.problems import Problem
from vipd.model.formatting import counted


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
    left out of Kubernetes objects is told as file:line: note: text. No daemon is asked, so that claims of
    vipctl add, of etcd and of files not named here are not seen.

    \b
    vipctl check
    vipctl check dns.yaml --set allowed_addresses=10.96.0.0/16
    """
    settings = read_settings(settings_file, assignments)
    own = host_addresses(settings)
    inputs = admitted(read_inputs(files or (services_dir,)), settings, own, host_facts(settings, own))
    if not quiet:
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


def _plain(problem: Problem) -> dict[str, object]:
    """A problem as JSON; a traceback is for the log of the daemon alone."""
    found = asdict(problem)
    del found["trace"], found["more"]
    return found
