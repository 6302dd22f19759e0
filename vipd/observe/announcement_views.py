"""What this host announces, as JSON values for the API, the status page and the list of services. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vipd.control.announcements import AnnouncedAddress, Announcements, LanAddress, describe
from vipd.declaration.bounded_json import Json
from vipd.model.formatting import time_text
from vipd.model.maintenance import Maintenance, to_json
from vipd.model.service import AnnounceMethod


def announced_view(
    found: AnnouncedAddress, maintenance: Maintenance | None = None, lan: LanAddress | None = None
) -> Json:
    """An AnnouncedAddress of docs/api.md. `lan`: who answers for one of a LAN."""
    view = _decided_view(found, maintenance)
    if lan is None or found.key.by is not AnnounceMethod.L2:
        return view
    answers = {
        "holder": lan.holder,
        "interface": lan.interface,
        "candidate": found.announced and not lan.fault,
    }
    if not found.announced:
        return {**view, **answers}
    since = lan.since or view["since"]
    return {**view, **answers, "announced": lan.here, "since": since, "why": _held(lan)}


def _held(lan: LanAddress) -> str:
    """Who answers for an address that this host could hold."""
    if lan.fault:
        return lan.fault
    if lan.here:
        return f"this host answers for it on {lan.interface}"
    return f"{lan.holder} answers for it" if lan.holder else "no host answers for it yet"


def _decided_view(found: AnnouncedAddress, maintenance: Maintenance | None) -> Json:
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
    announcements: Announcements,
    maintenance: Maintenance | None,
    faults: Mapping[str, str],
    lans: Mapping[str, LanAddress] = MappingProxyType({}),
) -> Json:
    """The answer to `GET /v1/announcements`."""
    addresses = [
        announced_view(found, maintenance, lans.get(key.address))
        for key, found in sorted(announcements.addresses.items())
    ]
    return {
        "maintenance": maintenance_view(maintenance),
        "addresses": addresses,
        "faults": dict(faults),
    }


def maintenance_view(maintenance: Maintenance | None) -> Json | None:
    """A Maintenance of docs/api.md; None: there is none."""
    return None if maintenance is None else dict(to_json(maintenance))
