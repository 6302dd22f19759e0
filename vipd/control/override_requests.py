"""Reads overrides from the JSON of a request. Pure; raises `RefusedError`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from vipd.declaration.dns_names import is_named
from vipd.declaration.listed_backends import named_by
from vipd.declaration.operations import RefusedError, Services, find
from vipd.declaration.syntax import InvalidTextError, parse_address, parse_backend
from vipd.model.backend_status import AdminState
from vipd.model.maintenance import Maintenance
from vipd.model.override import Override, OverrideTarget
from vipd.model.service import MAX_WEIGHT, Backend, Service

MAX_SECONDS = 366 * 86400
"""Longest duration of an override."""

MAX_REASON = 200

TARGET_MEMBERS = ("service", "backend", "address")
"""What a request says about its target, see `target_of`."""
OVERRIDE_MEMBERS = (*TARGET_MEMBERS, "admin", "weight", "reason", "for", "pins")
"""What a request for an override may say."""

Backends = tuple[tuple[Service, Backend], ...]


@dataclass(frozen=True, slots=True)
class OverrideRequest:
    """An override, and the backends that it now applies to."""

    override: Override
    backends: Backends


def parse_override(
    snapshot: Services, request: Mapping[str, object], by: str, now: datetime
) -> OverrideRequest:
    """The override that a request describes.

    `service` (a target) and `backend`, or `address`; `admin` draining or disabled, and/or `weight`; `reason`;
    `for` and `pins` in seconds: how long it holds, and how long clients with affinity are still served.
    """
    subject, backends = target_of(snapshot, request)
    admin, weight = _admin(request.get("admin")), _weight(request.get("weight"))
    if admin is AdminState.ACTIVE and weight is None:
        raise RefusedError("malformed", "nothing is ordered", "", "say admin or weight")
    if request.get("pins") is not None and admin is not AdminState.DRAINING:
        raise RefusedError("malformed", "pins is for draining", "", "leave it out")
    override = Override(
        subject,
        by,
        now,
        admin,
        weight,
        _reason(request.get("reason")),
        _expiry(request, "for", now),
        _expiry(request, "pins", now),
    )
    return OverrideRequest(override, backends)


def parse_maintenance(request: Mapping[str, object], by: str, now: datetime) -> Maintenance:
    """The maintenance of this host that a request describes: `reason`, and `for` in seconds."""
    return Maintenance(by, now, _reason(request.get("reason")), _expiry(request, "for", now))


def target_of(snapshot: Services, request: Mapping[str, object]) -> tuple[OverrideTarget, Backends]:
    """The target of a request, and its current backends, at least one. Raises RefusedError."""
    service, backend, address = _named(request)
    return _every(snapshot, address) if address else _one(snapshot, service, backend)


def overrides_to_clear(
    snapshot: Services, request: Mapping[str, object], known: Collection[OverrideTarget]
) -> tuple[frozenset[OverrideTarget], Backends]:
    """The targets among `known` that a request to clear names, and the backends that they now apply
    to.

    An override can be cleared by the words that list it, whatever has become of its service and backend, and
    by those that name its backend now. Raises RefusedError for words that name neither.
    """
    everything = request.get("all", False)
    if not isinstance(everything, bool):
        raise RefusedError("malformed", "all must be true or false")
    if everything and len(request) > 1:
        raise RefusedError(
            "malformed", "all is for every order", "", "leave service, backend and address out"
        )
    if everything:
        return frozenset(known), _backends_of(snapshot, known)
    service, backend, address = _named(request)
    found = {OverrideTarget("", address)} if address else {OverrideTarget(service, backend)}
    found |= {OverrideTarget(subject.service, _canonical(subject.backend)) for subject in found}
    backends: Backends = ()
    try:
        subject, backends = target_of(snapshot, request)
        found.add(subject)
        if not address:
            found |= {
                OverrideTarget(subject.service, backend),
                OverrideTarget(subject.service, _canonical(backend)),
            }
    except RefusedError:
        if not found & set(known):
            raise
    return frozenset(found & set(known)), backends


def _named(request: Mapping[str, object]) -> tuple[str, str, str]:
    """The service and backend, or the address, that a request is about. Raises RefusedError."""
    words = [request.get(key, "") for key in ("service", "backend", "address")]
    if not all(isinstance(word, str) for word in words):
        raise RefusedError("malformed", "service, backend and address must be text")
    service, backend, address = map(str, words)
    if address and (service or backend):
        what = "address is for every service, and service and backend for one"
        raise RefusedError("malformed", what, "", "say one of them")
    if not address and not (service and backend):
        raise RefusedError(
            "malformed", "service and backend are missing", "", "or say address for all services"
        )
    return service, backend, address


def _backends_of(snapshot: Services, targets: Collection[OverrideTarget]) -> Backends:
    """The backends that overrides of these targets apply to."""
    known = frozenset(targets)
    return tuple(
        (service, backend)
        for service in snapshot.values()
        for backend in service.backends
        if known & {OverrideTarget(service.name, str(backend)), OverrideTarget("", backend.address)}
    )


def _every(snapshot: Services, word: str) -> tuple[OverrideTarget, Backends]:
    address = _address(word)
    found = tuple((s, b) for s in snapshot.values() for b in s.backends if b.address == address)
    if not found:
        raise RefusedError(
            "not-found", f"no service has a backend {address}", "", "vipctl list -o wide shows them"
        )
    return OverrideTarget("", address), found


def _one(snapshot: Services, target: str, name: str) -> tuple[OverrideTarget, Backends]:
    service = find(snapshot, target)
    if is_named(name):
        hint = f"name one of its addresses; vipctl describe {service.name} shows them"
        raise RefusedError("invalid", f"{name} is a name, and only addresses take orders", "", hint)
    try:
        wanted = parse_backend(name)
    except InvalidTextError as error:
        raise RefusedError("invalid", error.what, "", error.hint) from None
    found = named_by(service, service.backends, wanted)
    same = [b for b in service.backends if b.address == wanted.address]
    if not same and any(backend.address == wanted.address for backend in service.fallback):
        hint = f"vipctl set {service.name} --fallback ADDR names others"
        raise RefusedError("invalid", f"{name} is of the fallback, whose backends take no orders", "", hint)
    if len(found) != 1:
        what = f"{service.name} has {'several backends' if found else 'no backend'} {name}"
        hint = f"did you mean {' or '.join(map(str, same))}?" if same else ""
        raise RefusedError("not-found", what, "", hint or f"vipctl describe {service.name} shows them")
    return OverrideTarget(service.name, str(found[0])), ((service, found[0]),)


def _canonical(backend: str) -> str:
    """A backend as its service names it; text that names none stays as it is."""
    try:
        return str(parse_backend(backend))
    except InvalidTextError:
        return backend


def _address(text: str) -> str:
    try:
        return parse_address(text)
    except InvalidTextError as error:
        raise RefusedError("invalid", error.what, "", error.hint) from None


def _admin(value: object) -> AdminState:
    words = {admin.value: admin for admin in (AdminState.DRAINING, AdminState.DISABLED)}
    if value is None:
        return AdminState.ACTIVE
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


def _expiry(request: Mapping[str, object], key: str, now: datetime) -> datetime | None:
    seconds = request.get(key)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 1 <= seconds <= MAX_SECONDS:
        raise RefusedError("invalid", f"{key} must be seconds, from 1 to {MAX_SECONDS}")
    return now + timedelta(seconds=seconds)
