"""What an operator's order in a request means: from JSON to overrides. Pure; raises `RefusedError`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from vipd.declaration.notation import NotationError, parse_address, parse_backend
from vipd.model import MAX_WEIGHT, Backend, Service
from vipd.operations import RefusedError, Services, find
from vipd.overrides import Override, Overrides, Subject, merged
from vipd.standing import Admin

MAX_SECONDS = 366 * 86400
"""Longest time for which an order may be given."""

MAX_REASON = 200

_KEYS = ("service", "backend", "address", "admin", "weight", "reason", "for", "pins")


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order, and what it is about now."""

    override: Override
    backends: tuple[tuple[Service, Backend], ...]


def order(
    snapshot: Services, overrides: Overrides, request: Mapping[str, object], by: str, now: datetime
) -> Ordered:
    """The override that a request asks for, an earlier one about the same taken into account.

    `service` (a target) and `backend`, or `address`; `admin` draining or disabled, and/or `weight`; `reason`;
    `for` and `pins` in seconds: how long it holds, and how long clients with affinity are still served.
    """
    if unknown := sorted(set(request) - set(_KEYS)):
        raise RefusedError("malformed", f"unknown key {unknown[0]}", "", f"known: {', '.join(_KEYS)}")
    subject, backends = subject_of(snapshot, request)
    admin, weight = _admin(request.get("admin")), _weight(request.get("weight"))
    if admin is Admin.ACTIVE and weight is None:
        raise RefusedError("malformed", "nothing is ordered", "", "say admin or weight")
    override = Override(
        subject,
        by,
        now,
        admin,
        weight,
        _reason(request.get("reason")),
        _later(request, "for", now),
        _later(request, "pins", now),
    )
    return Ordered(merged(overrides.get(subject), override), backends)


def subject_of(
    snapshot: Services, request: Mapping[str, object], known: Collection[Subject] = ()
) -> tuple[Subject, tuple[tuple[Service, Backend], ...]]:
    """What a request is about, and the backends that this is now. A subject in `known` needs none."""
    service, backend, address = (request.get(key, "") for key in ("service", "backend", "address"))
    if not all(isinstance(word, str) for word in (service, backend, address)):
        raise RefusedError("malformed", "service, backend and address must be text")
    if address:
        return _every(snapshot, _address(str(address)), known)
    if not service or not backend:
        raise RefusedError(
            "malformed", "service and backend are missing", "", "or say address for all services"
        )
    return _one(snapshot, str(service), str(backend), known)


def _every(
    snapshot: Services, address: str, known: Collection[Subject]
) -> tuple[Subject, tuple[tuple[Service, Backend], ...]]:
    found = tuple((s, b) for s in snapshot.values() for b in s.backends if b.address == address)
    subject = Subject("", address)
    if not found and subject not in known:
        raise RefusedError(
            "not-found", f"no service has a backend {address}", "", "vipctl list -o wide shows them"
        )
    return subject, found


def _one(
    snapshot: Services, target: str, name: str, known: Collection[Subject]
) -> tuple[Subject, tuple[tuple[Service, Backend], ...]]:
    if Subject(target, name) in known and target not in snapshot:
        return Subject(target, name), ()
    service = find(snapshot, target)
    try:
        wanted = parse_backend(name)
    except NotationError as error:
        raise RefusedError("invalid", error.what, "", error.hint) from None
    found = [b for b in service.backends if (b.address, b.port) == (wanted.address, wanted.port)]
    if not found and wanted.port is None:
        found = [b for b in service.backends if b.address == wanted.address]
    if not found and Subject(service.name, str(wanted)) in known:
        return Subject(service.name, str(wanted)), ()
    if len(found) != 1:
        what = f"{service.name} has {'several backends' if found else 'no backend'} {name}"
        raise RefusedError("not-found", what, "", f"vipctl describe {service.name} shows them")
    return Subject(service.name, str(found[0])), ((service, found[0]),)


def _address(text: str) -> str:
    try:
        return parse_address(text)
    except NotationError as error:
        raise RefusedError("invalid", error.what, "", error.hint) from None


def _admin(value: object) -> Admin:
    words = {admin.value: admin for admin in (Admin.DRAINING, Admin.DISABLED)}
    if value is None:
        return Admin.ACTIVE
    if not isinstance(value, str) or value not in words:
        raise RefusedError("invalid", f"admin must be one of {', '.join(words)}")
    return words[value]


def _weight(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_WEIGHT:
        raise RefusedError("invalid", f"weight {value!r} is not a whole number from 0 to {MAX_WEIGHT}")
    return value


def _reason(value: object) -> str:
    text = "" if value is None else value
    if not isinstance(text, str) or len(text) > MAX_REASON or not (text.isprintable() or not text):
        raise RefusedError("invalid", f"reason must be one line of at most {MAX_REASON} characters")
    return text


def _later(request: Mapping[str, object], key: str, now: datetime) -> datetime | None:
    seconds = request.get(key)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 1 <= seconds <= MAX_SECONDS:
        raise RefusedError("invalid", f"{key} must be seconds, from 1 to {MAX_SECONDS}")
    return now + timedelta(seconds=seconds)
