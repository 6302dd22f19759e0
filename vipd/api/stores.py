"""Storage of changes of services: this host's own store, or etcd for the whole fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vipd.declaration.operations import CLI, Outcome, RefusedError
from vipd.model.service import Service
from vipd.sources.store import UNIT, StoreSource

if TYPE_CHECKING:
    from vipd.sources.etcd.store import EtcdStore

STORES = ("file", "etcd")


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The outcome of a change: its location, and why this host does not follow it, if so."""

    location: str
    error: str = ""
    units: Sequence[str] = ()
    """Units that now contain the change."""


class Store(Protocol):
    """Stores services that vipctl changes."""

    @property
    def source(self) -> str:
        """The source in its services' origins."""

    @property
    def services(self) -> Mapping[str, Service]:
        """The stored services by name."""

    @property
    def location(self) -> str:
        """Its location, for people."""

    def check(self, outcome: Outcome) -> None:
        """Raises RefusedError for a change that this store cannot save."""

    @property
    def write_lock(self) -> AbstractAsyncContextManager[object]:
        """Held from the decision on a change until it is saved."""

    async def save(self, outcome: Outcome) -> SaveResult:
        """Save a change that was decided on the current `services`. Raises RefusedError or StoreError."""


@dataclass(frozen=True, slots=True)
class HostStore:
    """The file of this host."""

    store: StoreSource
    source: str = CLI

    @property
    def services(self) -> Mapping[str, Service]:
        """The services on disk."""
        return self.store.services

    @property
    def location(self) -> str:
        """The file."""
        return self.store.location

    def check(self, outcome: Outcome) -> None:
        """Every service fits."""

    @property
    def write_lock(self) -> AbstractAsyncContextManager[object]:
        """One change after the other: writing waits for the disk."""
        return self.store.change_lock

    async def save(self, outcome: Outcome) -> SaveResult:
        """On disk when this returns; if it is cancelled, soon after."""
        if outcome.changed:
            await asyncio.shield(asyncio.to_thread(self.store.save, outcome.stored))
        return SaveResult(self.location, units=(UNIT,))


@dataclass(frozen=True, slots=True)
class FleetStore:
    """etcd. A change is stored when etcd has it, and followed when this host has received it."""

    store: EtcdStore
    source: str = "etcd"

    @property
    def services(self) -> Mapping[str, Service]:
        """The services in etcd, as known to this host."""
        return self.store.services

    @property
    def location(self) -> str:
        """Location of its services."""
        return self.store.place

    def check(self, outcome: Outcome) -> None:
        """Raises RefusedError for a service without a name."""
        self.store.check(outcome)

    @property
    def write_lock(self) -> AbstractAsyncContextManager[object]:
        """No lock: etcd rejects a decision on another state of a key."""
        return nullcontext()

    async def save(self, outcome: Outcome) -> SaveResult:
        """In etcd when this returns, or refused, as after a concurrent change."""
        written = await self.store.save(outcome)
        fault = await self.store.wait_observed(written) if written.revision else ""
        return SaveResult(written.place, fault, self.store.units(written))


def no_etcd_error() -> RefusedError:
    """The error if etcd is required and not configured."""
    hint = "name its endpoints under etcd in /etc/vipd/vipd.yaml, and restart vipd"
    return RefusedError("invalid", "this host has no etcd", "", hint)
