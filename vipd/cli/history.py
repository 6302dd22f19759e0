"""`vipctl history`, `rollback` and `confirm`: the changes of the store, and the way back."""

from __future__ import annotations

from collections.abc import Sequence

import click

from vipd.cli.changes import print_all, service_change_options, unconfirmed_text
from vipd.cli.connection import connect
from vipd.cli.errors import OK
from vipd.cli.output import (
    Cell,
    Column,
    Screen,
    document,
    output_option,
    prose,
    screen,
    socket_option,
    store_option,
    table,
)
from vipd.model.formatting import counted
from vipd.observe.api_client import Json

COLUMNS = (
    Column("REVISION", right=True),
    Column("TIME"),
    Column("BY", min_width=8),
    Column("CHANGE"),
)
NAMES_SHOWN = 3


@click.command()
@click.argument("revision", metavar="[REVISION]", type=click.IntRange(min=1), required=False)
@output_option("text", "json", "yaml")
@socket_option
@store_option
def history(revision: int | None, form: str) -> int:
    """Show who changed which services with vipctl, and when; of a REVISION what it changed.

    Files are not in it: what changes them keeps their history; nor is what others than vipctl write to etcd.
    """
    daemon = connect()
    answer = daemon.get("history", *(() if revision is None else (str(revision),)))
    if form != "text":
        print(document(answer, form))
        return OK
    terminal = screen()
    print("\n".join(_list(answer, terminal) if revision is None else _one(answer["entry"], terminal)))
    return OK


@click.command()
@click.argument("revision", metavar="[REVISION]", type=click.IntRange(min=0), required=False)
@service_change_options
def rollback(revision: int | None, confirm: int | None, form: str, quiet: bool, dry_run: bool) -> int:
    """Make the store hold the services that it held at REVISION, by default before the last change.

    A change that waits for its confirmation is taken back at once. The rollback is a change of its own: the
    same again takes it back.
    """
    body = {} if revision is None else {"revision": revision}
    answer = connect().change("POST", "rollback", body=body, dry_run=dry_run, confirm=confirm)
    return print_all(answer, form=form, quiet=quiet, dry_run=dry_run, confirm=confirm)


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@output_option("text", "json", "yaml")
@socket_option
@store_option
def confirm(quiet: bool, form: str) -> int:
    """Keep the change that was made with --confirm, before its time is over."""
    answer = connect().change("POST", "confirm")
    if form != "text":
        print(document(answer, form))
    elif not quiet:
        entry = answer["entry"]
        print(f"confirmed revision {entry['revision']}: {_summary(entry)}; it stays")
    return OK


def _list(answer: Json, terminal: Screen) -> list[str]:
    waits = answer["confirmation"]
    rows = [_row(entry, waits) for entry in answer["entries"]]
    lines = table(COLUMNS, rows, terminal)
    if not rows:
        lines = ["no changes yet"]
    if waits:
        text = prose(unconfirmed_text(waits), terminal)
        lines += ["", *(terminal.paint(line, "yellow") for line in text)]
    return lines


def _row(entry: Json, waits: Json | None) -> Sequence[str | Cell]:
    unconfirmed = waits is not None and waits["revision"] == entry["revision"]
    why = "unconfirmed" if unconfirmed else entry["reason"]
    change = f"{why}: {_summary(entry)}" if why else _summary(entry)
    return [
        str(entry["revision"]),
        entry["at"],
        entry["by"],
        Cell(change, "yellow" if unconfirmed else ""),
    ]


def _one(entry: Json, terminal: Screen) -> list[str]:
    why = f" ({entry['reason']})" if entry["reason"] else ""
    lines = [f"revision {entry['revision']}, {entry['at']}, by {entry['by']}{why}"]
    # Imported here because the list needs neither differences nor YAML.
    from vipd.cli.difference import difference, painted

    for service in entry["services"]:
        title = f"{service['name']}: {service['action']}"
        lines += ["", *painted(difference(title, service["before"], service["after"]), terminal)]
    return lines


def _summary(entry: Json) -> str:
    """`created dns, changed web and 3 more services`."""
    services = entry["services"][:NAMES_SHOWN]
    named = ", ".join(f"{service['action']} {service['name']}" for service in services)
    more = sum(entry["actions"].values()) - len(services)
    return f"{named} and {counted(more, 'more service')}" if more else named
