"""`vipctl apply` and `diff`: the declarations of files, compared with the daemon's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from vipd.cli.argument_types import files_argument
from vipd.cli.changes import print_all, service_change_options, summary
from vipd.cli.connection import Daemon, connect
from vipd.cli.difference import print_difference, print_painted
from vipd.cli.errors import FAILED, OK, USAGE, CliError
from vipd.cli.inputs import read_inputs
from vipd.cli.output import document, output_option, socket_option, store_option
from vipd.declaration.reader import parse_service
from vipd.declaration.writer import service_to_spec
from vipd.model.service import Origin, Service
from vipd.observe.api_client import Json

DIFFERS = 1
TROUBLE = 2
"""`diff` returns 1 for a difference, so failures with 1 elsewhere return this here."""


def _file_options(command: Callable[..., int]) -> Callable[..., int]:
    command = click.option(
        "--prune", is_flag=True, help="Also remove what the store holds and no FILE declares."
    )(command)
    return files_argument(command)


@click.command()
@_file_options
@service_change_options
def apply(
    *,
    files: tuple[str, ...],
    named: tuple[str, ...],
    prune: bool,
    confirm: int | None,
    form: str,
    quiet: bool,
    dry_run: bool,
) -> int:
    """Make the daemon hold the services that files declare. FILE may be a directory, or - for standard input.

    Nothing is sent when a file has a problem; of Kubernetes objects those without one are sent, unless with
    --prune. A change that may cut your own way to this host: --confirm 60s
    takes it back after a minute, unless you can still say vipctl confirm.
    """
    given = (*files, *named)
    if not given:
        raise CliError("no file to apply", hint="vipctl apply -f FILE", code=USAGE)
    inputs = read_inputs(given)
    if not quiet:
        inputs.print_notes()
    services = inputs.require_served(prune)
    answer = _apply(connect(), services, prune, dry_run, confirm)
    code = print_all(answer, form=form, quiet=quiet, dry_run=dry_run, confirm=confirm)
    inputs.complain()
    return code


@click.command()
@_file_options
@output_option("text", "json", "yaml")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@socket_option
@store_option
def diff(files: tuple[str, ...], named: tuple[str, ...], prune: bool, form: str, quiet: bool) -> int:
    """Show what `vipctl apply` of these files would change.

    Without files, show what vipd would write to the kernel now.

    Exit code 0 when nothing differs, 1 when something does, more on errors.
    """
    given = (*files, *named)
    try:
        return _diff_files(given, prune, form, quiet) if given else _diff_kernel(form, quiet)
    except CliError as err:
        err.code = TROUBLE if err.code == FAILED else err.code
        raise


def _apply(
    daemon: Daemon, services: Sequence[Service], prune: bool, dry_run: bool, confirm: int | None = None
) -> Json:
    body = {"services": [service_to_spec(service) for service in services], "prune": prune}
    return daemon.change("POST", "apply", body=body, dry_run=dry_run, confirm=confirm)


def _diff_kernel(form: str, quiet: bool) -> int:
    answer = connect().get("diff")
    if form != "text":
        print(document(answer, form))
    elif not quiet and answer["diff"]:
        print_painted(answer["diff"].splitlines())
    return OK if answer["in_sync"] else DIFFERS


def _diff_files(files: Sequence[str], prune: bool, form: str, quiet: bool) -> int:
    inputs = read_inputs(files)
    if not quiet:
        inputs.print_notes()
    services = inputs.require_served(prune, TROUBLE)
    daemon = connect(exact=True)  # compares the daemon's texts themselves, not their displayed form
    answer = _apply(daemon, services, prune, dry_run=True)
    if form != "text":
        print(document(answer, form))
    elif not quiet:
        held = {_name(spec): spec for spec in daemon.get("export")["services"]} if answer["changed"] else {}
        wanted = {service.name: service_to_spec(service) for service in services}
        for result in answer["results"]:
            if result["action"] != "unchanged":
                name, action = result["name"], result["action"]
                print_difference(
                    name, action, held.get(name), None if action == "removed" else wanted.get(name)
                )
        print(summary(answer))
    inputs.complain(TROUBLE)
    return DIFFERS if answer["changed"] else OK


def _name(spec: Json) -> str:
    # A Spec without a name has its first frontend's, which the language derives.
    service, _ = parse_service(spec, Origin("daemon"))
    return service.name if service else ""
