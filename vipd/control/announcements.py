"""Decides which addresses this host announces beyond itself now, and why not the others. Pure.

The input is all that counts: the forwardings in the kernel, maintenance of this host, what other hosts
announce, the time, and the result before. The result is one value. Drivers make a routing table, or the
answers to ARP, equal to it; views, events and metrics show it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from vipd.model.forwarding import Forwarding
from vipd.model.maintenance import Maintenance
from vipd.model.service import AnnounceMethod, TrafficPolicy


class AnnouncedKey(NamedTuple):
    """An address, and how it is announced. A service may announce by routes what another does by ARP."""

    address: str
    by: AnnounceMethod

    def __str__(self) -> str:
        return f"{self.address} by {self.by}"


class Reason(StrEnum):
    """Why an address is announced, or is not."""

    SERVED = "served"
    """A backend can serve."""
    NO_BACKEND = "no-backend"
    """No backend can serve, on any host."""
    NO_LOCAL_BACKEND = "no-local-backend"
    """No backend on this host can, and the traffic policy is local."""
    MAINTENANCE = "maintenance"
    """This host is in maintenance."""
    WITHDRAWING = "withdrawing"
    """No backend can serve, but not for long enough to withdraw it: announced."""
    RETURNING = "returning"
    """A backend can serve again, but not for long enough to announce it again; other hosts may serve it."""
    LAST_HOST = "last-host"
    """No backend can serve, but no other host announces it: announced."""


class Moment(NamedTuple):
    """A time, on the monotonic clock and as the time of day."""

    monotonic: float
    time: datetime


@dataclass(frozen=True, slots=True)
class Damping:
    """How long a change must last before it is announced."""

    withdraw_after: float = 3.0
    """Seconds without a backend."""
    return_after: float = 10.0
    """Seconds with one again, after a withdrawal for want of one."""


@dataclass(frozen=True, slots=True)
class AnnouncedAddress:
    """The decision about one address."""

    key: AnnouncedKey
    services: tuple[str, ...]
    """Services that ask for it, by name."""
    announced: bool
    reason: Reason
    since: datetime
    """When this host last began, or ceased, to announce it."""
    changed_at: float = 0.0
    """When `served` last changed, on the monotonic clock."""
    served: bool = False
    """Whether a backend can serve."""
    failed: bool = False
    """It was withdrawn because no backend could serve, and has not been announced since."""


@dataclass(frozen=True, slots=True)
class LanAddress:
    """Who answers for an address of a LAN, of those that this host could hold or not."""

    address: str
    holder: str
    """The host that answers for it; empty: none."""
    since: str
    """When that host got it."""
    here: bool
    """This host answers for it."""
    interface: str
    """Where; empty: this host is not on its LAN."""
    fault: str
    """Why this host cannot hold it, though it serves it; or who else answers for it."""


NOTHING: Mapping[AnnouncedKey, AnnouncedAddress] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Announcements:
    """The decisions about all addresses of this host."""

    addresses: Mapping[AnnouncedKey, AnnouncedAddress] = field(default_factory=lambda: NOTHING)
    due: float | None = None
    """When time alone changes a decision, on the monotonic clock; None: never."""

    def announced(self, by: AnnounceMethod) -> frozenset[str]:
        """The addresses to announce by one method."""
        return frozenset(k.address for k, found in self.addresses.items() if found.announced and k.by is by)

    def of_service(self, service: str) -> tuple[AnnouncedAddress, ...]:
        """The decisions about a service's addresses, by address."""
        return tuple(found for _, found in sorted(self.addresses.items()) if service in found.services)


@dataclass(frozen=True, slots=True)
class OtherHosts:
    """What the other hosts of the fleet announce, as last reported."""

    served: Collection[AnnouncedKey] = frozenset()
    """Addresses that another host announces, and has a backend for."""
    kept: Collection[AnnouncedKey] = frozenset()
    """Addresses that another host announces although no backend can serve."""


def decide(
    forwardings: Iterable[Forwarding],
    before: Announcements,
    now: Moment,
    *,
    damping: Damping,
    maintenance: Maintenance | None = None,
    others: OtherHosts | None = None,
) -> Announcements:
    """The decisions about every address that one of these forwardings asks to announce.

    An address is announced while any of its services has a backend that can serve it from this host.
    `others`: what other hosts announce, if the last host is to keep an address; None: no address is kept,
    because nobody knows the other hosts, or because the settings say so.
    """
    host = _Host(now, damping, maintenance, others)
    found = {
        key: _decide(key, asking, before.addresses.get(key), host)
        for key, asking in _by_key(forwardings).items()
    }
    due = [at for each in found.values() if (at := _due(each, damping)) is not None]
    return Announcements(found, min(due, default=None))


class _Host(NamedTuple):
    """What is the same for all addresses of one decision."""

    now: Moment
    damping: Damping
    maintenance: Maintenance | None
    others: OtherHosts | None


def _due(found: AnnouncedAddress, damping: Damping) -> float | None:
    """When time alone changes a decision."""
    lasts = {Reason.WITHDRAWING: damping.withdraw_after, Reason.RETURNING: damping.return_after}
    return found.changed_at + lasts[found.reason] if found.reason in lasts else None


