"""`vipctl stats`: new flows, flows now and traffic of services and backends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

import click

from vipd.cli.argument_types import TARGET
from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import OK
from vipd.cli.output import Column, document, output_option, screen, socket_option, table
from vipd.cli.rates import TRAFFIC, Key, Rates, key_of, rows_of
from vipd.cli.words import seconds
from vipd.model.formatting import counted, per_second, size
from vipd.observe.api_client import Json

POLL_SECONDS = 0.25
MAX_WAIT_SECONDS = 120.0
"""For a second reading, if the first took long: vipd limits how often it reads."""


@click.command()
@click.argument("target", metavar="[TARGET]", required=False, default="", type=TARGET)
@click.option("--rate", metavar="TIME", help="Numbers per second, measured for this time, as 2s.")
@click.option("-b", "--backends", is_flag=True, help="Show backends, too; so it is for a TARGET.")
@output_option("table", "wide", "json", "yaml")
@click.option("--no-headers", is_flag=True, help="Leave out the line of column titles.")
@socket_option
def stats(*, target: str, rate: str | None, backends: bool, form: str, no_headers: bool) -> int:
    """Show what services and backends have to do: new flows so far, flows now, bytes in and out so far.

    Bytes are there where the kernel counts them. A backend that is gone has a + behind it.

    \b
    vipctl stats
    vipctl stats dns --rate 2s
    """
    structured = form in ("json", "yaml")
    query: Json = {"service": target} if target else {}
    query |= {} if target or backends or structured else {"backends": 0}
    daemon, rates = connect(), None
    if rate is None:
        answer = _ask(daemon, query)
    else:
        answer, rates = _with_measured_rates(daemon, query, seconds(rate))
    answer.pop("apiVersion", None)
    if structured:
        print(document(_with_rates(answer, rates) if rates else answer, form))
        return OK
    _print_table(answer, rates, wide=form == "wide", headers=not no_headers)
    return OK


def _ask(daemon: Daemon, query: Json) -> Json:
    return daemon.get_query("stats", urlencode(query))


def _with_measured_rates(daemon: Daemon, query: Json, interval: float) -> tuple[Json, Rates]:
    """A later answer, and the rates since the first."""
    rates, began = Rates(), time.monotonic()
    first = _ask(daemon, query)
    rates.take(first)
    time.sleep(interval)
    answer = _ask(daemon, query)
    while not _later(answer, first) and time.monotonic() - began < interval + MAX_WAIT_SECONDS:
        time.sleep(POLL_SECONDS)
        answer = _ask(daemon, query)
    rates.take(answer)
    return answer, rates


def _later(answer: Json, first: Json) -> bool:
    """Whether all readable values were read again."""
    read, before = answer["conntrack"]["at"], first["conntrack"]["at"]
    return bool(answer["at"] > first["at"] and (read is None or before is None or read > before))


def _with_rates(answer: Json, rates: Rates) -> Json:
    for key, row in rows_of(answer):
        row["per_second"] = rates.of(key)
    return answer


def _print_table(answer: Json, rates: Rates | None, *, wide: bool, headers: bool) -> None:
    rows = list(_rows(answer))
    if not rows:
        print("no service serves; hint: vipctl list says why", file=sys.stderr)
        return
    traffic = TRAFFIC if wide else ("bytes_in", "bytes_out")
    fields = traffic if answer["traffic"]["counted"] else ()
    titles = {"packets_in": "PKTS IN", "bytes_in": "IN", "packets_out": "PKTS OUT", "bytes_out": "OUT"}
    suffix = "/S" if rates else ""
    columns = [Column("NAME", min_width=0 if wide else 20)]
    columns += [Column(f"NEW{suffix}", right=True), Column("FLOWS", right=True)]
    columns += [Column(titles[field] + suffix, right=True) for field in fields]
    cells = [[label, *_cells(row, key, rates, fields)] for label, key, row in rows]
    print("\n".join(table(columns, cells, screen(), headers=headers)))
    remarks = (answer["conntrack"]["fault"], _about_traffic(answer["traffic"]))
    for remark in (*remarks, *_refusals(answer)):
        if remark:
            print(remark, file=sys.stderr)


def _about_traffic(traffic: Json) -> str:
    """Why bytes are missing, or too few; empty if they are exact."""
    if not traffic["counted"]:
        why, hint = traffic["why"], traffic["hint"]
        return f"traffic is not counted: {why}" + (f"; to count that of new flows: {hint}" if hint else "")
    if lost := traffic["lost_flows"]:
        return f"bytes are a lower bound: the ends of {counted(lost, 'flow')} were missed"
    return ""


def _refusals(answer: Json) -> Iterator[str]:
    """A line for each service that refused flows over its limits."""
    for service in answer["services"]:
        refused = {limit: flows for limit, flows in service.get("refused", {}).items() if flows}
        if refused:
            counts = ", ".join(f"{flows} over {limit}" for limit, flows in refused.items())
            yield f"{service['name']} refused new flows: {counts}"


def _rows(answer: Json) -> list[tuple[str, Key, Json]]:
    rows: list[tuple[str, Key, Json]] = []
    for service in answer["services"]:
        name = str(service["name"])
        rows.append((name, (name,), service))
        for backend in service.get("backends", ()):
            label = f"  {backend['endpoint']}/{backend['protocol']}{'+' if backend['gone'] else ''}"
            rows.append((label, key_of(name, backend), backend))
    return rows


def _cells(row: Json, key: Key, rates: Rates | None, fields: Sequence[str]) -> list[str]:
    grown: dict[str, Any] = rates.of(key) if rates else row
    new = grown["new_flows"]
    cells = ["-" if new is None else per_second(new) if rates else str(new)]
    cells.append("-" if row["flows"] is None else str(row["flows"]))
    for field in fields:
        show = size if "bytes" in field else per_second if rates else str
        cells.append("-" if grown[field] is None else show(grown[field]))
    return cells
