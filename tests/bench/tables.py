"""Measurements as text: single figures, and Markdown tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.bench.record import Measurement


def figures(row: Measurement) -> str:
    """Median, smallest and largest with their unit; the median alone if all are the same; or why there is
    none."""
    if not row.values:
        return row.note or "not measured"
    low, high = row.spread
    spread = f" ({number(low, row.unit)} to {number(high, row.unit)})" if low != high else ""
    return brief(row) + spread


def brief(row: Measurement) -> str:
    if not row.values:
        return row.note or "not measured"
    if row.unit == "1/s":
        return f"{number(row.median)}/s" if row.median >= 100 else f"{number(row.median, row.unit)}/s"
    return f"{number(row.median, row.unit)} {row.unit}".rstrip()


def number(value: float, unit: str = "") -> str:
    """Three digits that count, more where a plain number has more before the point; thousands apart."""
    if unit in ("", "bytes") or abs(value) >= 1000:
        return f"{value:,.0f}"
    for digits, from_here in ((0, 100.0), (1, 10.0), (2, 1.0)):
        if abs(value) >= from_here:
            return f"{value:.{digits}f}"
    return f"{value:.3f}"


def pivot(
    rows: Iterable[Measurement], down: str, across: str, *, corner: str, across_title: str = "{}"
) -> list[str]:
    """A table with the values of field `down` as rows and of field `across` as columns, in order of their
    first appearance; those of `services` sorted. A cell holds the one measurement of its row and column."""
    cells = {(getattr(row, down), getattr(row, across)): figures(row) for row in rows}
    names = _ordered((name for name, _ in cells), down)
    columns = _ordered((column for _, column in cells), across)
    titles = [across_title.format(_title(column)) for column in columns]
    body = [[_title(name), *(cells.get((name, column), "") for column in columns)] for name in names]
    return table([corner, *titles], body)


def table(titles: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return [_line(titles), "|" + "---|" * len(titles), *map(_line, body)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _ordered(values: Iterable[object], name: str) -> list[object]:
    unique = list(dict.fromkeys(values))
    if name != "services":
        return unique
    numbers = sorted(value for value in unique if isinstance(value, int))
    return [*([None] if None in unique else []), *numbers]


def _title(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
