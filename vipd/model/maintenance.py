"""That an operator has taken this host out of service: what it announces goes to other hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from vipd.model.override import MAX_TEXT, MalformedOverrideError
from vipd.model.text import is_encodable, one_line

_KEYS = {"by", "at", "reason", "until"}


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Maintenance of this host. Times are in UTC."""

    by: str
    at: datetime
    reason: str = ""
    until: datetime | None = None
    """When it ends by itself; None: it lasts until `vipctl host resume`."""

    def over(self, now: datetime) -> bool:
        """Whether its time is over."""
        return self.until is not None and self.until <= now

    def __str__(self) -> str:
        until = f" until {self.until.isoformat(timespec='seconds')}" if self.until else ""
        return f"in maintenance{until}{f' ({self.reason})' if self.reason else ''}"


def to_json(maintenance: Maintenance) -> dict[str, object]:
    """As JSON types; what is empty is left out."""
    found: dict[str, object] = {"by": maintenance.by, "at": maintenance.at.isoformat()}
    if maintenance.reason:
        found["reason"] = maintenance.reason
    if maintenance.until is not None:
        found["until"] = maintenance.until.isoformat()
    return found


def from_json(value: object) -> Maintenance:
    """Reads the output of `to_json`. Raises MalformedOverrideError."""
    if not isinstance(value, Mapping):
        raise MalformedOverrideError(f"it must be a mapping, not {type(value).__name__}")
    if unknown := sorted(set(value) - _KEYS):
        raise MalformedOverrideError(f"unknown key {unknown[0]!r}")
    until = value.get("until")
    try:
        return Maintenance(
            by=_text(value.get("by", "")),
            at=_time(value["at"]),
            reason=_text(value.get("reason", "")),
            until=None if until is None else _time(until),
        )
    except KeyError as error:
        raise MalformedOverrideError(f"{error.args[0]} is missing") from None


def _text(value: object) -> str:
    if not isinstance(value, str) or not is_encodable(value):
        raise MalformedOverrideError("by and reason must be text")
    return one_line(value[:MAX_TEXT])[:MAX_TEXT]


def _time(value: object) -> datetime:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
        if moment is None:
            raise ValueError
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise MalformedOverrideError(f"{value!r} is not a time") from None
