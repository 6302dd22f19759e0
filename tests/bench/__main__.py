"""Runs the benchmarks and writes what they find, as it comes. tests/bench/run.sh prepares everything for it.

python -m tests.bench [--quick | --full] [--only GROUP]... [--out DIR]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.bench import balance, control, ipvs_guest, path, programming, whole_daemon
from tests.bench.extent import FULL, QUICK, SMOKE, Extent
from tests.bench.progress import say
from tests.bench.record import Measurement, Record
from tests.bench.report import PICTURES, pictures, publish
from tests.bench.tables import figures
from tests.bench.trials.facts import machine_facts

PROJECT = Path(__file__).parents[2]
QUICK_OUT = PROJECT / "dist" / "bench"
RESULTS = "results.json"
EXTENTS = {each.name: each for each in (QUICK, FULL, SMOKE)}
OTHERS = {
    "haproxy": ["haproxy", "-v"],
    "nginx": ["nginx", "-v"],
    "iperf3": ["iperf3", "--version"],
    "etcd": ["etcd", "--version"],
}

ON_REQUEST = "ipvs"
"""The group that runs by its name alone: it downloads a kernel and emulates a processor."""

Measure = Callable[[Extent], Iterable[Measurement]]


def _path(extent: Extent) -> Iterator[Measurement]:
    """The packet path, which has tests of its own: a smoke test leaves it out."""
    return iter(()) if extent is SMOKE else path.measure(quick=extent is not FULL)


GROUPS: dict[str, Measure] = {
    "programming": programming.measure,
    "path": _path,
    "control": control.measure,
    "daemon": whole_daemon.measure,
    "balance": balance.measure,
    ON_REQUEST: ipvs_guest.measure,
}


def main(argv: list[str] | None = None) -> None:
    arguments = _arguments(argv)
    if os.geteuid() != 0:
        sys.exit("error: root is needed, for network namespaces; run: sudo bash tests/bench/run.sh")
    extent = EXTENTS[arguments.extent]
    out = arguments.out or (PICTURES if extent is FULL else QUICK_OUT)
    record = Record(out / RESULTS)
    for name in arguments.only or (name for name in GROUPS if name != ON_REQUEST):
        run_group(record, name, GROUPS[name], extent)
    if out == PICTURES:
        publish(record)
    else:
        pictures(record, out)
    print(f"\n{out / RESULTS}")


def run_group(record: Record, name: str, measure: Measure, extent: Extent) -> None:
    say(f"{name}: begins")
    record.begin(name, extent.name, machine_facts(OTHERS))
    began = time.monotonic()
    for row in measure(extent):
        record.put(name, row, time.monotonic() - began)
    record.finish(name, time.monotonic() - began)
    print(f"\n{name}: medians, smallest to largest")
    for row in record.rows(name):
        services = "" if row.services is None else f"{row.services:,}"
        print(f"  {row.what:<52} {row.subject:<30} {services:>8}  {figures(row)}", flush=True)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/bench/run.sh", description="Measure vipd and what it is compared with."
    )
    size = parser.add_mutually_exclusive_group()
    for extent, told in ((QUICK, "some 12 minutes (default)"), (FULL, "about 35 minutes on two cores")):
        size.add_argument(
            f"--{extent.name}", dest="extent", action="store_const", const=extent.name, help=told
        )
    size.add_argument(
        "--smoke", dest="extent", action="store_const", const=SMOKE.name, help=argparse.SUPPRESS
    )
    parser.set_defaults(extent=QUICK.name)
    only = "one group alone, the others' results staying as they are; repeatable"
    parser.add_argument("--only", action="append", choices=tuple(GROUPS), metavar="GROUP", help=only)
    where = "where results.json goes; default: docs/performance for --full, else dist/bench"
    parser.add_argument("--out", type=Path, metavar="DIR", help=where)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
