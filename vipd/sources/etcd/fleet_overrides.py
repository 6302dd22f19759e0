"""Overrides for the whole fleet: keys in etcd, which every host reads beside its own overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from vipd.host.observer import Observer
from vipd.model.override import Override, OverrideKey, Overrides, expired, next_expiry
from vipd.sources.etcd.fleet_keys import merged_overrides, read_override


class FleetOverrides:
    """The overrides in etcd that have not expired by this host's clock."""

    def __init__(
        self,
        values: Callable[[], Mapping[str, str]],
        clock: Callable[[], datetime],
        observer: Observer | None = None,
    ) -> None:
        """`values` are those below `overrides/`, by the rest of their key. `observer` gets
        `overrides_changed`."""
        self._values, self._clock, self._observer = values, clock, observer or Observer()
        self._read: dict[str, tuple[str, Override | str]] = {}
        """Each value, and what it says: only what differs is read again."""
        self._stored: dict[OverrideKey, Override] = {}
        self._overrides: dict[OverrideKey, Override] = {}
        self._faults: tuple[str, ...] = ()

    @property
    def overrides(self) -> Overrides:
        """Every active override, in parts."""
        return self._overrides

    def faults(self) -> tuple[str, ...]:
        """Keys that cannot be read as overrides."""
        return self._faults

    def refresh(self) -> None:
        """Read the current keys of etcd."""
        values, before = self._values(), self._read
        if values.keys() != before.keys() or any(before[key][0] != values[key] for key in values):
            self._read = {
                key: before[key]
                if key in before and before[key][0] == value
                else (value, read_override(value))
                for key, value in values.items()
            }
            read = {key: order for key, (_, order) in self._read.items()}
            self._stored, self._faults = merged_overrides(read)
            self.expire_due()

    def next_expiry(self) -> datetime | None:
        """When an override next expires, or loses its pins."""
        return next_expiry(self._overrides)

    def expire_due(self) -> None:
        """End overrides that have expired; etcd deletes their keys by itself, sooner or later."""
        now = {**self._stored, **expired(self._stored, self._clock())}
        wanted = {key: order for key, order in now.items() if order is not None}
        before, self._overrides = self._overrides, wanted
        keys = before.keys() | wanted.keys()
        different = frozenset(key.target for key in keys if before.get(key) != wanted.get(key))
        if different:
            self._observer.overrides_changed(different)
