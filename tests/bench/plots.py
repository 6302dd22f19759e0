"""Results as pictures: SVG with a paper and an ink for light and for dark screens. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.bench.comparators import KUBE_PROXY_NFT, RESTORES
from tests.bench.programming import FULL_LOAD, ONE_CHANGE, OURS
from tests.bench.record import Measurement

PAPER, INK = "#fefefd", "#1f2329"
"""Stand for the two colours that depend on the screen."""
STYLE = """<style>
svg { --paper: #ffffff; --ink: #1f2328; }
@media (prefers-color-scheme: dark) { svg { --paper: #0d1117; --ink: #e6edf3; } }
</style>"""

COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#7f7f7f", "#8c6bb1")
MARKERS = "osD^vPX*"
OTHERS = (*RESTORES, KUBE_PROXY_NFT)


class NoPlotsError(RuntimeError):
    """There is no matplotlib."""


@dataclass(frozen=True, slots=True)
class Plot:
    file: str
    title: str
    unit: str
    """What stands at the upright axis."""
    wanted: Callable[[Measurement], bool]
    upright: str = "log"
    subjects: Sequence[str] = ()


PLOTS = (
    Plot(
        "full-load.svg",
        "All services into an empty kernel",
        "seconds, log scale",
        lambda row: row.group == "programming" and row.what == FULL_LOAD,
        subjects=(*OURS, *OTHERS),
    ),
    Plot(
        "one-change.svg",
        "One backend replaced",
        "milliseconds, log scale",
        lambda row: row.group == "programming" and row.what == ONE_CHANGE,
        subjects=(*OURS, *OTHERS),
    ),
    Plot(
        "connections.svg",
        "New connections a second, as part of those without any rule",
        "part of the direct path's",
        lambda row: row.group == "path" and row.what == "connections, part of direct",
        upright="linear",
    ),
    Plot(
        "first-packets.svg",
        "What rules cost: the first packet of a flow",
        "microseconds of processor time, log scale",
        lambda row: row.group == "path" and row.what == "CPU per first packet",
    ),
)


def draw(rows: Iterable[Measurement], directory: Path) -> list[Path]:
    """Every picture for which there are at least two sizes; the files. Raises NoPlotsError."""
    try:
        matplotlib = import_module("matplotlib")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        raise NoPlotsError("no plots: matplotlib is missing; hint: pip install '.[bench]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "vipd", "svg.fonttype": "none", "font.size": 11})
    everything, files = list(rows), []
    for plot in PLOTS:
        drawn = [row for row in everything if plot.wanted(row) and row.services is not None]
        if len({row.services for row in drawn if row.values}) < 2:
            continue
        path = directory / plot.file
        _draw(pyplot, plot, drawn, path)
        path.write_text(_for_every_screen(path.read_text(encoding="utf-8")), encoding="utf-8")
        files.append(path)
    return files


def _draw(pyplot: Any, plot: Plot, rows: Sequence[Measurement], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4.8), facecolor=PAPER, layout="constrained")
    axes.set(facecolor=PAPER, xscale="log", yscale=plot.upright, ylabel=plot.unit)
    axes.set_xlabel("services with 5 backends each, log scale", color=INK)
    axes.set_title(plot.title, color=INK, loc="left")
    for number, subject in enumerate(_subjects(plot, rows)):
        _line(axes, [row for row in rows if row.subject == subject], number)
    if plot.upright == "linear":
        axes.set_ylim(bottom=0)
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    sizes = sorted({row.services for row in rows if row.services is not None})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.tick_params(colors=INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(color=INK, alpha=0.15)
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.legend(labelcolor=INK, facecolor=PAPER, edgecolor=INK, framealpha=0.6, fontsize=9)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def _line(axes: Any, rows: Sequence[Measurement], number: int) -> None:
    """Medians joined, with bars from the smallest to the largest."""
    points = sorted((row for row in rows if row.values), key=lambda row: row.services or 0)
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    medians = [row.median for row in points]
    below = [row.median - row.spread[0] for row in points]
    above = [row.spread[1] - row.median for row in points]
    given_up = any(not row.values for row in rows)
    axes.errorbar(
        [row.services for row in points],
        medians,
        yerr=[below, above],
        label=f"{rows[0].subject}{' (given up beyond)' if given_up else ''}",
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.5,
        capsize=3,
    )


def _subjects(plot: Plot, rows: Sequence[Measurement]) -> list[str]:
    there = list(dict.fromkeys(row.subject for row in rows))
    return [*(each for each in plot.subjects if each in there), *(e for e in there if e not in plot.subjects)]


def _for_every_screen(text: str) -> str:
    """Paper and ink as the reader's screen wants them; no trace of when or where it was drawn."""
    head, opening, rest = text.partition("<svg ")
    tag, closing, body = rest.partition(">")
    themed = body.replace(PAPER, "var(--paper)").replace(INK, "var(--ink)")
    return f"{head}{opening}{tag}{closing}\n{STYLE}{themed}"
