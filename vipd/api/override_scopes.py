"""Storage of operators' overrides: on this host, or in etcd for the whole fleet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from vipd.model.override import Override, Overrides, OverrideTarget
from vipd.sources.overrides import OverrideStore

if TYPE_CHECKING:
    from vipd.control.fleet_member import FleetMember
    from vipd.sources.etcd.store import WriteResult


class OverrideScope(Protocol):
    """The overrides of this host, or those of the fleet."""

    @property
    def name(self) -> Literal["host", "fleet"]:
        """The hosts that they apply to."""

    @property
    def overrides(self) -> Overrides:
        """Every active override, in parts."""

    async def put(self, override: Override) -> str:
        """Store an override; returns why this host does not follow it, if so. Raises RefusedError or
        StoreError."""

    async def clear(self, targets: Collection[OverrideTarget]) -> str:
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

    async def put(self, override: Override) -> str:
        """On disk when this returns."""
        await self.store.put(override)
        return ""

    async def clear(self, targets: Collection[OverrideTarget]) -> str:
        """Like `put`."""
        await self.store.clear(*targets)
        return ""


@dataclass(frozen=True, slots=True)
class FleetScope:
    """Overrides for every host."""

    fleet: FleetMember
    name: Literal["host", "fleet"] = "fleet"

    @property
    def overrides(self) -> Overrides:
        """The overrides in etcd, as known to this host."""
        return self.fleet.overrides.overrides

    async def put(self, override: Override) -> str:
        """Stored in etcd when this returns."""
        return await self._wait_followed(await self.fleet.store.put_override(override))

    async def clear(self, targets: Collection[OverrideTarget]) -> str:
        """Like `put`."""
        return await self._wait_followed(await self.fleet.store.clear_overrides(targets))

    async def _wait_followed(self, written: WriteResult) -> str:
        fault = await self.fleet.store.wait_observed(written)
        self.fleet.overrides.refresh()
        return fault
