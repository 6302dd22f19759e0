"""Overrides of backends by operators, apart from what is declared: drain, disable, weight. Pure.

An override applies to a backend of one service, or to an address in every service. It records its author,
time and reason, and may expire.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

from vipd.model.backend_status import AdminState
from vipd.model.service import MAX_WEIGHT, Backend, Service
from vipd.model.text import is_encodable, one_line

MAX_TEXT = 1000
"""Maximum characters of a reason, and of any other text of an override."""

_SEVERITY = {AdminState.ACTIVE: 0, AdminState.DRAINING: 1, AdminState.DISABLED: 2}


class OverrideTarget(NamedTuple):
    """The target of an override: a backend of a service, or an address in every service."""

    service: str
    """Empty: every service."""
    backend: str
    """`ADDR` or `ADDR:PORT` as the service declares it; an address alone if it is for every service."""

    def __str__(self) -> str:
        return f"{self.service}/{self.backend}" if self.service else f"address {self.backend}"


class OverridePart(StrEnum):
    """What an override sets. Each part is set, and ends, independently."""

    STATE = "state"
    WEIGHT = "weight"


class OverrideKey(NamedTuple):
    """Identifies a part of an override."""

    target: OverrideTarget
    part: OverridePart


@dataclass(frozen=True, slots=True)
class Override:
    """One override: a state, a weight, or both if they were set together. Times are in UTC."""

    target: OverrideTarget
    by: str
    at: datetime
    admin: AdminState = AdminState.ACTIVE
    weight: int | None = None
    reason: str = ""
    until: datetime | None = None
    """When it expires; None: it stays until it is cleared."""
    pins_until: datetime | None = None
    """Until when clients with affinity still reach a draining backend; None: they do not."""

    def applies_to(self, service: str, backend: Backend) -> bool:
        """Whether it applies to this backend of this service."""
        if self.target.service:
            return self.target == (service, str(backend))
        return self.target.backend == backend.address

    def parts(self) -> dict[OverrideKey, Override]:
        """Its state and its weight, each as a separate override."""
        found: dict[OverrideKey, Override] = {}
        if self.admin is not AdminState.ACTIVE:
            found[OverrideKey(self.target, OverridePart.STATE)] = replace(self, weight=None)
        if self.weight is not None:
            found[OverrideKey(self.target, OverridePart.WEIGHT)] = replace(
                self, admin=AdminState.ACTIVE, pins_until=None
            )
        return found


Overrides = Mapping[OverrideKey, Override]
"""Overrides by part."""


class MalformedOverrideError(ValueError):
    """A stored override cannot be read; the text names it and the reason."""


@dataclass(frozen=True, slots=True)
class EffectiveOverride:
    """The combined effect of all overrides of one backend."""

    admin: AdminState = AdminState.ACTIVE
    weight: int | None = None
    keeps_affinity: bool = False
    sources: tuple[Override, ...] = ()


def effective_override(
    service: Service, backend: Backend, overrides: Iterable[Override]
) -> EffectiveOverride:
    """The severest state wins; a weight for the service itself wins over one for the address."""
    found = sorted((o for o in overrides if o.applies_to(service.name, backend)), key=lambda o: o.target)
    if not found:
        return NO_OVERRIDES
    weights = [o.weight for o in found if o.weight is not None]
    admin = max((o.admin for o in found), key=_SEVERITY.__getitem__)
    draining = [o for o in found if o.admin is AdminState.DRAINING]
    pinned = bool(draining) and all(o.pins_until is not None for o in draining)
    # In the order of services, an override for every service sorts first.
    return EffectiveOverride(admin, weights[-1] if weights else None, pinned, tuple(found))


NO_OVERRIDES = EffectiveOverride()


def by_part(overrides: Iterable[Override]) -> dict[OverrideKey, Override]:
    """The parts of these overrides; of two that set the same part of the same target, the last one counts."""
    return {key: part for order in overrides for key, part in order.parts().items()}


def merge_parts(overrides: Overrides) -> list[Override]:
    """Joins parts that were set together and end together into one override."""
    found: list[Override] = []
    for state, weight in _pairs(overrides):
        both = state and weight and _merged(state, weight)
        found += [both] if both else [part for part in (state, weight) if part]
    return found


def _pairs(overrides: Overrides) -> Iterator[tuple[Override | None, Override | None]]:
    """State and weight of each subject."""
    for subject in dict.fromkeys(key.target for key in overrides):
        yield (
            overrides.get(OverrideKey(subject, OverridePart.STATE)),
            overrides.get(OverrideKey(subject, OverridePart.WEIGHT)),
        )


def _merged(state: Override, weight: Override) -> Override | None:
    """State and weight as one override; None if they differ in anything else."""
    both = replace(state, weight=weight.weight)
    return both if replace(weight, admin=state.admin, pins_until=state.pins_until) == both else None


def expired(overrides: Overrides, now: datetime) -> dict[OverrideKey, Override | None]:
    """Changes due at `now`: None for an override that has expired, else the override without its pins."""
    changed: dict[OverrideKey, Override | None] = {}
    for key, override in overrides.items():
        if override.until is not None and override.until <= now:
            changed[key] = None
        elif override.pins_until is not None and override.pins_until <= now:
            changed[key] = replace(override, pins_until=None)
    return changed


def next_expiry(overrides: Overrides) -> datetime | None:
    """When the next override changes by time; None: never."""
    times = (time for o in overrides.values() for time in (o.until, o.pins_until) if time is not None)
    return min(times, default=None)


def describe(override: Override) -> str:
    """A short text: `draining until 2026-01-31T12:00:00+00:00 (kernel update)`."""
    words = [] if override.admin is AdminState.ACTIVE else [str(override.admin)]
    words += [] if override.weight is None else [f"weight {override.weight}"]
    until = f" until {override.until.isoformat(timespec='seconds')}" if override.until else ""
    why = f" ({override.reason})" if override.reason else ""
    return ", ".join(words) + until + why


def to_json(override: Override) -> dict[str, object]:
    """As JSON types; what is at its default is left out."""
    found: dict[str, object] = {"service": override.target.service, "backend": override.target.backend}
    for name, value in asdict(override).items():
        if name == "target" or value is None or value == "":
            continue
        found[name] = value.isoformat() if isinstance(value, datetime) else value
    return found


def from_json(value: object) -> Override:
    """Reads the output of `to_json`. Raises MalformedError.

    Its texts are printed on terminals and may have any author: they are cut, and made one line.
    """
    if not isinstance(value, Mapping):
        raise MalformedOverrideError(f"an override must be a mapping, not {type(value).__name__}")
    known = {field.name for field in fields(Override)} - {"target"} | {"service", "backend"}
    if unknown := sorted(set(value) - known):
        raise MalformedOverrideError(f"unknown key {unknown[0]!r}")
    try:
        target = OverrideTarget(_text(value, "service"), _text(value, "backend"))
        if not target.service:
            target = OverrideTarget("", str(ipaddress.ip_address(target.backend)))
        return Override(
            target,
            by=_text(value, "by"),
            at=_time(value["at"]),
            admin=AdminState(value.get("admin", AdminState.ACTIVE)),
            weight=_weight(value.get("weight")),
            reason=_text(value, "reason"),
            until=_optional_time(value.get("until")),
            pins_until=_optional_time(value.get("pins_until")),
        )
    except (KeyError, ValueError) as error:
        raise MalformedOverrideError(str(error)) from None


def _text(value: Mapping[str, object], key: str) -> str:
    text = value.get(key, "")
    if not isinstance(text, str) or not is_encodable(text):
        raise MalformedOverrideError(f"{key} must be text")
    return one_line(text[:MAX_TEXT])[:MAX_TEXT]


def _weight(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_WEIGHT:
        raise MalformedOverrideError(f"weight {value!r} is not a whole number from 0 to {MAX_WEIGHT}")
    return value


def _optional_time(value: object) -> datetime | None:
    return None if value is None else _time(value)


def _time(value: object) -> datetime:
    if not isinstance(value, str):
        raise MalformedOverrideError(f"{value!r} is not a time")
    moment = datetime.fromisoformat(value)
    try:
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except OverflowError:
        raise MalformedOverrideError(f"{value!r} is not a time") from None
