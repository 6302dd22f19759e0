"""`vipctl host`: maintenance of this host, and what it announces beyond itself."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

import click

from vipd.cli.changes import change_options
from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import OK, USAGE, CliError
from vipd.cli.output import Cell, Column, document, prose, screen, table
from vipd.cli.overrides import time_left
from vipd.cli.waiting import Wait, wait_until_no_flows
from vipd.cli.words import seconds
from vipd.model.formatting import duration
from vipd.observe.api_client import Json

COLUMNS = (
    Column("ADDRESS", min_width=12),
    Column("BY"),
    Column("ANNOUNCED"),
    Column("FOR"),
    Column("SERVICES", min_width=8),
    Column("REASON"),
)
_STATES = {True: ("yes", "green"), False: ("no", "yellow")}


@click.command()
@click.argument("what", metavar="status|drain|resume", type=click.Choice(("status", "drain", "resume")))
@click.option(
    "--wait",
    is_flag=True,
    help="drain: wait until no flow of other hosts is left; exit code 5 when --timeout comes first.",
)
@click.option("--timeout", metavar="TIME", help="drain: longest wait, as 5m; without it as long as it takes.")
@click.option("--for", "lasting", metavar="TIME", help="drain: resume after this time, as 2h.")
@click.option("--reason", metavar="TEXT", help="drain: why; shown in vipctl status and fleet status.")
@change_options
def host(
    *,
    what: str,
    wait: bool,
    timeout: str | None,
    lasting: str | None,
    reason: str | None,
    **telling: Any,
) -> int:
    """Take this host out of service, or put it back: `drain` withdraws every address that it announces,
    and health ports answer 503, so that new flows go to other hosts; what it forwards goes on.

    \b
    vipctl host drain --wait --timeout 10m --reason "kernel update"
    vipctl host resume
    """
    if what != "drain" and (wait or timeout or lasting or reason):
        raise CliError("--wait, --timeout, --for and --reason are for drain", code=USAGE)
    if timeout is not None and not wait:
        raise CliError("--timeout is for --wait", hint="add --wait", code=USAGE)
    daemon = connect()
    if what == "status":
        return _show(daemon, telling)
    if what == "resume":
        return _resume(daemon, telling)
    longest = None if timeout is None else seconds(timeout)
    order = {"reason": reason, "for": None if lasting is None else seconds(lasting)}
    return _drain(daemon, order, telling, wait=wait, longest=longest)


def _drain(daemon: Daemon, order: Json, telling: Json, *, wait: bool, longest: int | None) -> int:
    body = {key: value for key, value in order.items() if value is not None}
    answer = daemon.change("POST", "maintenance", body=body, dry_run=telling["dry_run"])
    for warning in answer["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if telling["form"] != "text":
        print(document(answer, telling["form"]))
    elif not telling["quiet"]:
        dry = "; dry run: nothing was done" if telling["dry_run"] else f"; ends {_end(answer)}"
        changed = "in maintenance" if answer["changed"] else "unchanged: in maintenance"
        print(f"{changed}: {_announced(answer)}{dry}")
    if telling["dry_run"]:
        return OK
    _require_applied(answer, over_restart=wait)
    if wait:
        quiet = telling["quiet"] or telling["form"] != "text"
        hint = "the maintenance stays; wait again with the same command"
        words = Wait("the maintenance stays", "vipctl host resume ends it", hint)
        wait_until_no_flows(
            lambda: int(daemon.get_query("maintenance", "flows=1")["flows"]), words, longest, quiet=quiet
        )
    return OK


def _resume(daemon: Daemon, telling: Json) -> int:
    answer = daemon.change("DELETE", "maintenance", dry_run=telling["dry_run"])
    if telling["form"] != "text":
        print(document(answer, telling["form"]))
    elif not telling["quiet"]:
        dry = "; dry run: nothing was done" if telling["dry_run"] else ""
        print(f"resumed: {_announced(answer)}{dry}" if answer["changed"] else "unchanged: no maintenance")
    if not telling["dry_run"]:
        _require_applied(answer)
    return OK


def _require_applied(answer: Json, *, over_restart: bool = False) -> None:
    if answer["applied"] or (over_restart and answer.get("stopping")):
        return
    what = "it is stored, but what this host announces is not as it should be yet"
    raise CliError(what, str(answer.get("message") or ""), "vipctl status shows how it goes")


def _announced(answer: Json) -> str:
    if not answer["addresses"]:
        return "no service has an address to announce"
    number = "1 address" if answer["addresses"] == 1 else f"{answer['addresses']} addresses"
    return f"{answer['announced']} of {number} announced"


def _end(answer: Json) -> str:
    until = (answer["maintenance"] or {}).get("until")
    return f"in {time_left(until)}" if until else "by vipctl host resume"


def _show(daemon: Daemon, telling: Json) -> int:
    answer = daemon.get("announcements")
    if telling["form"] != "text":
        print(document(answer, telling["form"]))
        return OK
    terminal = screen()
    if answer["maintenance"]:
        print("\n".join(prose(f"in maintenance {maintenance_text(answer['maintenance'])}", terminal, "")))
    if answer["addresses"]:
        print("\n".join(table(COLUMNS, [_row(found) for found in answer["addresses"]], terminal)))
    else:
        print("no service has an address to announce", file=sys.stderr)
    for method, fault in answer["faults"].items():
        print(f"vipctl: {method}: {fault}", file=sys.stderr)
    return OK


def _row(found: Json) -> list[str | Cell]:
    since = (datetime.now().astimezone() - datetime.fromisoformat(found["since"])).total_seconds()
    return [
        str(found["address"]),
        str(found["by"]),
        Cell(*_STATES[found["announced"]]),
        duration(max(0.0, since)),
        ", ".join(found["services"]),
        str(found["why"]),
    ]


def maintenance_text(maintenance: Json) -> str:
    """`by root: kernel update; ends in 2h`."""
    reason = f": {maintenance['reason']}" if maintenance.get("reason") else ""
    end = _end({"maintenance": maintenance})
    return f"by {maintenance['by']}{reason}; ends {end}"
