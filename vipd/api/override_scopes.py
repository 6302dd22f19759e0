"""Storage of operators' overrides: on this host, or in etcd for the whole fleet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from vipd.model.override import Override, Overrides, Subject
from vipd.sources.override_store import OverrideStore

if TYPE_CHECKING:
    from vipd.control.fleet_member import Fleet
    from vipd.sources.etcd.store import Written


class OverrideScope(Protocol):
    """The overrides of this host, or those of the fleet."""

    @property
    def name(self) -> Literal["host", "fleet"]:
        """The hosts that they apply to."""

    @property
    def overrides(self) -> Overrides:
        """Every active override, in parts."""

    async def put(self, order: Override) -> str:
        """Store an override; returns why this host does not follow it, if so. Raises RefusedError or
        StoreError."""

    async def take_back(self, subjects: Collection[Subject]) -> str:
        """Clear the overrides of these targets. Like `put`."""


@dataclass(frozen=True, slots=True)
class HostScope:
    """Overrides for this host alone."""

    store: OverrideStore
    name: Literal["host", "fleet"] = "host"

    @property
    def overrides(self) -> Overrides:
        """Those on disk."""
        return self.store.overrides

    async def put(self, order: Override) -> str:
        """On disk when this returns; it never waits."""
        self.store.put(order)
        return ""

    async def take_back(self, subjects: Collection[Subject]) -> str:
        """Like `put`."""
        self.store.take_back(*subjects)
        return ""


@dataclass(frozen=True, slots=True)
class FleetScope:
    """Overrides for every host."""

    fleet: Fleet
    name: Literal["host", "fleet"] = "fleet"

    @property
    def overrides(self) -> Overrides:
        """The overrides in etcd, as known to this host."""
        return self.fleet.orders.overrides

    async def put(self, order: Override) -> str:
        """Stored in etcd when this returns."""
        return await self._wait_followed(await self.fleet.store.give(order))

    async def take_back(self, subjects: Collection[Subject]) -> str:
        """Like `put`."""
        return await self._wait_followed(await self.fleet.store.take_back(subjects))

    async def _wait_followed(self, written: Written) -> str:
        fault = await self.fleet.store.wait_followed(written)
        self.fleet.orders.refresh()
        return fault
