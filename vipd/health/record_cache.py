"""Verdicts on targets that are not followed now: they were removed, or an earlier run checked them. Pure.

A verdict belongs to a whole check: probe, target and timing. Another check of the same backend may have
another result, so it inherits a verdict only if it replaces that check in the same service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import inf

from vipd.health.state import HealthRecord
from vipd.model.check import Probe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

MAX_AGE_SECONDS = 600.0
"""Older verdicts are not used."""

CHECKED_NOW = inf
"""The time of a verdict on a target that is followed."""

MOST_SERVICES = 100
"""Services kept for one target, by which others inherit from it; an equal check needs none."""

_MOST_FORGOTTEN_AT_ONCE = 5_000

ProbeAddress = tuple[str, int, str]
"""Address, port and type of check."""

Key = tuple[str, int, str, str]
"""A place, and the id of the whole check."""


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """Last known state of one target."""

    place: ProbeAddress
    check: str
    """`check_id`."""
    services: tuple[str, ...]
    """Services that had the target, or some of them."""
    at: float
    """As of when."""
    record: HealthRecord

    @property
    def key(self) -> Key:
        """Identifies it."""
        return (*self.place, self.check)

    @classmethod
    def of(cls, target: CheckTarget, services: Iterable[str], at: float, record: HealthRecord) -> SavedRecord:
        """The state of a target that these services have."""
        named = tuple(name for name, _ in zip(services, range(MOST_SERVICES), strict=False))
        return cls(probe_address(target), check_id(target), named, at, record)


def probe_address(target: CheckTarget) -> ProbeAddress:
    """Address, port and protocol of a target."""
    return target.address, target.port, target.kind


def check_id(target: CheckTarget) -> str:
    """The same for equal checks, also after a restart."""
    return _check_id(target.protocol, target.probe, target.timing, target.author)


@lru_cache(maxsize=4096)
def _check_id(protocol: Protocol, probe: Probe, timing: Timing, author: str) -> str:
    values = (str(protocol), probe, timing, *([author] if author else []))
    return blake2b(repr(values).encode(), digest_size=9).hexdigest()


class RecordCache:
    """Last states of targets that are not followed. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[Key, SavedRecord] = {}
        """The oldest first."""
        self._of: dict[tuple[str, str], set[Key]] = {}
        """By service and address."""

    def add(self, known: SavedRecord) -> None:
        """Add a verdict of an earlier run, or of a removed target."""
        self.drop(known.key)
        self._known[known.key] = known
        for service in known.services:
            self._of.setdefault((service, known.place[0]), set()).add(known.key)

    def take(
        self, target: CheckTarget, service: str, wanted: Collection[CheckTarget], now: float
    ) -> HealthRecord | None:
        """The initial state of a target that a service wants with others; None if no verdict applies.

        It is the state of an equal check, else that of the check which it replaces in this service.
        """
        same = self._fresh((*probe_address(target), check_id(target)), now)
        if same is not None:
            return same.record
        replaced = self._replaced(target, service, wanted, now)
        return replaced.record if replaced else None

    def _replaced(
        self, target: CheckTarget, service: str, wanted: Collection[CheckTarget], now: float
    ) -> SavedRecord | None:
        keys = self._of.get((service, target.address), ())
        found = [each for key in keys if (each := self._fresh(key, now))]
        if not found:
            return None
        others = {(*probe_address(t), check_id(t)) for t in wanted if t.address == target.address}
        found = [each for each in found if each.key not in others]
        same_port = [each for each in found if each.place[1] == target.port]
        heir_of = same_port or found
        return heir_of[0] if len(heir_of) == 1 else None

    def expire(self, now: float) -> list[Key]:
        """Drop what is too old, some of it if it is much; returns what."""
        dropped = list[Key]()
        for _ in range(_MOST_FORGOTTEN_AT_ONCE):
            oldest = next(iter(self._known.values()), None)
            if oldest is None or now - oldest.at <= MAX_AGE_SECONDS:
                break
            self.drop(oldest.key)
            dropped.append(oldest.key)
        return dropped

    def records(self) -> list[SavedRecord]:
        """All verdicts."""
        return list(self._known.values())

    def _fresh(self, key: Key, now: float) -> SavedRecord | None:
        found = self._known.get(key)
        return found if found is not None and now - found.at <= MAX_AGE_SECONDS else None

    def drop(self, key: Key) -> None:
        """Drop a verdict, if there is one: its target is followed."""
        known = self._known.pop(key, None)
        if known is None:
            return
        for service in known.services:
            keys = self._of.get((service, known.place[0]), set())
            keys.discard(key)
            if not keys:
                self._of.pop((service, known.place[0]), None)
