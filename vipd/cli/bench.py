"""`vipctl bench`: the cost of programming services, and of connecting through them, on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click

from vipd.cli.errors import FAILED, OK, UNREACHABLE, CliError
from vipd.cli.output import Column, document, output_option, prose, screen, table
from vipd.cli.terminal import CLEAR_LINE
from vipd.observe.bench.facts import machine_facts
from vipd.observe.bench.host import DATAPLANES, Measurement, measure_host, subjects_here, upper_median

COLUMNS = (
    Column("DATAPLANE"),
    Column("LOAD", right=True),
    Column("CHANGE", right=True),
    Column("MEMORY", right=True),
    Column("DIRECT", right=True),
    Column("VIP", right=True),
)


@click.command()
@click.option(
    "--services",
    type=click.IntRange(2, 100_000),
    default=1000,
    metavar="N",
    help="How many services; default: 1000.",
)
@click.option("--dataplane", type=click.Choice(("all", *DATAPLANES)), default="all", help="What to measure.")
@output_option("table", "json", "yaml")
def bench(services: int, dataplane: str, form: str) -> int:
    """Measure how long programming services takes here, and what a connection through one costs.

    Each dataplane and iptables variant of this host in turn, for a minute at most. All is done in network
    namespaces of its own, which are gone when it ends or is interrupted; no rule of this host is read or
    changed, and no daemon is needed. Kernel modules that are missing are loaded.
    """
    if os.geteuid() != 0:
        raise CliError(
            "bench needs root", "it makes network namespaces", "sudo vipctl bench", code=UNREACHABLE
        )
    subjects = subjects_here("" if dataplane == "all" else dataplane)
    if not subjects:
        raise CliError("nothing can be measured", "no such program here", "apt install iptables nftables")
    machine = machine_facts()
    measured: dict[str, Measurement] = {}
    for number, each in measure_host(subjects, services):
        measured[each.subject] = each
        _show_progress(f"round {number}: {each.subject.removeprefix('vipd ')}")
    _show_progress("")
    found = tuple(measured.values())
    if form == "table":
        print("\n".join(_lines(found, services, machine)))
    else:
        content = {"services": services, "machine": machine, "measured": [asdict(each) for each in found]}
        print(document({"bench": content}, form))
    return FAILED if all(each.problem for each in found) else OK


def _show_progress(what: str) -> None:
    """Show the current measurement on a terminal, in place of the last such line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{CLEAR_LINE}{what}")
        sys.stderr.flush()


def _lines(measured: Sequence[Measurement], services: int, machine: dict[str, object]) -> list[str]:
    rounds = max((len(each.load_seconds) for each in measured), default=0)
    cores, load = machine["cores"], machine["load_average"]
    return [
        f"{services} services of 5 backends. Medians of {rounds} rounds, smallest to largest below.",
        f"Linux {machine['kernel']}, cores: {cores}, load average at the start: {load}.",
        "",
        *table(COLUMNS, [row for each in measured for row in _rows(each)], screen()),
        "",
        "LOAD: from an empty kernel to all services. CHANGE: one backend replaced.",
        "MEMORY: peak of the loading process and the program that it runs.",
        "DIRECT, VIP: connections a second from one client in Python, one after the",
        "other, to a backend without any rule, and through the last service.",
        *(line for each in measured if each.problem for line in prose(_problem(each), screen())),
    ]


def _problem(each: Measurement) -> str:
    return f"{each.subject.removeprefix('vipd ')}: {each.problem}"


def _rows(each: Measurement) -> list[list[str]]:
    """The medians, and the spread under them."""
    figures = [
        _seconds(each.load_seconds),
        _seconds(each.change_seconds),
        _median_text(each.memory_mib, " MiB"),
        _median_text(each.direct, "/s"),
        _median_text(each.vip, "/s"),
    ]
    medians, spreads = zip(*figures, strict=True)
    return [[each.subject.removeprefix("vipd "), *medians], ["", *spreads]]


def _seconds(values: Sequence[float]) -> tuple[str, str]:
    if values and upper_median(values) < 1:
        return _median_text([seconds * 1000 for seconds in values], " ms")
    return _median_text(values, " s", 1)


def _median_text(values: Sequence[float], unit: str, digits: int = 0) -> tuple[str, str]:
    """Median with its unit, and smallest to largest."""
    if not values:
        return "-", ""
    low, median, high = (f"{each:.{digits}f}" for each in (min(values), upper_median(values), max(values)))
    return f"{median}{unit}", f"{low}-{high}"
