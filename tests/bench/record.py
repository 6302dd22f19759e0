"""What a measurement is, and the file of them all, with the machine, written anew after each figure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from vipd.host.durable import write_durably

FORMAT = "vipd-bench/1"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure, of one subject, under one condition; every round's value is kept."""

    group: str
    """`programming`, `path`, `control`, `daemon`, `balance`, `ipvs`: measured together and compared."""
    what: str
    """What was done or looked at, such as `full load` or `connections per second`."""
    subject: str
    """Who did it, such as `vipd nftables`, `direct` or `haproxy`."""
    services: int | None
    """How many services were there; None where that has no meaning."""
    unit: str
    """`s`, `ms`, `MiB`, `bytes`, `1/s`, `Gbit/s`, `%` (of one core), or `` for a plain count."""
    values: tuple[float, ...]
    """One of each round, in the order they were taken."""
    note: str = ""
    """What a reader has to know of this row, such as why there is no value."""

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    @classmethod
    def read(cls, view: dict[str, object]) -> Measurement:
        values = view.pop("values")
        if not isinstance(values, list):
            raise TypeError(f"values: {values!r} is not a list")
        return cls(**view, values=tuple(map(float, values)))  # type: ignore[arg-type]


@dataclass
class Group:
    extent: str
    machine: dict[str, Any]
    finished: bool = False
    seconds: float = 0.0
    rows: dict[tuple[str, str, int | None], Measurement] = field(default_factory=dict)

    def view(self) -> dict[str, object]:
        return {
            "extent": self.extent,
            "finished": self.finished,
            "seconds": round(self.seconds, 1),
            "machine": self.machine,
            "measurements": [asdict(row) for row in self.rows.values()],
        }


class Record:
    """All groups. A group that is begun anew takes the place of its last results, the others stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.groups: dict[str, Group] = {}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.get("format") != FORMAT:
                raise ValueError(f"{path.name} is no {FORMAT}; hint: move it away")
            self.groups = {name: _group(view) for name, view in found["groups"].items()}

    def begin(self, name: str, extent: str, machine: dict[str, Any]) -> None:
        self.groups[name] = Group(extent, machine)
        self._write()

    def put(self, name: str, row: Measurement, seconds: float) -> None:
        """Take a row, in place of an earlier one of the same thing, and write it down."""
        group = self.groups[name]
        group.rows[_key(row)] = row
        group.seconds = seconds
        self._write()

    def finish(self, name: str, seconds: float) -> None:
        self.groups[name].finished, self.groups[name].seconds = True, seconds
        self._write()

    def rows(self, *names: str) -> list[Measurement]:
        return [row for name in names if name in self.groups for row in self.groups[name].rows.values()]

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"format": FORMAT, "groups": {name: group.view() for name, group in self.groups.items()}}
        write_durably(self._path, (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode(), 0o644)


def _key(row: Measurement) -> tuple[str, str, int | None]:
    return row.what, row.subject, row.services


def _group(view: dict[str, Any]) -> Group:
    rows: Iterable[Measurement] = map(Measurement.read, view["measurements"])
    return Group(
        view["extent"], view["machine"], view["finished"], view["seconds"], {_key(row): row for row in rows}
    )
