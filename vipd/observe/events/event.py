"""One event as stored and shown: what happened, when, to which object, its cause and reason. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from vipd.model.formatting import time_text
from vipd.model.text import shortened

MAX_TEXT_LENGTH = 1000
"""Characters of a reason or a cause."""
_END_OF_IDS = 2**63
MAX_NAMES = 100
"""Services or backends that one event names."""

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event, or several of the same kind that are folded into one."""

    id: int
    """Increases from each event to the next, also over restarts."""
    at: datetime
    """When it happened, UTC; the last one of several."""
    event: str
    """A value of `vipd.host.systemd.fields.Event`."""
    level: Level = "info"
    services: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    unit: str = ""
    cause: str = ""
    """The origin of the event, its kind first: `file PATH:LINE`. Empty: none."""
    reason: str = ""
    count: int = 1
    """Number of events folded into this one."""
    first: int = 0
    """The id of the first of several folded events, which this one replaces. 0: its own id."""
    since: datetime | None = None
    """When the first of several happened."""

    @property
    def group_id(self) -> int:
        """Common id of events that replace each other: the first one's."""
        return self.first or self.id


def encode(event: EventRecord) -> bytes:
    """The event as a line of JSON, with its line end: the form on disk and in the API."""
    o = event
    value = {
        "id": o.id,
        "time": time_text(o.at, milliseconds=True),
        "event": o.event,
        "level": o.level,
        "services": list(o.services),
        "backends": list(o.backends),
        "unit": o.unit,
        "cause": o.cause,
        "reason": o.reason,
        "count": o.count,
        "first": o.group_id,
        "since": time_text(o.since or o.at, milliseconds=True),
    }
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> EventRecord:
    """Reads the output of `encode`. Raises ValueError for anything else, such as a part of it."""
    try:
        value = json.loads(line)
        return EventRecord(
            id=_whole(value["id"]),
            at=_time(value["time"]),
            event=clean(str(value["event"])),
            level=_level(value["level"]),
            services=_names(value["services"]),
            backends=_names(value["backends"]),
            unit=clean(str(value["unit"])),
            cause=clean(str(value["cause"])),
            reason=clean(str(value["reason"])),
            count=_whole(value["count"]),
            first=_whole(value["first"]),
            since=_time(value["since"]),
        )
    except (LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no event: {error}") from None


def clean(text: str) -> str:
    """One line without control characters, of limited length: text of files is printed on terminals."""
    return shortened(text, MAX_TEXT_LENGTH)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _END_OF_IDS:
        raise ValueError(f"{str(value)[:20]} is no number of an event")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("names must be a list")
    return tuple(clean(str(name)) for name in value[:MAX_NAMES])


def _time(value: str) -> datetime:
    found = datetime.fromisoformat(value)
    if found.tzinfo is None:
        raise ValueError(f"{value} has no time zone")
    return found.astimezone(UTC)


def _level(value: object) -> Level:
    match value:
        case "info" | "warning" | "error":
            return value
    raise ValueError(f"level {value!r} is not known")
