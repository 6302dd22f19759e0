"""The changes of the API: from a request to the store's next content. Pure.

Every function gets the services of one moment, and returns an `Outcome` or raises `RefusedError`. Nothing
changes until the caller saves `Outcome.stored`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal

from vipd.declaration.conflicts import AddressUse, address_use_problem, address_uses, backend_addresses
from vipd.declaration.dns_names import parse_any_backend
from vipd.declaration.listed_backends import (
    Listed,
    host_of,
    is_srv,
    listed,
    named_by,
    weight_of,
    weighted,
    with_listed,
)
from vipd.declaration.problems import Problem
from vipd.declaration.reader import parse_service
from vipd.declaration.syntax import InvalidTextError, parse_address, parse_frontend
from vipd.declaration.writer import service_to_spec
from vipd.model.misspelling import nearest
from vipd.model.service import Backend, Frontend, NamedBackend, Origin, Service

Services = Mapping[str, Service]
Action = Literal["created", "changed", "removed", "unchanged"]
Kind = Literal[
    "malformed", "too-large", "not-found", "conflict", "changed", "owned", "invalid", "internal", "busy"
]

CLI = "cli"
"""The source that vipctl's own store is; the functions below also serve another one that it may write."""
MAX_NAMED = 5
"""Frontends that a hint names."""
MAX_PROBLEMS = 1000
"""No more services are read once this many problems were found."""


class RefusedError(Exception):
    """A refused change: what, why, hint."""

    def __init__(
        self, kind: Kind, what: str, why: str = "", hint: str = "", problems: Iterable[Problem | str] = ()
    ) -> None:
        super().__init__(what)
        self.kind, self.what, self.why, self.hint = kind, what, why, hint
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Moment:
    """The services of one moment: all of them, and those of the store that a change is for."""

    everything: Services
    stored: Services
    source: str = CLI
    """The source that the store is."""

    def own(self, target: str) -> Service:
        """The service of a target, if it belongs to the store. Raises RefusedError."""
        return _owned(find(self.everything, target), self.source)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a change: the services to store, and the action for each that was named."""

    stored: Services
    results: Mapping[str, Action] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether there is anything to store."""
        return any(action != "unchanged" for action in self.results.values())


def spec_of(service: Service) -> dict[str, object]:
    """A service as one item of a declaration, its name included."""
    return {"name": service.name, **service_to_spec(service)}


def version_of(service: Service) -> str:
    """Differs for declarations that differ, so that a client notices a change since it looked. The same
    declaration has the same version on every host and after a restart."""
    return sha256(json.dumps(spec_of(service), sort_keys=True).encode()).hexdigest()[:16]


def find(snapshot: Services, target: str) -> Service:
    """The service of a name, of a frontend like `10.96.0.10:53/udp`, or of an address that no other service
    has. Raises RefusedError."""
    if target in snapshot:
        return snapshot[target]
    address, frontend, why = "", None, ""
    try:
        frontend = parse_frontend(target)
        address = frontend.address
    except InvalidTextError as error:
        with suppress(InvalidTextError):
            address = parse_address(target)
        why = str(error) if ":" in target and not address else ""
    at_address = [service for service in snapshot.values() if address and _has_address(service, address)]
    for service in at_address:
        if frontend in service.frontends():
            return service
    if frontend is None and len(at_address) == 1:
        return at_address[0]
    if frontend is None and at_address:
        hint = f"name one: {_first([service.name for service in at_address])}"
        raise RefusedError("malformed", f"{target} is of several services", "", hint)
    hint = _not_found_hint(snapshot, target, address, at_address)
    raise RefusedError("not-found", f"no service {target}", why, hint)


def _has_address(service: Service, address: str) -> bool:
    external = (each.address for each in service.external_addresses)
    return address in service.addresses or address in external


