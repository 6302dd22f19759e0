"""`vipctl convert`: Kubernetes objects, or any declarations, as one vipd/v1 declaration."""

from __future__ import annotations

import sys

import click

from vipd.cli.argument_types import files_argument
from vipd.cli.errors import OK, USAGE, CliError
from vipd.cli.inputs import read_inputs
from vipd.cli.output import document, output_option
from vipd.declaration.native import format_declaration, service_to_spec


@click.command()
@files_argument
@output_option("yaml", "json")
@click.option("-q", "--quiet", is_flag=True, help="Do not tell what is left out.")
def convert(files: tuple[str, ...], named: tuple[str, ...], form: str, quiet: bool) -> int:
    """Print what Kubernetes objects mean as vipd/v1. FILE may be a directory, or - for standard input.

    Services, EndpointSlices and Endpoints are read as kubectl get -o yaml or -o json prints them. A Service
    and its endpoints must stand in the same file. What is left out is told on stderr.

    \b
    kubectl get services,endpointslices -A -o json | vipctl convert -
    """
    given = (*files, *named)
    if not given:
        hint = "kubectl get services,endpointslices -A -o json | vipctl convert -"
        raise CliError("no file to convert", hint=hint, code=USAGE)
    inputs = read_inputs(given)
    if not quiet:
        inputs.print_notes()
    services = inputs.require_ok()
    if form == "json":
        print(document({"services": [service_to_spec(service) for service in services]}, form))
    else:
        sys.stdout.write(format_declaration(services))
    return OK
