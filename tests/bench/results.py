"""What a measurement is, whoever made it: rows that are printed, written as JSON, and drawn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median


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

    def view(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def read(cls, view: dict[str, object]) -> Measurement:
        values = view.pop("values")
        if not isinstance(values, list):
            raise TypeError(f"values: {values!r} is not a list")
        return cls(**view, values=tuple(map(float, values)))  # type: ignore[arg-type]
