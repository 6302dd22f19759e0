"""Fields of log records for the journal: `log.info("...", extra=fields(Event.SERVICE_ADDED, service="dns"))`.

Each becomes a field of the journal's entry, so that `journalctl VIPD_SERVICE=dns` finds the entries about one
service. Without a journal they are dropped. A service's or backend's name is in the text too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import StrEnum

ATTRIBUTE = "journal_fields"
"""Attribute of a log record that contains them."""

Fields = Mapping[str, tuple[str, ...]]
"""Values by the journal's name of the field; one field may have several."""


class Event(StrEnum):
    """Kind of event: the value of VIPD_EVENT."""

    STARTED = "started"
    STOPPED = "stopped"
    START_FAILED = "start-failed"
    RELOADED = "reloaded"
    SERVICE_ADDED = "service-added"
    SERVICE_CHANGED = "service-changed"
    SERVICE_REMOVED = "service-removed"
    SERVICES_LOADED = "services-loaded"
    """The first step after a start is done: all services at once."""
    SERVICES_CHANGED = "services-changed"
    """Many were added, changed or removed in one step."""
    SERVICE_QUARANTINED = "service-quarantined"
    SERVICE_READMITTED = "service-readmitted"
    """The kernel takes the rules of a service that was quarantined."""
    FLOWS_REFUSED = "flows-refused"
    """A service refused new flows over its limits; at most once in ten minutes."""
    BACKEND_FULL = "backend-full"
    """A backend gets no new flows, because it has its `max_connections`; at most once in ten minutes for a
    service."""
    BACKEND_HEALTH = "backend-health"
    """Checks changed the health of a backend."""
    NAME_CHANGED = "name-changed"
    """The answer for a DNS name adds or removes backends."""
    NAME_FAILED = "name-failed"
    """A DNS name has no answer; its last good one serves."""
    NAME_RECOVERED = "name-recovered"
    NAME_HELD = "name-held"
    """An answer lacks most backends of a name; their removal waits."""
    OVERRIDE_GIVEN = "override-given"
    OVERRIDE_TAKEN_BACK = "override-taken-back"
    OVERRIDE_ENDED = "override-ended"
    """Its time, or that of its pins, was over."""
    MAINTENANCE_BEGUN = "maintenance-begun"
    """An operator takes this host out of service."""
    MAINTENANCE_ENDED = "maintenance-ended"
    ADDRESS_ANNOUNCED = "address-announced"
    """This host announces an address from now on."""
    ADDRESS_WITHDRAWN = "address-withdrawn"
    ADDRESS_TAKEN = "address-taken"
    """This host answers for an address of a LAN from now on."""
    ADDRESS_HANDED_OVER = "address-handed-over"
    """Another host answers for it from now on."""
    ADDRESS_RELEASED = "address-released"
    """No host answers for it: none is left that could."""
    ADDRESS_DUPLICATE = "address-duplicate"
    """Something that is no host of the fleet answers for it."""
    ADDRESS_KEPT = "address-kept"
    """No backend can serve an announced address, but no other host would have it."""
    CHANGE_STORED = "change-stored"
    """A change by vipctl is on disk."""
    CHANGE_CONFIRMED = "change-confirmed"
    """A change that would have been taken back stays."""
    CHANGE_TAKEN_BACK = "change-taken-back"
    """A change that was not confirmed, or not in time."""
    DECLARATION_REFUSED = "declaration-refused"
    DECLARATION_ACCEPTED = "declaration-accepted"
    """A refused declaration is accepted again."""
    SOURCE_FAILED = "source-failed"
    SOURCE_MENDED = "source-mended"
    RULES_APPLIED = "rules-applied"
    RULES_REPAIRED = "rules-repaired"
    DATAPLANE_CHANGED = "dataplane-changed"
    APPLY_FAILED = "apply-failed"
    APPLY_RECOVERED = "apply-recovered"
    FLOWS_ENDED = "flows-ended"
    TASK_FAILED = "task-failed"
    """A part of vipd fails: a background task, or one that belongs to no unit and no service. The cause is
    its name."""
    TASK_RECOVERED = "task-recovered"


_NAMESPACE = re.compile("etcd:.*?/(?:services|backends)/(?:[^/]*/)?")


def author_of(unit: str, cause: str) -> str:
    """Who is responsible for an event with these fields: a namespace in etcd, a file, or a user as
    `user root`; without a unit the cause alone."""
    if namespace := _NAMESPACE.match(unit):
        return namespace[0]
    return unit if unit.startswith("file:") else cause.partition(" (pid ")[0]


def fields(
    event: Event,
    *,
    service: str | Collection[str] = (),
    backend: str | Collection[str] = (),
    unit: str = "",
    cause: str = "",
    reason: str = "",
) -> dict[str, object]:
    """A log call's `extra`. `unit` is a file as `file:PATH`, or `cli`, as in a service's owner.

    `cause` is the origin of the event: its kind, and which, as `file PATH:LINE`, `user root (pid 812)`,
    `process iptables (pid 812)`, `check tcp`, `etcd revision 17`, `signal SIGHUP`, `kernel`, `time limit`.
    `reason` is one line of explanation, without the names in the other fields.
    """
    named: dict[str, tuple[str, ...]] = {
        "VIPD_EVENT": (event.value,),
        "VIPD_SERVICE": _several(service),
        "VIPD_BACKEND": _several(backend),
        "VIPD_UNIT": _several(unit),
        "VIPD_CAUSE": _several(cause),
        "VIPD_REASON": _several(reason),
    }
    return {ATTRIBUTE: {name: values for name, values in named.items() if values}}


def _several(given: str | Collection[str]) -> tuple[str, ...]:
    return tuple(given) if not isinstance(given, str) else (given,) if given else ()
