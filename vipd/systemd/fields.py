"""The door to the journal's fields: `log.info("...", extra=fields(Event.SERVICE_ADDED, service="dns"))`.

Each becomes a field of the journal's entry, so that `journalctl VIPD_SERVICE=dns` finds what concerns one
service. Where there is no journal they are left out. A service's or backend's name stands in the text too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

ATTRIBUTE = "journal_fields"
"""Where a log record carries them."""

Fields = Mapping[str, tuple[str, ...]]
"""Values by the journal's name of the field; one field may have several."""


class Event(StrEnum):
    """What has happened: the value of VIPD_EVENT."""

    STARTED = "started"
    STOPPED = "stopped"
    START_FAILED = "start-failed"
    RELOADED = "reloaded"
    SERVICE_ADDED = "service-added"
    SERVICE_CHANGED = "service-changed"
    SERVICE_REMOVED = "service-removed"
    SERVICE_QUARANTINED = "service-quarantined"
    CHANGE_STORED = "change-stored"
    """A change by vipctl is on disk."""
    DECLARATION_REFUSED = "declaration-refused"
    DECLARATION_ACCEPTED = "declaration-accepted"
    """What was refused before is in order again."""
    SOURCE_FAILED = "source-failed"
    RULES_APPLIED = "rules-applied"
    RULES_REPAIRED = "rules-repaired"
    APPLY_FAILED = "apply-failed"
    FLOWS_ENDED = "flows-ended"


def fields(
    event: Event,
    *,
    service: str | Collection[str] = (),
    backend: str | Collection[str] = (),
    unit: str = "",
) -> dict[str, object]:
    """A log call's `extra`. `unit` is a file as `file:PATH`, or `cli`, as in a service's owner."""
    named: dict[str, tuple[str, ...]] = {
        "VIPD_EVENT": (event.value,),
        "VIPD_SERVICE": _several(service),
        "VIPD_BACKEND": _several(backend),
        "VIPD_UNIT": _several(unit),
    }
    return {ATTRIBUTE: {name: values for name, values in named.items() if values}}


def _several(given: str | Collection[str]) -> tuple[str, ...]:
    return tuple(given) if not isinstance(given, str) else (given,) if given else ()
