"""`vipctl fleet status`: hosts that are fed by the same etcd; `accept-removal`: what etcd or files lost."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from vipd.cli.changes import change_options
from vipd.cli.connection import connect
from vipd.cli.errors import OK, CliError
from vipd.cli.output import Cell, Column, document, output_option, screen, socket_option, table
from vipd.model.formatting import counted, duration
from vipd.observe.api_client import Json

COLUMNS = (
    Column("HOST", min_width=12),
    Column("VERSION"),
    Column("REVISION", right=True),
    Column("LAG"),
    Column("SERVICES", right=True),
    Column("ANNOUNCES", right=True),
    Column("PROBLEMS", right=True),
    Column("SEEN"),
)

ADDRESS_COLUMNS = (Column("ADDRESS"), Column("BY"), Column("HOSTS", prose=True))


@click.command()
@click.argument("what", metavar="status", type=click.Choice(("status",)))
@output_option("table", "wide", "json", "yaml")
@socket_option
def fleet(what: str, form: str) -> int:
    """Show every host that follows the same etcd: what it has applied, and when it was last heard of.

    LAG is how far the newest change that a host has in its kernel is behind the newest one that this host
    knows, in revisions of etcd. A host that has not been heard of for 30 seconds is not shown any more. -o
    wide: and which hosts announce each address.
    """
    answer = connect().get("fleet")
    if form not in ("table", "wide"):
        print(document({key: answer[key] for key in ("hosts", "newest")}, form))
    elif answer["hosts"]:
        rows = [_row(host) for host in answer["hosts"]]
        print("\n".join(table(COLUMNS, rows, screen())))
        if form == "wide" and (by_address := _announcing_hosts(answer["hosts"])):
            print("\n".join(("", *table(ADDRESS_COLUMNS, by_address, screen()))))
    else:
        print("no host has told of itself yet", file=sys.stderr)
    return OK


def _announcing_hosts(hosts: Sequence[Json]) -> list[list[str | Cell]]:
    """Each announced address, and the hosts that announce it."""
    found: dict[str, list[str]] = {}
    for host in hosts:
        for way_and_address in host.get("announced", ()):
            found.setdefault(str(way_and_address), []).append(str(host["name"]))
    ways = ((*each.partition(" ")[::2], hosts) for each, hosts in found.items())
    return [[address, way, ", ".join(hosts)] for way, address, hosts in sorted(ways, key=lambda row: row[1])]


def _row(host: Json) -> list[str | Cell]:
    seen, behind, problems = host["seen_seconds"], host["behind"], host["problems"]
    heard = "?" if seen is None else f"{duration(seen)} ago"
    if host.get("fault"):
        unknown: list[str | Cell] = ["?"] * 6
        return [str(host["name"]), *unknown, Cell(f"{heard}: {host['fault']}", "red")]
    return [
        str(host["name"]),
        str(host["version"]),
        str(host["revision"]),
        Cell(f"{behind} behind", "yellow") if behind else "none",
        str(host["services"]),
        _announces(host),
        Cell(str(problems), "red") if problems else "0",
        heard,
    ]


def _announces(host: Json) -> str | Cell:
    """The number of addresses that a host announces, or that it is in maintenance."""
    if host.get("maintenance"):
        return Cell("maintenance", "yellow")
    return str(len(host.get("announced", ())))


@click.command("accept-removal")
@change_options
def accept_removal(*, form: str, quiet: bool, dry_run: bool) -> int:
    """Let this host remove the services that are gone from files or from etcd and that it goes on serving.

    That many services vanish at once is more often an accident than a wish, so vipd holds them: those of a
    file that is empty, of all files together, and of more than max_removal of the services in etcd. `vipctl
    status` names them. Each host is told for itself.
    """
    answer = connect().change("POST", "accept-removal", dry_run=dry_run)
    if form != "text":
        print(document({k: answer[k] for k in ("changed", "applied", "message", "keys", "files")}, form))
    elif not quiet:
        for name in (*answer["keys"], *answer["files"]):
            print(f"removed    {name}")
        dry = "; dry run: nothing was done" if dry_run else ""
        numbers = [counted(len(answer[key]), key[:-1]) for key in ("keys", "files") if answer[key]]
        print(f"{' and '.join(numbers)} let go{dry}" if numbers else "nothing was held")
    if not dry_run and not answer["applied"]:
        why = str(answer.get("message") or "")
        raise CliError("accepted, but not in the kernel yet", why, "vipctl status shows how it goes")
    return OK
