"""An operator's orders about backends, kept apart from what is declared: drain, disable, weight. Pure.

An order holds for a backend of one service, or for an address in every service. It says who gave it, when and
why, and may end by itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import NamedTuple

from vipd.model import MAX_WEIGHT, Backend, Service
from vipd.standing import Admin
from vipd.text import is_text, one_line

MOST_TEXT = 1000
"""Characters of a reason, and of any other text of an order."""

_SEVERITY = {Admin.ACTIVE: 0, Admin.DRAINING: 1, Admin.DISABLED: 2}


class Subject(NamedTuple):
    """What an order is about: a backend of a service, or an address in every service."""

    service: str
    """Empty: every service."""
    backend: str
    """`ADDR` or `ADDR:PORT` as the service declares it; an address alone if it is for every service."""

    def __str__(self) -> str:
        return f"{self.service}/{self.backend}" if self.service else f"address {self.backend}"


@dataclass(frozen=True, slots=True)
class Override:
    """One order. Times are in UTC."""

    subject: Subject
    by: str
    at: datetime
    admin: Admin = Admin.ACTIVE
    weight: int | None = None
    reason: str = ""
    until: datetime | None = None
    """When it ends by itself; None: when it is taken back."""
    pins_until: datetime | None = None
    """Until when clients with affinity still get to a draining backend; None: not at all."""

    def about(self, service: str, backend: Backend) -> bool:
        """Whether it is about this backend of this service."""
        if self.subject.service:
            return self.subject == (service, str(backend))
        return self.subject.backend == backend.address

    def orders(self) -> bool:
        """Whether anything is left of it."""
        return self.admin is not Admin.ACTIVE or self.weight is not None


Overrides = Mapping[Subject, Override]


class MalformedError(ValueError):
    """A stored override cannot be read: which and why."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What all orders about one backend come to."""

    admin: Admin = Admin.ACTIVE
    weight: int | None = None
    pinned: bool = False
    sources: tuple[Override, ...] = ()


def orders_about(service: Service, backend: Backend, overrides: Iterable[Override]) -> Orders:
    """The severest state wins; a weight for the service itself wins over one for the address."""
    found = sorted((o for o in overrides if o.about(service.name, backend)), key=lambda o: o.subject)
    if not found:
        return NO_ORDERS
    weights = [o.weight for o in found if o.weight is not None]
    admin = max((o.admin for o in found), key=_SEVERITY.__getitem__)
    draining = [o for o in found if o.admin is Admin.DRAINING]
    pinned = bool(draining) and all(o.pins_until is not None for o in draining)
    # Sorted by service, an order for every service comes first.
    return Orders(admin, weights[-1] if weights else None, pinned, tuple(found))


NO_ORDERS = Orders()


def lapsed(overrides: Overrides, now: datetime) -> dict[Subject, Override | None]:
    """What time has changed: None for an order that has ended, else the order without its pins."""
    changed: dict[Subject, Override | None] = {}
    for subject, override in overrides.items():
        if override.until is not None and override.until <= now:
            changed[subject] = None
        elif override.pins_until is not None and override.pins_until <= now:
            changed[subject] = replace(override, pins_until=None)
    return changed


def next_lapse(overrides: Overrides) -> datetime | None:
    """When the next order changes by itself; None: no one will."""
    times = (time for o in overrides.values() for time in (o.until, o.pins_until) if time is not None)
    return min(times, default=None)


def merged(before: Override | None, order: Override) -> Override:
    """An order given beside an earlier one about the same: a weight keeps the state, a state the weight."""
    if before is None:
        return order
    if order.weight is None:
        return replace(order, weight=before.weight)
    if order.admin is Admin.ACTIVE:
        kept = (before.until, before.pins_until)
        return replace(order, admin=before.admin, until=order.until or kept[0], pins_until=kept[1])
    return order


def describe(override: Override) -> str:
    """An order in a few words: `draining until 2026-01-31T12:00:00+00:00 (kernel update)`."""
    words = [] if override.admin is Admin.ACTIVE else [str(override.admin)]
    words += [] if override.weight is None else [f"weight {override.weight}"]
    until = f" until {override.until.isoformat(timespec='seconds')}" if override.until else ""
    why = f" ({override.reason})" if override.reason else ""
    return ", ".join(words) + until + why


def to_json(override: Override) -> dict[str, object]:
    """As JSON types; what is at its default is left out."""
    found: dict[str, object] = {"service": override.subject.service, "backend": override.subject.backend}
    for name, value in asdict(override).items():
        if name == "subject" or value is None or value == "":
            continue
        found[name] = value.isoformat() if isinstance(value, datetime) else value
    return found


def from_json(value: object) -> Override:
    """Reads what `to_json` gave. Raises MalformedError.

    Its texts are printed on terminals, and anybody may have written them: they are one line, and cut.
    """
    if not isinstance(value, Mapping):
        raise MalformedError(f"an override must be a mapping, not {type(value).__name__}")
    known = {field.name for field in fields(Override)} - {"subject"} | {"service", "backend"}
    if unknown := sorted(set(value) - known):
        raise MalformedError(f"unknown key {unknown[0]!r}")
    try:
        subject = Subject(_text(value, "service"), _text(value, "backend"))
        if not subject.service:
            ipaddress.ip_address(subject.backend)
        return Override(
            subject,
            by=_text(value, "by"),
            at=_time(value["at"]),
            admin=Admin(value.get("admin", Admin.ACTIVE)),
            weight=_weight(value.get("weight")),
            reason=_text(value, "reason"),
            until=_optional_time(value.get("until")),
            pins_until=_optional_time(value.get("pins_until")),
        )
    except (KeyError, ValueError) as error:
        raise MalformedError(str(error)) from None


def _text(value: Mapping[str, object], key: str) -> str:
    text = value.get(key, "")
    if not isinstance(text, str) or not is_text(text):
        raise MalformedError(f"{key} must be text")
    return one_line(text[:MOST_TEXT])[:MOST_TEXT]


def _weight(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_WEIGHT:
        raise MalformedError(f"weight {value!r} is not a whole number from 0 to {MAX_WEIGHT}")
    return value


def _optional_time(value: object) -> datetime | None:
    return None if value is None else _time(value)


def _time(value: object) -> datetime:
    if not isinstance(value, str):
        raise MalformedError(f"{value!r} is not a time")
    moment = datetime.fromisoformat(value)
    try:
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except OverflowError:
        raise MalformedError(f"{value!r} is not a time") from None
