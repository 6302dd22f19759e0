"""`vipctl convert`: Kubernetes objects, or configurations of other programs, as one vipd/v1 declaration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from vipd.cli.argument_types import files_argument
from vipd.cli.errors import FAILED, OK, USAGE, CliError
from vipd.cli.inputs import Inputs, problem_count, read_inputs
from vipd.cli.output import document, output_option, prose, screen
from vipd.declaration.conflicts import find_conflicts
from vipd.declaration.conversion.formats import FORMATS, KUBERNETES, convert_text, format_of
from vipd.declaration.problems import Declaration, Note, Problem
from vipd.declaration.reader import parse_declaration
from vipd.declaration.syntax import InvalidTextError, parse_address
from vipd.declaration.writer import format_declaration, service_to_spec
from vipd.model.service import family_of


@click.command()
@files_argument
@click.option(
    "--from",
    "source_format",
    type=click.Choice(FORMATS),
    help="The format of all files, if it is not to be recognised.",
)
@click.option(
    "--address",
    "addresses",
    metavar="ADDRESS",
    multiple=True,
    help="The virtual IP for what HAProxy or nginx listens for on every address of the host; that port "
    "becomes a node port, too. Once for each family.",
)
@output_option("yaml", "json")
@click.option("-q", "--quiet", is_flag=True, help="Do not tell what is left out without effect.")
def convert(
    files: tuple[str, ...],
    named: tuple[str, ...],
    source_format: str | None,
    addresses: tuple[str, ...],
    form: str,
    quiet: bool,
) -> int:
    """Print what Kubernetes objects, or configurations of other programs, mean as vipd/v1. FILE may be a
    directory of manifests, or - for standard input.

    Read are Services, EndpointSlices and Endpoints as kubectl get -o yaml or -o json prints them, a Service
    and its endpoints in the same file; the output of ipvsadm-save -n; virtual servers of keepalived;
    sections in mode tcp of HAProxy; the stream block of nginx. Files that these include are not read.

    Each line that is not converted is named on stderr, as file:line: what: why; what to do. A note is about
    what has no effect on the services. Exit code 1 when something that has one was left out: read these
    lines before you use what was printed.

    \b
    kubectl get services,endpointslices -A -o json | vipctl convert -
    ipvsadm-save -n | vipctl convert -
    vipctl convert --address 10.96.0.10 /etc/haproxy/haproxy.cfg
    """
    given = (*files, *named)
    if not given:
        hint = "kubectl get services,endpointslices -A -o json | vipctl convert -"
        raise CliError("no file to convert", hint=hint, code=USAGE)
    if source_format not in (None, KUBERNETES):
        _refuse_directories(given)
    reader = _Reader(source_format or "", _virtual_addresses(addresses))
    inputs = read_inputs(given, reader.parse)
    across = set(find_conflicts(inputs.services))
    fatal = [each for each in inputs.problems if each.file not in reader.converted or each in across]
    if not fatal:
        _print_services(inputs, form)
    _print_remarks(() if quiet else inputs.notes, () if fatal else inputs.problems)
    if fatal:
        inputs.require_ok()
    if inputs.problems:
        raise CliError(f"{problem_count(inputs.problems)}: what was printed lacks these parts", code=FAILED)
    return OK


class _Reader:
    """Reads each file in its format; remembers which ones are converted as far as possible."""

    def __init__(self, source_format: str, addresses: Sequence[str]) -> None:
        self._format = source_format
        self._addresses = addresses
        self.converted: set[str] = set()

    def parse(self, text: str, path: str) -> Declaration:
        """The declaration that a text is, or means."""
        found = self._format or format_of(text)
        if found not in ("", KUBERNETES):
            self.converted.add(path)
            return convert_text(text, path, found, self._addresses)
        declaration = parse_declaration(text, path)
        if found or declaration.ok:
            return declaration
        why = Problem(path, 0, "", "its format is not recognised", f"name it: --from {'|'.join(FORMATS)}")
        return Declaration(problems=(why,))


def _virtual_addresses(texts: Sequence[str]) -> tuple[str, ...]:
    """The values of --address, one of a family."""
    try:
        found = tuple(map(parse_address, texts))
    except InvalidTextError as error:
        raise CliError(f"--address: {error.what}", hint=error.hint, code=USAGE) from None
    if len({family_of(address) for address in found}) < len(found):
        raise CliError("--address: two addresses of one family", hint="name one of each", code=USAGE)
    return found


def _refuse_directories(names: Sequence[str]) -> None:
    for name in names:
        if Path(name).is_dir():
            raise CliError(f"{name}: is a directory", hint="name the files in it", code=USAGE)


def _print_services(inputs: Inputs, form: str) -> None:
    if form == "json":
        print(document({"services": [service_to_spec(service) for service in inputs.services]}, form))
    else:
        sys.stdout.write(format_declaration(inputs.services))
    sys.stdout.flush()


def _print_remarks(notes: Sequence[Note], problems: Sequence[Problem]) -> None:
    """What was left out, in the order of lines."""
    remarks: list[Note | Problem] = [*notes, *problems]
    terminal = screen(sys.stderr)
    for each in sorted(remarks, key=lambda each: (each.file, each.line)):
        print("\n".join(prose(str(each), terminal)), file=sys.stderr)
