"""What this host announces, as JSON values for the API, the status page and the list of services. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vipd.control.announcements import AnnouncedAddress, Announcements, describe
from vipd.declaration.bounded_json import Json
from vipd.model.formatting import time_text
from vipd.model.maintenance import Maintenance, to_json


def announced_view(found: AnnouncedAddress, maintenance: Maintenance | None = None) -> Json:
    """An AnnouncedAddress of docs/api.md."""
    return {
        "address": found.key.address,
        "by": found.key.by.value,
        "services": list(found.services),
        "announced": found.announced,
        "reason": found.reason.value,
        "why": describe(found, maintenance),
        "since": time_text(found.since),
    }


def announcements_view(
    announcements: Announcements, maintenance: Maintenance | None, faults: Mapping[str, str]
) -> Json:
    """The answer to `GET /v1/announcements`."""
    addresses = [announced_view(found, maintenance) for _, found in sorted(announcements.addresses.items())]
    return {
        "maintenance": maintenance_view(maintenance),
        "addresses": addresses,
        "faults": dict(faults),
    }


def maintenance_view(maintenance: Maintenance | None) -> Json | None:
    """A Maintenance of docs/api.md; None: there is none."""
    return None if maintenance is None else dict(to_json(maintenance))
