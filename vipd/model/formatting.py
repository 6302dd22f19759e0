"""Numbers, sizes, rates, durations and times as text: the same on every screen, page and API. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import overload

_UNITS = ("", "K", "M", "G", "T", "P")
_PERIODS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


@overload
def time_text(moment: datetime, *, milliseconds: bool = False) -> str: ...


@overload
def time_text(moment: None) -> None: ...


@overload
def time_text(moment: datetime | None) -> str | None: ...


def time_text(moment: datetime | None, *, milliseconds: bool = False) -> str | None:
    """RFC 3339 in UTC, truncated to the second or the millisecond. Returns None for None."""
    if moment is None:
        return None
    timespec = "milliseconds" if milliseconds else "seconds"
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"


def duration(seconds: float) -> str:
    """The two largest units that matter: `10m`, `1h30m`, `3d`, `45s`."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in _PERIODS:
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
        if len(parts) == 2:
            break
    return "".join(parts) or "0s"


def counted(number: int, noun: str) -> str:
    """`1 backend`, `2 backends`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(number: float) -> str:
    """`812`, `1.2K`, `37M`: with units of 1,024, in at most five columns."""
    return _with_unit(number, 1024)


def thousands(number: float) -> str:
    """`812`, `1.2K`, `37M`: with units of 1,000, in at most four columns up to 999T."""
    return _with_unit(number, 1000)


def per_second(number: float) -> str:
    """`0`, `0.5`, `7.3`, `1520`."""
    return f"{number:.1f}" if 0 < number < 9.95 else f"{number:.0f}"


def _with_unit(number: float, step: int) -> str:
    unit = 0
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number /= step
        unit += 1
    return f"{number:.1f}{_UNITS[unit]}" if unit and number < 9.95 else f"{number:.0f}{_UNITS[unit]}"