def all_served(forwardings: Iterable[Forwarding]) -> bool:
    """Whether a backend can serve every address that one of these forwardings asks to announce."""
    return all(why_unserved(asking) is None for asking in _by_key(forwardings).values())


def adopted(addresses: Iterable[AnnouncedKey], now: Moment) -> Announcements:
    """The state before the first decision of a process: what an earlier one announced counts as served until
    now, so that a restart withdraws nothing at once."""
    return Announcements(
        {
            key: AnnouncedAddress(key, (), True, Reason.SERVED, now.time, now.monotonic, served=True)
            for key in addresses
        }
    )


def _by_key(forwardings: Iterable[Forwarding]) -> dict[AnnouncedKey, list[tuple[Forwarding, bool]]]:
    """For each announced address its forwardings, each with whether the address is one from outside."""
    found: dict[AnnouncedKey, list[tuple[Forwarding, bool]]] = {}
    for forwarding in forwardings:
        if forwarding.announcement is None:
            continue
        by = forwarding.announcement.by
        for external in forwarding.external_addresses:
            found.setdefault(AnnouncedKey(external.address, by), []).append((forwarding, True))
        for address in forwarding.addresses if forwarding.announcement.inside else ():
            found.setdefault(AnnouncedKey(address, by), []).append((forwarding, False))
    return found


def _decide(
    key: AnnouncedKey,
    asking: list[tuple[Forwarding, bool]],
    before: AnnouncedAddress | None,
    host: _Host,
) -> AnnouncedAddress:
    unserved = why_unserved(asking)
    served = unserved is None
    changed_at = before.changed_at if before and before.served is served else host.now.monotonic
    lasted = host.now.monotonic - changed_at
    failed = before is not None and before.failed
    was_announced = before is not None and before.announced
    announced, reason = True, Reason.SERVED
    if host.maintenance is not None:
        announced, reason = False, Reason.MAINTENANCE
    elif unserved is None:
        # Damping spares routers changes. Where nobody serves the clients, it would keep them waiting.
        served_elsewhere = host.others is None or key in host.others.served
        failed = failed and lasted < host.damping.return_after and served_elsewhere
        announced, reason = not failed, Reason.RETURNING if failed else Reason.SERVED
    elif was_announced and lasted < host.damping.withdraw_after:
        reason = Reason.WITHDRAWING
    elif _is_last(key, was_announced, failed, host.others):
        reason, failed = Reason.LAST_HOST, False
    else:
        announced, reason, failed = False, unserved, was_announced or failed
    services = tuple(sorted({forwarding.key.service for forwarding, _ in asking}))
    since = before.since if before and before.announced is announced else host.now.time
    return AnnouncedAddress(key, services, announced, reason, since, changed_at, served, failed)


def _is_last(key: AnnouncedKey, was_announced: bool, failed: bool, others: OtherHosts | None) -> bool:
    """Whether no other host would have the address if this one withdrew it.

    Hosts that fail at the same moment all keep it: each knows of the others only that they cannot serve. Two
    that withdrew it for each other take it back.
    """
    if others is None or key in others.served:
        return False
    return was_announced or (failed and key not in others.kept)


def why_unready(forwardings: Iterable[Forwarding], maintenance: Maintenance | None) -> str:
    """Why this host must not get flows to addresses from outside; empty if it can serve them."""
    if maintenance is not None:
        return f"this host is {maintenance}"
    unserved = why_unserved((forwarding, bool(forwarding.external_addresses)) for forwarding in forwardings)
    return WORDS[unserved] if unserved else ""


def why_unserved(asking: Iterable[tuple[Forwarding, bool]]) -> Reason | None:
    """None if a backend can serve an address, or could but for its `max_connections`; else why none can."""
    reason = Reason.NO_BACKEND
    for forwarding, external in asking:
        policy = forwarding.external_policy if external else forwarding.internal_policy
        # Withdrawing it would break the very flows that fill its backends.
        if forwarding.endpoints_under(policy) or policy in forwarding.full_under:
            return None
        if policy is TrafficPolicy.LOCAL and forwarding.has_endpoints:
            reason = Reason.NO_LOCAL_BACKEND
    return reason


def describe(found: AnnouncedAddress, maintenance: Maintenance | None = None) -> str:
    """Why it is announced or not, as the end of a sentence."""
    if found.reason is Reason.MAINTENANCE and maintenance is not None and maintenance.reason:
        return f"{WORDS[found.reason]} ({maintenance.reason})"
    return WORDS[found.reason]


WORDS = {
    Reason.SERVED: "a backend can serve",
    Reason.NO_BACKEND: "no backend can serve",
    Reason.NO_LOCAL_BACKEND: "no backend on this host can serve, and the traffic policy is local",
    Reason.MAINTENANCE: "this host is in maintenance",
    Reason.WITHDRAWING: "no backend can serve; it is withdrawn soon",
    Reason.RETURNING: "a backend can serve again; it is announced soon",
    Reason.LAST_HOST: "no backend can serve, but no other host announces it",
}
