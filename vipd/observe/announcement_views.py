"""What this host announces, as JSON values for the API, the status page and the list of services. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vipd.control.announcements import AnnouncedAddress, Announcements, LanAddress, Reason, describe
from vipd.declaration.bounded_json import Json
from vipd.model.formatting import time_text
from vipd.model.maintenance import Maintenance, to_json
from vipd.model.service import AnnounceMethod

MAX_SHOWN = 100
"""Addresses in the status."""
MAX_NAMED = 10
"""Addresses in a warning."""


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


def views_by_service(
    announcements: Announcements,
    maintenance: Maintenance | None,
    lans: Mapping[str, LanAddress] = MappingProxyType({}),
) -> dict[str, list[Json]]:
    """The AnnouncedAddresses of each service that has any."""
    found: dict[str, list[Json]] = {}
    for key, each in sorted(announcements.addresses.items()):
        view = announced_view(each, maintenance, lans.get(key.address))
        for service in each.services:
            found.setdefault(service, []).append(view)
    return found


def summary_view(
    announcements: Announcements,
    maintenance: Maintenance | None,
    faults: Mapping[str, str],
    lans: Mapping[str, LanAddress] = MappingProxyType({}),
) -> Json:
    """The part of the Status of docs/api.md: numbers, and the first addresses."""
    addresses = [found for _, found in sorted(announcements.addresses.items())]
    shown = [announced_view(each, maintenance, lans.get(each.key.address)) for each in addresses]
    return {
        "maintenance": maintenance_view(maintenance),
        "routes": sum(found.key.by is AnnounceMethod.ROUTES for found in addresses),
        "l2": sum(found.key.by is AnnounceMethod.L2 for found in addresses),
        "announced": sum(view["announced"] is True for view in shown),
        "addresses": [*shown[:MAX_SHOWN]],
        "faults": dict(faults),
    }


def announcement_notes(announcements: Announcements) -> dict[str, str]:
    """For each address that is to be announced, whether this host does, for an explanation."""
    notes: dict[str, str] = {}
    for key, found in announcements.addresses.items():
        how = f"announced by {key.by}" if found.announced else f"not announced by {key.by}: {describe(found)}"
        notes[key.address] = "; ".join(filter(None, (notes.get(key.address), f"{key.address} is {how}")))
    return notes


def announcement_warnings(announcements: Announcements, others_fault: str) -> list[str]:
    """What an operator must know: addresses that this host keeps without a backend, and what is unknown."""
    kept = [str(found.key) for found in announcements.addresses.values() if found.reason is Reason.LAST_HOST]
    more = f" and {len(kept) - MAX_NAMED} more" if len(kept) > MAX_NAMED else ""
    found = []
    if kept:
        found.append(
            f"announced although no backend can serve: {', '.join(kept[:MAX_NAMED])}{more}; no other host "
            "announces it; hint: vipctl host status; announce_last: withdraw in vipd.yaml"
        )
    return [*found, *([others_fault] if others_fault else [])]


def maintenance_view(maintenance: Maintenance | None) -> Json | None:
    """A Maintenance of docs/api.md; None: there is none."""
    return None if maintenance is None else dict(to_json(maintenance))