def _not_found_hint(snapshot: Services, target: str, address: str, at_address: Sequence[Service]) -> str:
    """What may have been meant. `address`: that of the target, if it has one; `at_address`: whose it is."""
    frontends = [
        str(frontend) if str(frontend) == service.name else f"{frontend} ({service.name})"
        for service in at_address
        for frontend in service.frontends()
        if frontend.address == address
    ]
    if frontends:
        return f"its address has {_first(frontends)}"
    service = target.rpartition("/")[0]
    if service in snapshot:
        return f"{service} is a service; vipctl describe {service} shows its backends"
    users = [s.name for s in snapshot.values() if address and any(b.address == address for b in s.backends)]
    if users:
        return f"it is a backend of {_first(users)}"
    close = nearest(target, snapshot)
    return f"did you mean {' or '.join(close)}?" if close else "vipctl list shows them"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")


def add(now: Moment, spec: object) -> Outcome:
    """A new service. The same one again is unchanged; another under its name or frontend is a conflict."""
    service = _parse(spec, now.source)
    known = now.everything.get(service.name)
    if known == service:
        return Outcome(now.stored, {service.name: "unchanged"})
    if known is not None:
        hint = _change_hint(known, service, now.source)
        raise RefusedError(
            "conflict", f"service {known.name} is there already and differs", _owner(known), hint
        )
    _check_frontends(now.everything, service, _add_hint(service, now.source))
    _check_addresses(now.everything, [service])
    return _replaced(now, None, service)


def _change_hint(known: Service, wanted: Service, source: str) -> str:
    """How to change a service to one that a request would add under its name."""
    if known.origin.source != source:
        return _owner_hint(known)
    bare = replace(known, backends=(), named_backends=(), origin=wanted.origin)
    if bare == replace(wanted, backends=(), named_backends=()):
        return _add_hint(wanted, source)(known)
    return f"vipctl set {known.name} changes it, vipctl remove {known.name} removes it"


def _add_hint(wanted: Service, source: str) -> Callable[[Service], str]:
    """How to change an existing service that has the frontend of a requested one."""

    def way(known: Service) -> str:
        look = f"vipctl describe {known.name} shows it"
        present, asked = set(map(str, listed(known))), list(map(str, listed(wanted)))
        missing = [backend for backend in asked if backend not in present]
        if known.origin.source != source or (asked and not missing):
            return look
        return f"{look}; vipctl add-backend {known.name} {' '.join(missing) or 'ADDR'} adds to it"

    return way


def change(now: Moment, target: str, fields: object, version: str = "") -> Outcome:
    """Set the given fields of a service; null clears one. Refused if the service is not of `version` any
    more; empty: any."""
    service = now.own(target)
    if version and version != version_of(service):
        what = f"service {service.name} was changed by somebody else meanwhile"
        raise RefusedError("changed", what, "", f"vipctl describe {service.name} shows it as it is now")
    if not isinstance(fields, Mapping):
        raise RefusedError("malformed", "the service must be a mapping of fields")
    if fields.get("name", service.name) != service.name:
        raise RefusedError("conflict", "a service cannot be renamed", "", "remove it and add it anew")
    spec = {**spec_of(service), **fields}
    changed = _parse({key: value for key, value in spec.items() if value is not None}, now.source)
    _check_frontends(now.everything, changed)
    _check_addresses(now.everything, [changed])
    return _replaced(now, service, changed)


def set_weight(now: Moment, target: str, backend: str, weight: object) -> Outcome:
    """Set the weight of one backend."""
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= 65535:
        raise RefusedError("invalid", f"weight {weight!r} is not a whole number from 0 to 65535")

    def changed(backends: Listed) -> Listed:
        chosen = _backend(find(now.everything, target), backends, backend)
        if is_srv(chosen):
            what = f"{chosen} has the weights of its records"
            raise RefusedError("invalid", what, "", "change them in DNS")
        return tuple(weighted(b, weight) if b is chosen else b for b in backends)

    return _change_backends(now, target, changed)


def add_backends(now: Moment, target: str, specs: object) -> Outcome:
    """Add backends to a service; existing ones with the same weight stay as they are."""
    service = find(now.everything, target)
    if not isinstance(specs, list) or not specs:
        raise RefusedError("malformed", "backends must be a list of at least one")
    added = _parse({**spec_of(service), "backends": specs, "fallback": None}, now.source)

    def extended(backends: Listed) -> Listed:
        new = tuple(b for b in listed(added) if b not in backends)
        for backend in new:
            if str(backend) in map(str, backends):
                hint = f"vipctl set {service.name}/{backend} --weight {weight_of(backend)}"
                raise RefusedError("conflict", f"backend {backend} is there with another weight", "", hint)
        return backends + new

    return _change_backends(now, target, extended)


