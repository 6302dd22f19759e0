"""`vipctl flows`: the flows of a service that the kernel tracks, one by one."""

from __future__ import annotations

import sys
from urllib.parse import urlencode

import click

from vipd.cli.argument_types import BACKEND, TARGET, WORDS, Word
from vipd.cli.connection import connect
from vipd.cli.errors import OK
from vipd.cli.output import Column, document, output_option, screen, socket_option, table
from vipd.model.formatting import duration, size
from vipd.observe.api_client import Json

STATES = ("ESTABLISHED", "SYN_SENT", "TIME_WAIT", "REPLIED", "UNREPLIED")

COLUMNS = (
    Column("CLIENT", min_width=17),
    Column("FRONTEND", min_width=17),
    Column("BACKEND", min_width=14),
    Column("STATE"),
    Column("TIMEOUT", right=True),
)
AGE = Column("AGE", right=True)
TRAFFIC = (Column("IN", right=True), Column("OUT", right=True))
WIDE = (Column("PKTS IN", right=True), Column("PKTS OUT", right=True), Column("MASQUERADED"))


@click.command()
@click.argument("target", metavar="TARGET", type=TARGET)
@click.option("--backend", metavar="ADDR[:PORT]", type=BACKEND, help="Those to this backend.")
@click.option("--client", metavar="CIDR", help="Those from this address or network.")
@click.option(
    "--state", metavar="STATE", type=Word(WORDS, STATES), help="Those in this state, as established."
)
@click.option(
    "-n", "--lines", metavar="N", type=click.IntRange(1), default=50, help="At most so many; default: 50."
)
@output_option("table", "wide", "json", "yaml")
@click.option("--no-headers", is_flag=True, help="Leave out the line of column titles.")
@socket_option
def flows(
    *,
    target: str,
    backend: str | None,
    client: str | None,
    state: str | None,
    lines: int,
    form: str,
    no_headers: bool,
) -> int:
    """Show the flows of a service, or of one of its frontends, that the kernel tracks now.

    They are sorted by backend and client. TIMEOUT is how long the kernel remembers one without packets. Ages
    and bytes are shown where the kernel keeps them. A table on a terminal is cut to fit; -o wide is not.

    \b
    vipctl flows dns --backend 10.244.2.21
    vipctl flows web --client 10.1.0.0/16 --state established -n 200
    """
    query: Json = {"target": target, "limit": lines, "backend": backend, "client": client, "state": state}
    wanted = {name: value for name, value in query.items() if value}
    answer = connect().get_query("conntrack", urlencode(wanted))
    answer.pop("apiVersion", None)
    if form in ("json", "yaml"):
        print(document(answer, form))
        return OK
    found, total = answer["flows"], answer["total"]
    if found:
        print("\n".join(_table(found, wide=form == "wide", headers=not no_headers)))
    if total > len(found):
        print(f"{len(found)} of {total} flows; -n {total} shows them all", file=sys.stderr)
    elif not found:
        print("no flows", file=sys.stderr)
    return OK


def _table(found: list[Json], *, wide: bool, headers: bool) -> list[str]:
    aged = any(flow["age"] is not None for flow in found)
    counted = any(flow["bytes_in"] is not None for flow in found)
    columns = [Column(c.title, right=c.right) if wide else c for c in COLUMNS]
    columns += [*([AGE] if aged else ()), *(TRAFFIC if counted else ()), *(WIDE if wide else ())]
    rows = []
    for flow in found:
        row = [flow["client"], flow["frontend"], flow["backend"], flow["state"], duration(flow["timeout"])]
        row += ["-" if flow["age"] is None else duration(flow["age"])] if aged else []
        row += [_size(flow["bytes_in"]), _size(flow["bytes_out"])] if counted else []
        if wide:
            packets = (flow["packets_in"], flow["packets_out"])
            row += ["-" if number is None else str(number) for number in packets]
            row.append("yes" if flow["masqueraded"] else "no")
        rows.append(row)
    return table(columns, rows, screen(), headers=headers)


def _size(number: int | None) -> str:
    return "-" if number is None else size(number)
