"""`vipctl rules`: the kernel's rules as a tree of services, chains and backends; or a drawing."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import click

from vipd.cli.argument_types import TARGET
from vipd.cli.connection import chosen_socket
from vipd.cli.errors import NOT_FOUND, OK, UNREACHABLE, USAGE, CliError
from vipd.cli.output import Cell, Column, Screen, document, output_option, prose, screen, socket_option, table
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.saved_rules import Count
from vipd.host.process import run as run_program
from vipd.model.formatting import counted, size, thousands
from vipd.observe.api_client import DEFAULT_SOCKET, Client, ClientError, Json
from vipd.observe.rule_tree.graph import graphs_of
from vipd.observe.rule_tree.graphviz import dot
from vipd.observe.rule_tree.resolve_target import RulesQuery, RulesResult, UnknownTargetError, resolve_target
from vipd.observe.rule_tree.rows import Summary, heading, rows_of, summary
from vipd.observe.rule_tree.tree import ServiceTree, SharedTree, faults

MAX_TREES = 20
"""If there are more services than this, each is one line, unless all are requested."""
TIMEOUT_SECONDS = 600.0
"""How long a program may take to list the kernel's rules: with 10,000 services iptables-save needs more than
10 s of CPU."""
SLOW_SECONDS = 1.0
"""A longer wait is explained on the screen."""

COLUMNS = (
    Column("PKTS", right=True),
    Column("BYTES", right=True),
    Column("SHARE%", right=True),
    Column("RULE", min_width=40),
)
WIDE_COLUMNS = (*COLUMNS[:3], Column("RULE"), Column("IN THE KERNEL"))
SUMMARY_COLUMNS = (
    Column("SERVICE", min_width=16),
    Column("PROTO"),
    Column("FRONTENDS", min_width=16),
    Column("BACKENDS", right=True),
    Column("PKTS", right=True),
    Column("BYTES", right=True),
    Column("FAULTS", right=True),
)


run = partial(run_program, timeout=TIMEOUT_SECONDS)


@click.command()
@click.argument("target", metavar="[TARGET]", required=False, default="", type=TARGET)
@click.option(
    "--format",
    "drawn",
    type=click.Choice(("text", "dot")),
    default="text",
    help="A tree, or a drawing for graphviz.",
)
@click.option(
    "--all", "everything", is_flag=True, help=f"Show each tree, also of more than {MAX_TREES} services."
)
@output_option("text", "wide", "json", "yaml")
@socket_option
def rules(target: str, drawn: str, everything: bool, form: str) -> int:
    """Show the rules that the kernel has, as a tree of services, chains and backends, with their counters.

    TARGET is a service, a frontend, or the name of a chain as it stands in a log. What vipd did not write, or
    what is missing, is marked by !. Only new flows come to these rules, so packets count flows. Needs root;
    without a daemon the names are those in the comments on rules. -o wide shows beside each line the rule or
    element itself, as the kernel has it, with its number or handle, and cuts nothing.

    \b
    vipctl rules dns
    vipctl rules VIPD-SEP-YLKAMYDXHH7566LT
    vipctl rules web --format dot | dot -Tsvg > web.svg
    """
    if drawn != "text" and form != "text":
        raise CliError(f"-o {form} and --format {drawn} exclude each other", code=USAGE)
    if not _may_read():
        raise CliError("the kernel shows its rules to root only", hint="sudo vipctl rules", code=UNREACHABLE)
    answer = _look(target)
    if form in ("json", "yaml"):
        print(document({"rules": _view(answer)}, form))
    elif drawn != "text":
        sys.stdout.write(_drawing(answer, everything))
    elif lines := list(_lines(answer, everything, screen(), wide=form == "wide")):
        print("\n".join(lines))
    _note(answer)
    return OK


def _may_read() -> bool:
    """Whether the process may read the rules: as root, or with CAP_NET_ADMIN."""
    if os.geteuid() == 0:
        return True
    from vipd.host.preflight import may_change_rules

    return may_change_rules()


def _look(target: str) -> RulesResult:
    client = Client(chosen_socket() or DEFAULT_SOCKET)
    try:
        return asyncio.run(resolve_target(RulesQuery(target, client, file_chain_prefix, run, _print_note)))
    except UnknownTargetError as error:
        raise CliError(error.what, hint=error.hint, code=NOT_FOUND) from None
    except ApplyError as error:
        raise CliError(error.what, error.why, error.hint) from None
    except ClientError as error:
        raise CliError("no answer of vipd", str(error), code=UNREACHABLE) from None


def file_chain_prefix() -> str:
    """The chain prefix of vipd.yaml; the usual one when that file is missing or broken."""
    # Imported on use: settings are slow to import, and a daemon that answers supplies the prefix.
    from vipd.host.settings.settings_file import DEFAULT_CONFIG, SettingsError, SettingsFile

    try:
        return str(SettingsFile.read(DEFAULT_CONFIG).values.get("chain_prefix", "VIPD"))
    except SettingsError:
        return "VIPD"


def _view(answer: RulesResult) -> Json:
    """As JSON."""
    return {
        "chain": answer.chain,
        "owner": answer.owner_text,
        "notes": list(answer.notes),
        "seconds": round(answer.seconds, 3),
        "shared": [tree.view() for tree in answer.shared],
        "services": [tree.view() for tree in answer.services],
    }


def _drawing(answer: RulesResult, everything: bool) -> str:
    trees = answer.services or answer.shared
    if len(trees) > MAX_TREES and not everything:
        what = f"{len(trees)} services make no drawing that anybody can read"
        raise CliError(what, hint="name one, or --all", code=USAGE)
    return dot(graphs_of(trees))


def _lines(answer: RulesResult, everything: bool, terminal: Screen, *, wide: bool) -> Iterator[str]:
    """Blocks of lines with an empty one between them."""
    blocks: list[Sequence[str]] = [prose(answer.owner_text, terminal)] if answer.owner_text else []
    trees: list[ServiceTree | SharedTree] = [*answer.shared]
    many = len(answer.services) > MAX_TREES and not everything
    trees += [] if many else answer.services
    blocks += [
        [terminal.paint(heading(tree), "bold"), *_tree_lines(tree, answer.chain, terminal, wide)]
        for tree in trees
    ]
    blocks += [_summary_lines(answer.services, terminal)] if many else []
    for number, block in enumerate(blocks):
        yield from ("",) if number else ()
        yield from block


def _tree_lines(tree: ServiceTree | SharedTree, chain: str, terminal: Screen, wide: bool) -> list[str]:
    rows = [
        [
            *_counts(row.count),
            "" if row.share is None else f"{100 * row.share:.1f}",
            Cell(row.text, row.colour),
            *([f"{row.rule}  # {row.place}" if row.place else row.rule] if wide else ()),
        ]
        for row in rows_of(tree.nodes, chain)
    ]
    if wide:
        return table(WIDE_COLUMNS, rows, Screen(None, terminal.colour), indent="  ")
    return table(COLUMNS, rows, terminal, indent="  ")


def _summary_lines(trees: Sequence[ServiceTree], terminal: Screen) -> list[str]:
    return table(SUMMARY_COLUMNS, [_summary_row(summary(tree)) for tree in trees], terminal)


def _summary_row(line: Summary) -> list[str | Cell]:
    wrong = Cell(str(line.faults), "red") if line.faults else "-"
    return [line.name, line.protocol, line.frontends, str(line.backends), *_counts(line.count), wrong]


def _counts(count: Count | None) -> list[str | Cell]:
    return ["", ""] if count is None else [thousands(count.packets), size(count.bytes)]


def _print_note(text: str) -> None:
    """Print a note to stderr."""
    print("\n".join(prose(f"note: {text}", screen(sys.stderr))), file=sys.stderr, flush=True)


def _note(answer: RulesResult) -> None:
    """Print everything besides the trees, for people."""
    notes = list(answer.notes)
    trees: list[ServiceTree | SharedTree] = [*answer.shared, *answer.services]
    wrong = sum(len(faults(tree.nodes)) for tree in trees)
    if wrong:
        notes.append(
            f"{counted(wrong, 'thing')} not as vipd means it; hint: vipctl diff; vipd repairs its rules in "
            "moments while it runs"
        )
    if answer.seconds >= SLOW_SECONDS:
        notes.append(f"reading the kernel took {answer.seconds:.1f} s")
    if not (answer.services or answer.shared):
        notes.append("the kernel has no rule of vipd")
    for note in notes:
        _print_note(note)
