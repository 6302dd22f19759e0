"""Where the API saves changes of services: in this host's own file, or in etcd for the whole fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from vipd.declaration.operations import CLI, Outcome, RefusedError
from vipd.model.service import Service
from vipd.sources.history import ChangeNote, Entry, History
from vipd.sources.store import STORE_UNIT, StoreSource

if TYPE_CHECKING:
    from vipd.sources.etcd.store import EtcdStore

STORES = ("file", "etcd")


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of saving a change: where it is stored, and, if this host does not apply it, why."""

    location: str
    error: str = ""
    units: Sequence[str] = ()
    """Names of the units (the store, or etcd keys) that now contain the change."""


class Store(Protocol):
    """Stores the services that vipctl declares and changes."""

    @property
    def source(self) -> str:
        """The value of `origin.source` of its services."""

    @property
    def services(self) -> Mapping[str, Service]:
        """The stored services by name."""

    @property
    def location(self) -> str:
        """Where it keeps its services, as text for messages."""

    def check(self, outcome: Outcome) -> None:
        """Raises RefusedError for a change that this store cannot save."""

    async def prepare(self, outcome: Outcome) -> None:
        """Do what a large change needs before it can be saved, while others may change the store. Raises
        StoreError."""

    @property
    def write_lock(self) -> AbstractAsyncContextManager[object]:
        """The lock that the API holds from the decision on a change until the change is saved."""

    def require_confirmed(self) -> None:
        """Raises RefusedError while an earlier change waits for its confirmation."""

    async def save(self, outcome: Outcome, note: ChangeNote) -> SaveResult:
        """Save a change that was computed from the current `services`. Raises RefusedError or StoreError."""

    async def history(self) -> History:
        """The changes so far. Raises RefusedError."""

    async def changes_in(self, entry: Entry) -> Sequence[tuple[str, Service | None, Service | None]]:
        """The services of a change, each before and after it. Raises RefusedError or StoreError."""

    async def services_since(self, revision: int) -> Callable[[], Mapping[str, Service | None]]:
        """What the services that changed since a revision were at it; None: not there. To be called while
        `write_lock` is held. Both raise RefusedError or StoreError."""


@dataclass(frozen=True, slots=True)
class HostStore:
    """Stores services in the database of this host."""

    store: StoreSource
    source: str = CLI

    @property
    def services(self) -> Mapping[str, Service]:
        """The services in the database."""
        return self.store.services

    @property
    def location(self) -> str:
        """The path of the database."""
        return self.store.location

    def check(self, outcome: Outcome) -> None:
        """Does nothing: the database can hold every service."""

    async def prepare(self, outcome: Outcome) -> None:
        """Make the texts that are stored."""
        await asyncio.to_thread(self.store.format_ahead, outcome.stored.values())

    @property
    def write_lock(self) -> AbstractAsyncContextManager[object]:
        """Serializes changes, because a write waits for the disk."""
        return self.store.change_lock

    def require_confirmed(self) -> None:
        """Raises RefusedError while an earlier change waits for its confirmation: what it would be taken back
        to must not change meanwhile."""
        if waits := self.store.confirmation_view():
            what = f"revision {waits['revision']} waits for its confirmation until {waits['until']}"
            hint = "vipctl confirm keeps it, vipctl rollback takes it back"
            raise RefusedError("conflict", what, "until then nothing else can be changed", hint)

    async def save(self, outcome: Outcome, note: ChangeNote) -> SaveResult:
        """The change is on disk when this returns. If the caller is cancelled, the write still ends soon."""
        if outcome.changed:
            await asyncio.shield(asyncio.to_thread(self.store.save, outcome.stored, note))
            self.store.confirmation_changed.set()
        return SaveResult(self.location, units=(STORE_UNIT,))

    async def history(self) -> History:
        """The changes that the database holds."""
        return self.store.history

    async def changes_in(self, entry: Entry) -> Sequence[tuple[str, Service | None, Service | None]]:
        """Every service of a change, before and after it."""
        return await asyncio.to_thread(self.store.changes_in, entry)

    async def services_since(self, revision: int) -> Callable[[], Mapping[str, Service | None]]:
        """What the services that changed since a revision were at it; read when it is called."""
        return partial(self.store.services_at, revision)


@dataclass(frozen=True, slots=True)
class FleetStore:
    """Stores services in etcd. A change is stored when etcd has it; this host applies the change after it has
    received it from etcd."""

    store: EtcdStore
    source: str = "etcd"

    @property
    def services(self) -> Mapping[str, Service]:
        """The services in etcd, in the state that this host has received."""
        return self.store.services

    @property
    def location(self) -> str:
        """Where its services are in etcd."""
        return self.store.location

    def check(self, outcome: Outcome) -> None:
        """Raises RefusedError for a service without a name."""
        self.store.check(outcome)

    async def prepare(self, outcome: Outcome) -> None:
        """Does nothing."""

    @property
    def write_lock(self) -> AbstractAsyncContextManager[object]:
        """No lock: etcd rejects a write if the key has changed since the decision."""
        return nullcontext()

    def require_confirmed(self) -> None:
        """Does nothing: no change in etcd waits for a confirmation."""

    async def save(self, outcome: Outcome, note: ChangeNote) -> SaveResult:
        """The change is in etcd when this returns. Raises RefusedError, for example after a concurrent
        change."""
        written = await self.store.save(outcome, note)
        fault = await self.store.wait_observed(written) if written.revision else ""
        return SaveResult(written.location, fault, self.store.units(written))

    async def history(self) -> History:
        """The changes that vipctl made on any host, as far as etcd is not compacted."""
        return History(await self.store.history(), self.store.history_location, bounded=False)

    async def changes_in(self, entry: Entry) -> Sequence[tuple[str, Service | None, Service | None]]:
        """The services that a change names, before and after it."""
        return await self.store.changes_in(entry)

    async def services_since(self, revision: int) -> Callable[[], Mapping[str, Service | None]]:
        """What the keys that changed since a revision held at it, whoever changed them."""
        found = await self.store.services_since(revision)
        return lambda: found


def no_confirmation_error() -> RefusedError:
    """The error for a change in etcd that is to wait for a confirmation."""
    why = "every host follows etcd, and one that lost its way to etcd could take nothing back there"
    hint = "leave --confirm out; vipctl rollback goes back"
    return RefusedError("invalid", "a change in etcd cannot wait for a confirmation", why, hint)


def no_etcd_error() -> RefusedError:
    """The error for a request that needs etcd on a host that has none configured."""
    hint = "name its endpoints under etcd in /etc/vipd/vipd.yaml, and restart vipd"
    return RefusedError("invalid", "this host has no etcd", "", hint)
