"""Numbers per second, from one answer about numbers to a later one. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from vipd.observe.api_client import Json

TRAFFIC = ("packets_in", "bytes_in", "packets_out", "bytes_out")

Key = tuple[str, ...]


def rows_of(answer: Json) -> Iterator[tuple[Key, Json]]:
    """Every service and backend of an answer to `/v1/stats`, each with its key."""
    for service in answer["services"]:
        name = str(service["name"])
        yield (name,), service
        for backend in service.get("backends", ()):
            yield key_of(name, backend), backend


def key_of(service: str, backend: Json) -> Key:
    """The key of a backend of a service."""
    return service, *(str(backend[part]) for part in ("endpoint", "port_name", "protocol", "family"))


class Rates:
    """Numbers given to `take`, per second between the last two readings of the kernel."""

    def __init__(self) -> None:
        self._new = _Meter(("new_flows", "refused_flows"))
        self._traffic = _Meter(TRAFFIC)

    def take(self, answer: Json) -> None:
        """Add an answer to `/v1/stats`. One of the same reading changes nothing."""
        self._new.take(answer, answer["at"])
        self._traffic.take(answer, answer["conntrack"]["at"])

    def of(self, key: Key) -> dict[str, float | None]:
        """Each number per second; None if unknown."""
        return {**self._new.of(key), **self._traffic.of(key)}


class _Meter:
    def __init__(self, fields: tuple[str, ...]) -> None:
        self._fields = fields
        self._values: dict[Key, Json] = {}
        self._rates: dict[Key, dict[str, float | None]] = {}
        self._at: datetime | None = None

    def take(self, answer: Json, at: str | None) -> None:
        if at is None:
            return
        moment = datetime.fromisoformat(at)
        if moment == self._at:
            return
        before, self._values = self._values, dict(rows_of(answer))
        if self._at is not None and moment > self._at:  # otherwise the clock was set back: start again
            seconds = (moment - self._at).total_seconds()
            self._rates = {
                key: self._grown(before.get(key), row, seconds) for key, row in self._values.items()
            }
        self._at = moment

    def of(self, key: Key) -> dict[str, float | None]:
        return self._rates.get(key) or dict.fromkeys(self._fields)

    def _grown(self, before: Json | None, now: Json, seconds: float) -> dict[str, float | None]:
        rates: dict[str, float | None] = {}
        for field in self._fields:
            then, value = _number(before, field) if before else 0, _number(now, field)
            if then is None or value is None:
                rates[field] = None
            else:
                rates[field] = round(max(value - then, 0) / seconds, 3)
        return rates


def _number(row: Json, field: str) -> float | None:
    """A number of a service or a backend; `refused_flows`: those over any of a service's limits."""
    if field == "refused_flows":
        refused = row.get("refused")
        return None if refused is None else sum(refused.values())
    return row.get(field)
