"""Fills the tables of docs/performance.md and of README.md from the results, and draws the plots.

python -m tests.bench.report
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.bench.comparison import compared
from tests.bench.plots import PLOTS, NoPlotsError, Plot, draw
from tests.bench.record import Measurement, Record
from tests.bench.tables import brief, number, pivot, table

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "performance.md"
README = PROJECT / "README.md"
PICTURES = PROJECT / "docs" / "performance"
RESULTS = PICTURES / "results.json"

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

LOAD_COSTS = (
    ("full load, processor time", "load, processor time"),
    ("full load, memory of the tool", "load, memory of the tool"),
    ("full load, bytes given to the tool", "load, bytes"),
    ("full load, programs run", "load, programs"),
    ("one change, processor time", "change, processor time"),
    ("one change, bytes given to the tool", "change, bytes"),
    ("one change, programs run", "change, programs"),
)
COUNTS = tuple((f"{name} in the kernel", name) for name in ("chains", "rules", "elements"))
OVER_TIME, CHANGES = ("memory over time", "open files over time"), "changes made"

IN_GUEST = {
    "connections per second": "new connections a second",
    "CPU per first packet": "cost of a flow's first packet",
    "requests per second": "requests on kept connections",
    "throughput": "throughput of one connection",
    "UDP packets per CPU second": "UDP packets of kept flows",
    "full load, processor time": "cost of writing 1,000 services",
    "one change, processor time": "cost of replacing one backend",
}
COMPARED_TO = "vipd nftables"
KEPT_AT = 1_000

KEPT = (
    "requests per second",
    "CPU per request",
    "throughput",
    "UDP answers per second",
    "UDP packets per CPU second",
)


def publish(record: Record) -> None:
    pictures(record, PICTURES)
    for page in (PAGE, README):
        page.write_text(filled(page.read_text(encoding="utf-8"), record), encoding="utf-8")


def pictures(record: Record, directory: Path) -> None:
    """Draw all that there is into a directory; say so where nothing can be drawn."""
    try:
        draw(record.rows(*record.groups), directory)
    except NoPlotsError as error:
        print(error, file=sys.stderr)


def filled(page: str, record: Record) -> str:
    """The page with every table made anew. Raises KeyError for a table that nobody knows."""

    def made(found: re.Match[str]) -> str:
        lines = TABLES[found[2]](record)
        return "\n".join([found[1].rstrip("\n"), "", *(lines or ["Not measured yet."]), "", found[3]])

    return _TABLE.sub(made, page)


def names_in(page: str) -> list[str]:
    return [found[2] for found in _TABLE.finditer(page)]


def _machine(record: Record) -> list[str]:
    body = []
    for name, group in record.groups.items():
        machine, programs = group.machine, group.machine["programs"]
        whole = group.extent if group.finished else f"{group.extent}, not finished"
        body.append(
            [
                name,
                f"{whole}, {group.seconds / 60:.0f} min",
                f"Linux {machine['kernel']}, {machine['architecture']}, {machine['system']}",
                f"{machine['cores']} x {machine['processor']}, {machine['memory_gib']} GiB",
                str(machine["load_average"]),
                ", ".join(f"{program} {version}" for program, version in programs.items()),
            ]
        )
    return table(["group", "extent", "system", "machine", "load average before", "programs"], body)


def _pivot(
    group: str, down: str, across: str, corner: str, what: str = "", **titles: str
) -> Callable[[Record], list[str]]:

    def made(record: Record) -> list[str]:
        rows = [row for row in record.rows(group) if what in ("", row.what)]
        return pivot(rows, down, across, corner=corner, **titles) if rows else []

    return made


def _by_size(what: str) -> Callable[[Record], list[str]]:
    return _pivot("programming", "subject", "services", "S =", what)


def _costs(wanted: Sequence[tuple[str, str]]) -> Callable[[Record], list[str]]:
    """Several figures of each subject, at the largest size at which all have some or are given up."""

    def made(record: Record) -> list[str]:
        rows = [row for row in record.rows("programming") if row.what == wanted[0][0]]
        if not rows:
            return []
        subjects = list(dict.fromkeys(row.subject for row in rows))
        common = [
            size
            for size in {row.services for row in rows}
            if sum(row.services == size for row in rows) == len(subjects)
        ]
        size = max(each for each in common if each is not None)
        cells = {
            (row.subject, row.what): brief(row) for row in record.rows("programming") if row.services == size
        }
        body = [[subject, *(cells.get((subject, what), "") for what, _ in wanted)] for subject in subjects]
        return table([f"S = {size:,}", *(title for _, title in wanted)], body)

    return made


def _control(record: Record) -> list[str]:
    rows = record.rows("control")
    services = ", ".join(sorted({f"{row.services:,} services" for row in rows}))
    notes = {row.what: f"{row.what}{f' ({row.note})' if row.note else ''}" for row in rows}
    named = [replace(row, what=notes[row.what]) for row in rows]
    return pivot(named, "what", "subject", corner=f"beside {services}") if rows else []


def _daemon(record: Record) -> list[str]:
    lines: list[str] = []
    rows = [row for row in record.rows("daemon") if row.what not in (*OVER_TIME, CHANGES)]
    for subject in dict.fromkeys(row.subject for row in rows):
        of = [row for row in rows if row.subject == subject]
        part = pivot(of, "what", "services", corner=f"{subject}, S =")
        lines += ["", *part] if lines else part
    return lines


def _soak(record: Record) -> list[str]:
    rows = record.rows("daemon")
    changes = {(row.subject, row.services): brief(row) for row in rows if row.what == CHANGES}
    body = []
    for row in rows:
        if row.what in OVER_TIME and row.services is not None:
            looks = (row.values[0], row.values[-1], max(row.values))
            made = changes.get((row.subject, row.services), "")
            told = (f"{number(value, row.unit)} {row.unit}".rstrip() for value in looks)
            body.append([row.what, row.subject, f"{row.services:,}", made, *told])
    return table(["", "", "S", "changes", "first", "last", "largest"], body) if body else []


def _path(what: str) -> Callable[[Record], list[str]]:

    made = _pivot("path", "subject", "services", what, what, across_title="S = {}")
    return lambda record: [line.replace("| S =  |", "| no services |") for line in made(record)]


def _kept(record: Record) -> list[str]:
    cells = {(row.subject, row.what): brief(row) for row in record.rows("path") if row.what in KEPT}
    subjects = dict.fromkeys(subject for subject, _ in cells)
    body = [[subject, *(cells.get((subject, what), "") for what in KEPT)] for subject in subjects]
    return table(["", *KEPT], body) if body else []


def _ipvs(record: Record) -> list[str]:
    """What was measured in the guest, to vipd nftables there, round by round. Last, for comparison, the ratio
    of the same in the group of the path, whose unit is time."""
    rows = {(row.what, row.subject): row for row in record.rows("ipvs")}
    subjects = dict.fromkeys(subject for _, subject in rows)
    timed = {
        row.subject: row.median
        for row in record.rows("path")
        if row.what == "connections, part of direct" and row.services in (None, KEPT_AT)
    } | {"direct": 1.0}
    body = []
    for subject in subjects:
        cells = [_to_ours(rows.get((what, subject)), rows.get((what, COMPARED_TO))) for what in IN_GUEST]
        share = (
            f"{timed[subject] / timed[COMPARED_TO]:.2f} ×" if timed.keys() >= {subject, COMPARED_TO} else ""
        )
        body.append([subject, *cells, share])
    kernel = next((row.note.partition(";")[0] for row in rows.values()), "")
    return table([kernel, *IN_GUEST.values(), "new connections a second, in time"], body) if body else []


def _to_ours(row: Measurement | None, ours: Measurement | None) -> str:
    if row is None or ours is None or not row.values:
        return ""
    ratios = tuple(value / ours.median for value in row.values)
    low, high = min(ratios), max(ratios)
    spread = "" if f"{low:.2f}" == f"{high:.2f}" else f" ({low:.2f} to {high:.2f})"
    return f"{median(ratios):.2f} ×{spread}"


def _picture(plot: Plot) -> Callable[[Record], list[str]]:
    def made(_: Record) -> list[str]:
        shown = f"![{plot.title}]({PICTURES.name}/{plot.file})"
        return [shown] if (PICTURES / plot.file).exists() else []

    return made


TABLES: dict[str, Callable[[Record], list[str]]] = {
    "machine": _machine,
    "full-load": _by_size("full load"),
    "one-change": _by_size("one change"),
    "costs": _costs(LOAD_COSTS),
    "counts": _costs(COUNTS),
    "cold-start": _by_size("start of the daemon until in sync"),
    "control": _control,
    "daemon": _daemon,
    "soak": _soak,
    "path-connections": _path("connections, part of direct"),
    "path-cpu": _path("CPU per connection, part of direct"),
    "path-first-packets": _path("CPU per first packet"),
    "path-latency": _path("connect to answer, p50"),
    "path-no-vip": _path("connections, no VIP, part of direct"),
    "path-kept": _kept,
    "balance": _pivot("balance", "what", "subject", "one slow backend of four"),
    "ipvs": _ipvs,
    "comparison": compared,
    **{f"plot-{plot.file.removesuffix('.svg')}": _picture(plot) for plot in PLOTS},
}


if __name__ == "__main__":
    publish(Record(RESULTS))
