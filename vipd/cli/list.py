"""`vipctl list` and `export`: every service, as a table for people or as a document for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from vipd.cli.argument_types import TARGET
from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import OK, CliError, combine_errors
from vipd.cli.output import Cell, Column, document, output_option, screen, socket_option, table
from vipd.model.formatting import counted, duration
from vipd.model.service import NameKind, socket_text
from vipd.observe.api_client import Json

STATE_COLOURS = {
    "ok": "green",
    "degraded": "yellow",
    "no-backends": "red",
    "pending": "yellow",
    "quarantined": "red",
}

HEALTH_COLOURS = {"healthy": "green", "unhealthy": "red", "unknown": "yellow"}

_DETAILED = ("ok", "unchecked", "degraded")

COLUMNS = (
    Column("NAME", min_width=14),
    Column("VIP", min_width=18),
    Column("READY", right=True),
    Column("AFFINITY"),
    Column("OWNER", min_width=6),
    Column("STATUS", min_width=18),
)
WIDE_COLUMNS = (
    *(Column(column.title, right=column.right) for column in COLUMNS),
    Column("MASQUERADE"),
    Column("FALLBACK"),
    Column("ANNOUNCED"),
    Column("MESSAGE"),
)


@click.command("list")
@click.argument("targets", metavar="[TARGET]...", nargs=-1, type=TARGET)
@output_option("table", "wide", "json", "yaml", "name")
@click.option("--no-headers", is_flag=True, help="Leave out the line of column titles.")
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@socket_option
def list_services(targets: tuple[str, ...], form: str, no_headers: bool, quiet: bool) -> int:
    """List all services, or those named.

    READY counts the backends that take new flows, STATUS tells why others do not; it is ok only if all of
    them pass a check, and counts those without one as unchecked. A table on a terminal is cut to fit; -o wide
    is not.
    """
    daemon = connect()
    failures: list[CliError] = []
    views = _fetch_services(daemon, targets, failures) if targets else daemon.get("services")["services"]
    if form in ("json", "yaml"):
        print(document({"services": views}, form))
    elif quiet or form == "name":
        for view in views:
            print(view["name"])
    elif views:
        _print_table(views, form == "wide", not no_headers)
    elif not targets:
        print(why_no_services(daemon), file=sys.stderr)
    if failures:
        raise combine_errors(failures)
    return OK


def why_no_services(daemon: Daemon) -> str:
    """Why there is no service: none is declared, or none of the declared ones can serve."""
    sources = daemon.get("status")["sources"]
    problems = sum(len(source["problems"]) for source in sources)
    if problems:
        return f"no service serves, with {counted(problems, 'problem')}; hint: vipctl status"
    return "no services yet; add one: vipctl add 10.96.0.10:53/udp 10.244.0.5"


def _fetch_services(daemon: Daemon, targets: Sequence[str], failures: list[CliError]) -> list[Json]:
    views = []
    for target in dict.fromkeys(targets):
        try:
            views.append(daemon.get("services", target)["service"])
        except CliError as err:
            failures.append(err)
    return views


def _print_table(views: Sequence[Json], wide: bool, headers: bool) -> None:
    terminal = screen()
    rows = [[*_row(view, wide), *(_wide_cells(view) if wide else ())] for view in views]
    columns = WIDE_COLUMNS if wide else COLUMNS
    print("\n".join(table(columns, rows, terminal, headers=headers)))


def _row(view: Json, wide: bool) -> list[str | Cell]:
    status = view["status"]
    vips = frontends(view)
    vip = ",".join(vips) if wide else vips[0] + (f" +{len(vips) - 1}" if len(vips) > 1 else "")
    owner = str(view["owner"])
    return [
        view["name"],
        vip,
        f"{status['ready']}/{status['backends']}",
        affinity(view),
        owner if wide else _short(owner, view["name"]),
        Cell(_status_text(status), STATE_COLOURS.get(status["state"], "")),
    ]


def _short(owner: str, name: str) -> str:
    """A file without its directories; for a key in etcd, which ends in the service's name, that name."""
    return f"etcd:{name}" if owner.startswith("etcd:") else owner.rpartition("/")[2]


def _status_text(status: Json) -> str:
    """The state; for a serving service also the parts that do not serve as declared, or are unchecked."""
    detail = str(status["message"]).partition(";")[0] if status["state"] in _DETAILED else ""
    if status["state"] == "unchecked":
        return detail
    return f"{status['state']}, {detail}" if detail else str(status["state"])


def _wide_cells(view: Json) -> list[str | Cell]:
    modes = dict.fromkeys(str(f["masquerade"]) for f in view["forwardings"])
    return [",".join(modes) or "-", fallback(view), _announced(view), view["status"]["message"] or "-"]


def _announced(view: Json) -> str:
    """The addresses that this host announces for it, or how many it does not."""
    addresses = view.get("announced")
    if not addresses:
        return "-"
    here = [each["address"] for each in addresses if each["announced"]]
    return ",".join(here) or "none"


def frontends(view: Json) -> list[str]:
    """A ServiceView's `ADDR:PORT/PROTO`s; its name when it forwards nothing."""
    found = [place for forwarding in view["forwardings"] for place in frontends_of(forwarding)]
    return found or [str(view["name"])]


def frontends_of(forwarding: Json) -> list[str]:
    """Addresses and ports of one forwarding for clients: its own, those for outside, its node port."""
    node_port = forwarding.get("node_port")
    on_host = [f"node port {node_port}/{forwarding['protocol']}"] if node_port else []
    return [*forwarding["frontends"], *forwarding.get("external", ()), *on_host]


def affinity(view: Json) -> str:
    """`10m`, or `-` without affinity."""
    seconds = next((f["affinity_seconds"] for f in view["forwardings"]), None)
    return duration(seconds) if seconds else "-"


def fallback(view: Json) -> str:
    """`reject`, `drop`, or the fallback's backends."""
    declared = view["spec"].get("fallback") or "reject"
    if not isinstance(declared, dict):
        return str(declared)
    return ",".join(b if isinstance(b, str) else _backend(b) for b in declared["backends"])


def _backend(spec: Json) -> str:
    """`10.244.0.5:80`, or `dns:web.internal:80`."""
    kind = next((kind for kind in NameKind if kind in spec), None)
    port = spec.get("port")
    if kind is None:
        return socket_text(spec["address"], port) if port else str(spec["address"])
    return f"{kind}:{spec[kind]}" + (f":{port}" if port else "")


@click.command()
@output_option("yaml", "json")
@socket_option
def export(form: str) -> int:
    """Print every service, whoever owns it, as one vipd/v1 declaration, which vipctl apply can read back.

    \b
    vipctl export > services.yaml
    """
    print(document({"services": connect().get("export")["services"]}, form))
    return OK
