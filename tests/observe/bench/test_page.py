"""The pages say what was measured: their tables are those of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.comparison import COMPARISONS, NO_BREAK, SIZES, compared
from tests.bench.record import Measurement, Record
from tests.bench.report import PAGE, README, RESULTS, TABLES, filled, names_in
from tests.bench.tables import brief

MACHINE = {"kernel": "6.1", "programs": {}}


@pytest.mark.parametrize("page", [PAGE, README], ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, Record(RESULTS)) == text, "stale; run: python -m tests.bench.report"


def test_no_table_of_what_was_measured_is_empty() -> None:
    record = Record(RESULTS)
    assert record.groups.keys() == {"programming", "path", "control", "daemon", "balance", "ipvs"}
    assert [name for name, made in TABLES.items() if not made(record)] == []


def test_the_pages_have_every_table_once() -> None:
    names = [name for page in (PAGE, README) for name in names_in(page.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(TABLES)


def test_the_comparison_has_every_figure_of_its_subjects_and_no_other() -> None:
    record = Record(RESULTS)
    lines = compared(record)
    for each in COMPARISONS:
        for size in SIZES:
            (line,) = (line for line in lines if line.startswith(f"| {each.title}, {size:,} services |"))
            cells = line.replace(NO_BREAK, " ").split(" | ")[1:]
            for cell, subjects in zip(cells, each.columns, strict=True):
                own = [pair for pair in subjects if pair[0]]
                medians = [
                    brief(row)
                    for subject, _ in own
                    for row in record.rows(each.group)
                    if (row.what, row.subject, row.services) == (each.what, subject, size)
                ]
                assert len(medians) == len(own)
                assert all(median in cell for median in medians)
                assert ("not measured" in cell) == (not subjects)


def test_figures_stand_nowhere_else_in_the_readme() -> None:
    """A figure in a sentence would go stale."""
    text = README.read_text(encoding="utf-8").partition("<!-- table: comparison -->")
    rest = text[0] + text[2].partition("<!-- end -->")[2]
    assert re.findall(r"\d[\d.,]* ?(?:×|ms|µs|MiB|Gbit/s|%)|\d/s\b", rest) == []


def test_every_picture_of_the_page_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    drawn = {f"performance/{path.name}" for path in RESULTS.parent.glob("*.svg")}
    shown = {
        part.partition(")")[0] for part in page.split("](")[1:] if part.partition(")")[0].endswith(".svg")
    }
    assert shown == drawn


def row(what: str, *values: float, services: int | None = 10, note: str = "") -> Measurement:
    return Measurement("programming", what, "vipd", services, "s", values, note)


def test_a_group_that_is_measured_again_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Record(path)
    for group in ("programming", "path"):
        first.begin(group, "full", MACHINE)
        first.put(group, row("full load", 1.0), 1.0)
        first.finish(group, 1.0)
    again = Record(path)
    again.begin("programming", "quick", MACHINE)
    again.put("programming", row("full load", 2.0), 1.0)
    again.put("programming", row("full load", 2.0, 3.0), 2.0)
    found = Record(path)
    assert found.rows("path") == [row("full load", 1.0)]
    assert found.rows("programming") == [row("full load", 2.0, 3.0)]
    assert (found.groups["programming"].finished, found.groups["path"].finished) == (False, True)


def test_results_of_another_format_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="move it away"):
        Record(path)