def remove_backends(now: Moment, target: str, names: object) -> Outcome:
    """Remove backends, as `ADDR`, `ADDR:PORT`, `dns:NAME:PORT` or `srv:NAME`, from a service."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RefusedError("malformed", "backends must be a list of addresses")

    def shortened(backends: Listed) -> Listed:
        leaving = [_backend(find(now.everything, target), backends, name) for name in names]
        return tuple(b for b in backends if b not in leaving)

    return _change_backends(now, target, shortened)


def remove(now: Moment, target: str) -> Outcome:
    """Remove a service."""
    service = now.own(target)
    rest = {name: other for name, other in now.stored.items() if name != service.name}
    return Outcome(rest, {service.name: "removed"})


def parse_services(specs: object, *, source: str = CLI) -> list[Service]:
    """The requested services, in time linear in their number. Raises RefusedError with the problems of all,
    or the first thousand."""
    if not isinstance(specs, list):
        raise RefusedError("malformed", "services must be a list")
    return _parse_all(specs, source)


def apply(now: Moment, wanted: Sequence[Service], prune: bool, unwanted: Collection[str] = ()) -> Outcome:
    """Store these services, all or none of them, and remove those with `unwanted` names; `prune`: and all
    others. The time is linear in the number of all services."""
    named = {service.name: service for service in wanted}
    if len(named) != len(wanted):
        raise RefusedError("invalid", "two of the services have the same name")
    gone = named.keys() | set(unwanted)
    kept = {} if prune else {name: s for name, s in now.stored.items() if name not in gone}
    others = {n: s for n, s in now.everything.items() if n in kept or s.origin.source != now.source}
    owners = {frontend: other for other in others.values() for frontend in other.frontends()}
    for service in wanted:
        if service.name in others:
            _owned(others[service.name], now.source)
        for frontend in service.frontends():
            _refuse_frontend(frontend, owners.setdefault(frontend, service), service, _describe_hint)
    others.update(named)
    _check_addresses(others, wanted)
    results: dict[str, Action] = {name: _compare(now.stored.get(name), s) for name, s in named.items()}
    results.update({name: "removed" for name in now.stored if name not in named and name not in kept})
    return Outcome({**kept, **named}, results)


def _change_backends(now: Moment, target: str, edit: Callable[[Listed], Listed]) -> Outcome:
    service = now.own(target)
    edited = with_listed(service, edit(listed(service)))
    # Parsed again, so that the checked text is what the store reads at the next start.
    parsed = _parse(spec_of(edited), now.source)
    if not backend_addresses(parsed) <= backend_addresses(service):
        _check_addresses(now.everything, [parsed])
    return _replaced(now, service, parsed)


def _replaced(now: Moment, before: Service | None, after: Service) -> Outcome:
    return Outcome({**now.stored, after.name: after}, {after.name: _compare(before, after)})


def _compare(before: Service | None, after: Service) -> Action:
    return "created" if before is None else "unchanged" if before == after else "changed"


def _parse(spec: object, source: str) -> Service:
    return _parse_all([spec], source)[0]


def _parse_all(specs: Iterable[object], source: str) -> list[Service]:
    """The services that these are; raises RefusedError with the problems of all."""
    services: list[Service] = []
    found: list[tuple[int, Problem]] = []
    number = -1
    for number, spec in enumerate(specs):
        if isinstance(spec, Mapping):
            spec = {key: value for key, value in spec.items() if value is not None}
        service, problems = parse_service(spec, Origin(source))
        found += [(number, problem) for problem in problems]
        if service is not None:
            services.append(service)
        if len(found) >= MAX_PROBLEMS:
            break
    if found or len(services) != number + 1:
        raise invalid([_placed(each, problem, number) for each, problem in found[:MAX_PROBLEMS]])
    return services


def _placed(number: int, problem: Problem, last: int) -> Problem:
    """A problem with the number of its service, if there are several."""
    place = f"services[{number}]." if last else ""
    return replace(problem, path=f"{place}{problem.path}".rstrip("."))


def invalid(found: Sequence[Problem]) -> RefusedError:
    """The problems of requested services. One problem is the whole message."""
    problems = [replace(problem, file="", line=0) for problem in found]
    if len(problems) != 1:
        return RefusedError("invalid", "the service is not valid", problems=problems)
    what = replace(problems[0], hint="")
    return RefusedError("invalid", str(what), "", problems[0].hint, problems)


def _backend(service: Service, backends: Listed, name: str) -> Backend | NamedBackend:
    try:
        wanted = parse_any_backend(name)
    except InvalidTextError as error:
        raise RefusedError("invalid", error.what, "", error.hint) from None
    found = named_by(service, backends, wanted)
    if len(found) == 1:
        return found[0]
    same = [str(backend) for backend in backends if host_of(backend) == host_of(wanted)]
    hint = f"did you mean {' or '.join(same)}?" if same else f"vipctl describe {service.name} shows them"
    number = "several backends" if found else "no backend"
    raise RefusedError("not-found", f"{service.name} has {number} {name}", "", hint)


def _owned(service: Service, source: str) -> Service:
    """The service, if it belongs to the source to be changed."""
    if service.origin.source != source:
        what = f"service {service.name} is not vipctl's to change"
        raise RefusedError("owned", what, _owner(service), _owner_hint(service))
    return service


def _owner_hint(service: Service) -> str:
    return _OWNER_HINTS.get(service.origin.source, "edit {0.path}, line {0.line}").format(service.origin)


def _has_any_address(service: Service, addresses: set[str]) -> bool:
    """False if none of these is an address of the service."""
    return bool(service.external_addresses) or not addresses.isdisjoint(service.addresses)


_OWNER_HINTS = {CLI: "leave --store out", "etcd": "vipctl --store etcd changes it on every host"}


def _owner(service: Service) -> str:
    return f"it is owned by {service.origin.owner}"


def _describe_hint(known: Service) -> str:
    return f"vipctl describe {known.name}"


def _check_frontends(
    snapshot: Services, service: Service, hint: Callable[[Service], str] = _describe_hint
) -> None:
    """Raises RefusedError if another service has a frontend of this one; `hint` describes the other."""
    claimed, addresses = set(service.frontends()), {address for address, _, _ in service.frontends()}
    for other in snapshot.values():
        # Most have no address in common, and need no further check; a port of the host is at "".
        if other.name == service.name or not ("" in addresses or _has_any_address(other, addresses)):
            continue
        for frontend in claimed.intersection(other.frontends()):
            _refuse_frontend(frontend, other, service, hint)


def _refuse_frontend(
    frontend: Frontend, owner: Service, service: Service, hint: Callable[[Service], str]
) -> None:
    if owner.name != service.name:
        what = f"{frontend} already belongs to {owner.name}"
        raise RefusedError("conflict", what, _owner(owner), hint(owner))


def _check_addresses(snapshot: Services, changed: Sequence[Service]) -> None:
    """Raises RefusedError if one of these services has a backend at the address of another, or its address is
    that of a backend of the same author: one of others is in nobody's way. Passes all others once."""
    uses: dict[AddressUse, Service] = {}
    for service in changed:
        for use in address_uses(service):
            _refuse_use(service, use, uses.get(use.opposite()))
            uses.setdefault(use, service)
    names = {service.name for service in changed}
    vips = {use.address for use in uses if not use.as_backend}
    backends = {use.address for use in uses if use.as_backend}
    for other in snapshot.values():
        if other.name in names:
            continue
        for address in backends.intersection(other.addresses):
            use = AddressUse(address, True)
            _refuse_use(uses[use], use, other)
        for backend in (*other.backends, *other.fallback):
            use = AddressUse(backend.address, False)
            if backend.address in vips and uses[use].origin.author == other.origin.author:
                _refuse_use(uses[use], use, other)


def _refuse_use(service: Service, use: AddressUse, other: Service | None) -> None:
    if other is not None:
        what, hint = address_use_problem(use, other.name, other)
        raise RefusedError("conflict", f"{service.name}: {what}", _owner(other), hint)
