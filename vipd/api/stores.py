"""Where a change of services is kept: this host's own store, or etcd for the whole fleet."""

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
class Saved:
    """What became of a change: where it is, and why this host does not follow it, if so."""

    place: str
    fault: str = ""
    units: Sequence[str] = ()
    """Units that say now what was stored."""


class Store(Protocol):
    """Keeps services that vipctl changes."""

    @property
    def source(self) -> str:
        """What its services' origins name as their source."""

    @property
    def services(self) -> Mapping[str, Service]:
        """What is stored, by name."""

    @property
    def place(self) -> str:
        """Where it is, for people."""

    def check(self, outcome: Outcome) -> None:
        """Raises RefusedError for what this store cannot keep."""

    @property
    def turn(self) -> AbstractAsyncContextManager[object]:
        """Held from the decision on a change until it is saved."""

    async def save(self, outcome: Outcome) -> Saved:
        """Keep a change that was decided on `services` as they are now. Raises RefusedError or StoreError."""


@dataclass(frozen=True, slots=True)
class HostStore:
    """The file of this host."""

    store: StoreSource
    source: str = CLI

    @property
    def services(self) -> Mapping[str, Service]:
        """What is on disk."""
        return self.store.services

    @property
    def place(self) -> str:
        """The file."""
        return self.store.location

    def check(self, outcome: Outcome) -> None:
        """Every service fits."""

    @property
    def turn(self) -> AbstractAsyncContextManager[object]:
        """One change after the other: writing waits for the disk."""
        return self.store.turn

    async def save(self, outcome: Outcome) -> Saved:
        """On disk when this returns, or when it is cancelled: then soon."""
        if outcome.changed:
            await asyncio.shield(asyncio.to_thread(self.store.save, outcome.stored))
        return Saved(self.place, units=(UNIT,))


@dataclass(frozen=True, slots=True)
class FleetStore:
    """etcd. A change is stored when etcd has it, and followed when it has come back to this host."""

    store: EtcdStore
    source: str = "etcd"

    @property
    def services(self) -> Mapping[str, Service]:
        """What etcd says, as this host knows it."""
        return self.store.services

    @property
    def place(self) -> str:
        """Where its services are."""
        return self.store.place

    def check(self, outcome: Outcome) -> None:
        """Raises RefusedError for a service without a name."""
        self.store.check(outcome)

    @property
    def turn(self) -> AbstractAsyncContextManager[object]:
        """No turns: etcd refuses what was decided on another state of a key."""
        return nullcontext()

    async def save(self, outcome: Outcome) -> Saved:
        """In etcd when this returns, or refused, as when somebody else was faster."""
        written = await self.store.save(outcome)
        fault = await self.store.wait_followed(written) if written.revision else ""
        return Saved(written.place, fault, self.store.units(written))


def without_etcd() -> RefusedError:
    """What is said where etcd would be needed."""
    hint = "name its endpoints under etcd in /etc/vipd/vipd.yaml, and restart vipd"
    return RefusedError("invalid", "this host has no etcd", "", hint)
