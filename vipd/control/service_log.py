"""Logs that services appear, change and disappear: a line each, or one line for a bulk."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields as parts_of
from types import MappingProxyType

from vipd.host.systemd.fields import Event, fields
from vipd.model.check_target import check_targets
from vipd.model.formatting import counted
from vipd.model.service import Backend, NamedBackend, Origin, Service

log = logging.getLogger(__name__)

LINES_AT_ONCE = 20
"""Above so many changes in one step the log has their number alone."""
NAMES_IN_BULK = 100
CAUSES_IN_BULK = 3
BACKENDS_NAMED = 8

MOST_CAUSES = 3
"""Maximum number of requesters of one service's change between two steps that are named."""

Services = Mapping[str, Service]
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Causes:
    """The requesters of changes of services that no step has begun with yet. Noted when a change arrives, for
    the line that is logged when it takes effect."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[str, ...]] = {}

    def note(self, services: Iterable[str], cause: str) -> None:
        """These services are about to change because of this: `user root (pid 812)`, `etcd revision 17`."""
        for name in services:
            known = self._noted.get(name, ())
            if cause not in known and len(known) < MOST_CAUSES:
                self._noted[name] = (*known, cause)

    def of(self, service: str) -> str:
        """The last requester that is noted for a service, without the process; empty: none is."""
        return self._noted.get(service, ("",))[-1].partition(" (pid ")[0]

    def take(self, later: Collection[str] = ()) -> Mapping[str, str]:
        """The cause of each change noted since the last call, by service; those of services that take effect
        later stay."""
        noted, self._noted = self._noted, {n: c for n, c in self._noted.items() if n in later}
        return {name: ", ".join(causes) for name, causes in noted.items()}


_FALLBACK = ("refusal", "fallback", "named_fallback", "keeps_unhealthy")
"""The parts of a service that its key `fallback` sets."""


def log_changes(
    before: Services, after: Services, chosen: Collection[str], causes: Mapping[str, str] = _NOTHING
) -> None:
    """Log the differences; `chosen` names every service that may be new or changed.

    `causes` has the requester of a change, by service; the others were changed in their declaration.
    """
    gone = [name for name in before if name not in after]
    new = [name for name in chosen if name not in before]
    changed = [name for name in chosen if name in before and before[name] != after[name]]
    if len(gone) + len(new) + len(changed) > LINES_AT_ONCE:
        places = {name: _place((after.get(name) or before[name]).origin) for name in (*new, *changed, *gone)}
        _log_bulk((len(new), len(changed), len(gone)), {**places, **_only(causes, places)})
        return
    for name in new:
        _log_added(after[name], causes.get(name))
    for name in changed:
        _log_changed(before[name], after[name], causes.get(name))
    for name in gone:
        _log_removed(before[name], causes.get(name))


def _log_bulk(numbers: tuple[int, int, int], causes: Mapping[str, str]) -> None:
    names = tuple(causes)[:NAMES_IN_BULK]
    several = list(dict.fromkeys(cause.rpartition(":")[0] or cause for cause in causes.values()))
    more = len(several) - CAUSES_IN_BULK
    cause = ", ".join(several[:CAUSES_IN_BULK]) + (f" and {more} more" if more > 0 else "")
    what = "{} added, {} changed, {} removed".format(*numbers)
    extra = fields(Event.SERVICES_CHANGED, service=names, cause=cause, reason=what)
    log.info("services: %s", what, extra=extra)


def _log_added(service: Service, asked: str | None) -> None:
    told = counted(len(service.backends), "backend")
    if service.named_backends:
        told += f", {counted(len(service.named_backends), 'name')}"
    if unchecked := len({str(backend) for backend in service.backends} - check_targets(service).keys()):
        told += f", {unchecked} unchecked"
    cause, unit = asked or _place(service.origin), service.origin.owner
    extra = fields(Event.SERVICE_ADDED, service=service.name, unit=unit, cause=cause, reason=told)
    log.info("service %s added: %s; by %s", service.name, told, cause, extra=extra)


def _log_changed(old: Service, new: Service, asked: str | None) -> None:
    differing = [part.name for part in parts_of(new) if part.compare and _differs(old, new, part.name)]
    moves = dict(_moves(old.backends, new.backends))
    told = [_words(name) for name in differing if name not in ("backends", "named_backends")]
    if "named_backends" in differing:
        told.append(_backends_text(dict(_moves(old.named_backends, new.named_backends)), "names"))
    if "backends" in differing:
        told.append(_backends_text(moves) if moves else "order of backends")
    cause, what = asked or _place(new.origin), ", ".join(dict.fromkeys(told))
    extra = fields(
        Event.SERVICE_CHANGED,
        service=new.name,
        backend=tuple(moves)[:BACKENDS_NAMED],
        unit=new.origin.owner,
        cause=cause,
        reason=what,
    )
    log.info("service %s changed: %s; by %s", new.name, what, cause, extra=extra)


def _words(part: str) -> str:
    """A part of a service as its log names it."""
    return "fallback" if part in _FALLBACK else part.replace("_", " ")


def _log_removed(service: Service, asked: str | None) -> None:
    name, was = service.name, service.origin
    cause = asked or f"{was.source} {was.path}".rstrip()  # its old line number may now hold another service
    reason = f"was by {_place(was)}"
    extra = fields(Event.SERVICE_REMOVED, service=name, unit=was.owner, cause=cause, reason=reason)
    log.info("service %s removed; %s%s", name, reason, f"; by {asked}" if asked else "", extra=extra)


def _only(causes: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: causes[name] for name in names if name in causes}


def _differs(old: Service, new: Service, part: str) -> bool:
    before: object = getattr(old, part)
    after: object = getattr(new, part)
    return before != after


def _moves(
    old: Sequence[Backend | NamedBackend], new: Sequence[Backend | NamedBackend]
) -> Iterator[tuple[str, str]]:
    """Each backend that was added (`+`), removed (`-`) or changed (`~`)."""
    before, after = {str(b): b for b in old}, {str(b): b for b in new}
    yield from ((name, f"+{name}") for name in after.keys() - before.keys())
    yield from ((name, f"-{name}") for name in before.keys() - after.keys())
    yield from ((n, f"~{n}") for n in before.keys() & after.keys() if before[n] != after[n])


def _backends_text(moves: Mapping[str, str], kind: str = "backends") -> str:
    named = sorted(moves.values())
    more = len(named) - BACKENDS_NAMED
    return f"{kind} " + " ".join(named[:BACKENDS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _place(origin: Origin) -> str:
    return f"{origin.source} {origin}" if origin.path else str(origin)
