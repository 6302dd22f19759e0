"""What the log says when services appear, change and disappear: a line each, or one line for a bulk."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields as parts_of

from vipd.model import Backend, Origin, Service
from vipd.systemd.fields import Event, fields

log = logging.getLogger(__name__)

LINES_AT_ONCE = 20
"""Above so many changes in one step the log tells their number alone."""
BACKENDS_NAMED = 8

Services = Mapping[str, Service]


def tell_changes(before: Services, after: Services, chosen: Collection[str]) -> None:
    """Log what differs; `chosen` names every service that may be new or different."""
    gone = [name for name in before if name not in after]
    new = [name for name in chosen if name not in before]
    changed = [name for name in chosen if name in before and before[name] != after[name]]
    if len(gone) + len(new) + len(changed) > LINES_AT_ONCE:
        log.info("services: %d added, %d changed, %d removed", len(new), len(changed), len(gone))
        return
    for name in new:
        _tell_added(after[name])
    for name in changed:
        _tell_changed(before[name], after[name])
    for name in gone:
        extra = fields(Event.SERVICE_REMOVED, service=name, unit=before[name].origin.owner)
        log.info("service %s removed; was by %s", name, _place(before[name].origin), extra=extra)


def _tell_added(service: Service) -> None:
    number = len(service.backends)
    told = f"{number} backend" if number == 1 else f"{number} backends"
    extra = fields(Event.SERVICE_ADDED, service=service.name, unit=service.origin.owner)
    log.info("service %s added: %s; by %s", service.name, told, _place(service.origin), extra=extra)


def _tell_changed(old: Service, new: Service) -> None:
    differing = [part.name for part in parts_of(new) if part.compare and _differs(old, new, part.name)]
    moves = dict(_moves(old.backends, new.backends))
    told = [name.replace("_", " ") for name in differing if name != "backends"]
    if "backends" in differing:
        told.append(_backends_text(moves) if moves else "order of backends")
    extra = fields(
        Event.SERVICE_CHANGED,
        service=new.name,
        backend=tuple(moves)[:BACKENDS_NAMED],
        unit=new.origin.owner,
    )
    log.info("service %s changed: %s; by %s", new.name, ", ".join(told), _place(new.origin), extra=extra)


def _differs(old: Service, new: Service, part: str) -> bool:
    before: object = getattr(old, part)
    after: object = getattr(new, part)
    return before != after


def _moves(old: tuple[Backend, ...], new: tuple[Backend, ...]) -> Iterator[tuple[str, str]]:
    """Each backend that came (`+`), went (`-`) or is declared otherwise (`~`)."""
    before, after = {str(b): b for b in old}, {str(b): b for b in new}
    yield from ((name, f"+{name}") for name in after.keys() - before.keys())
    yield from ((name, f"-{name}") for name in before.keys() - after.keys())
    yield from ((n, f"~{n}") for n in before.keys() & after.keys() if before[n] != after[n])


def _backends_text(moves: Mapping[str, str]) -> str:
    named = sorted(moves.values())
    more = len(named) - BACKENDS_NAMED
    return "backends " + " ".join(named[:BACKENDS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _place(origin: Origin) -> str:
    return f"file {origin}" if origin.source == "file" else str(origin)
