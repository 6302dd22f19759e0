"""One host's orders as its API gives, lists and takes them back: real routes and stores, over a disk that can
be full and an etcd that can be away. Time goes on as the test says."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from json import loads
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from aiohttp import web

from vipd.api.override_routes import OverrideRoutes
from vipd.api.peers import Peer, Permission
from vipd.control.backend_status_tracker import BackendStatusTracker, HealthSource
from vipd.control.fleet_member import FleetMember
from vipd.control.progress import Progress
from vipd.control.reconciler import Reconciler
from vipd.declaration.operations import RefusedError
from vipd.host import durable
from vipd.host.observer import Observers
from vipd.model.backend_status import BackendStatuses
from vipd.model.service import Service
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import UnreachableError
from vipd.sources.etcd.fleet_overrides import FleetOverrides
from vipd.sources.etcd.messages import Delete, ModRevisionEquals, Put
from vipd.sources.etcd.source import EtcdSource
from vipd.sources.etcd.store import EtcdStore
from vipd.sources.override_store import OverrideStore
from vipd.sources.store import StoreError

START = datetime(2026, 1, 1, tzinfo=UTC)
PREFIX = "/vipd/v1/"
BELOW = f"{PREFIX}overrides/"
Json = dict[str, Any]


class Etcd:
    """Keys with leases, and what this host knows of them: all, or while etcd is away what it knew then."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self.kvs: dict[str, tuple[str, int, int]] = {}
        """Value, revision and lease."""
        self.leases: dict[int, datetime] = {}
        """When each ends."""
        self.revision = 1
        self.away = False
        self.seen: dict[str, tuple[str, int, int]] = {}

    async def grant_lease(self, seconds: int) -> int:
        self._answer()
        self.leases[len(self.leases) + 1] = self._clock() + timedelta(seconds=seconds)
        return len(self.leases)

    async def revoke_lease(self, lease: int) -> None:
        self._answer()
        self._expire(lease)

    async def txn(self, conditions: Sequence[ModRevisionEquals], then: Sequence[Put | Delete]) -> int:
        self._answer()
        for condition in conditions:
            if self.kvs.get(condition.key.decode(), ("", 0, 0))[1] != condition.mod_revision:
                return 0
        self.revision += 1
        for step in then:
            if isinstance(step, Put):
                self.kvs[step.key.decode()] = (step.value.decode(), self.revision, step.lease)
            else:
                self.kvs.pop(step.keys.start.decode(), None)
        self.hear()
        return self.revision

    def end_leases(self) -> None:
        """The keys of leases whose time is over go."""
        for lease, until in self.leases.items():
            if until <= self._clock():
                self._expire(lease)

    def _expire(self, lease: int) -> None:
        self.revision += 1
        self.kvs = {key: kv for key, kv in self.kvs.items() if kv[2] != lease}

    def hear(self) -> None:
        """This host learns of what there is, if etcd answers."""
        if not self.away:
            self.seen = dict(self.kvs)

    @property
    def overrides(self) -> Mapping[str, str]:
        return {key.removeprefix(BELOW): kv[0] for key, kv in self.seen.items()}

    @property
    def last_change(self) -> int:
        return self.revision

    def mod_revision(self, key: str) -> int:
        return self.seen.get(key, ("", 0, 0))[1]

    def state(self) -> object:
        return SimpleNamespace(held=())

    def faults(self) -> tuple[str, ...]:
        return ()

    def _answer(self) -> None:
        if self.away:
            raise UnreachableError({})


class Anybody(Permission):
    """Lets everybody change everything."""

    def peer(self, transport: object) -> Peer:
        return Peer(1, 0, 0)


class Request:
    """What the handlers read of a request."""

    transport = None

    def __init__(self, query: Mapping[str, str]) -> None:
        self.query = query


class IsolatedOverrides:
    """The parts of a daemon that have to do with orders, over what survives it."""

    def __init__(self, directory: Path) -> None:
        self.now, self.full, self.etcd = START, False, Etcd(lambda: self.now)
        self.path = directory / "overrides.json"
        self.services: dict[str, Service] = {}
        self.configured = True
        """Whether the settings name an etcd; counts from the next start on."""
        self._loop = asyncio.new_event_loop()
        self._disk = patch("vipd.sources.override_store.write_durably", self._write)
        self._disk.start()
        self.start()

    def close(self) -> None:
        """Let go of what it holds."""
        self._disk.stop()
        self._loop.close()

    def start(self) -> None:
        """A daemon starts, on what an earlier one left."""
        self.observers = observers = Observers()
        self.store = OverrideStore(self.path, lambda: self.now, observers)
        self.store.load()
        self.orders: FleetOverrides | None = None
        fleet: FleetMember | None = None
        if self.configured:
            etcd = cast(EtcdSource, self.etcd)
            self.orders = FleetOverrides(lambda: self.etcd.overrides, lambda: self.now, observers)
            stored = EtcdStore(cast(EtcdClient, self.etcd), etcd, PREFIX, lambda: self.now)
            fleet = cast(FleetMember, SimpleNamespace(overrides=self.orders, store=stored, name="h1"))
            self.orders.refresh()
        override_sources = (self.store, *((self.orders,) if self.orders else ()))
        self.fitness = BackendStatusTracker(
            override_sources, cast(HealthSource, SimpleNamespace(follow=_ignore)), lambda: 0.0
        )
        observers.add(self.fitness)
        reconciler = SimpleNamespace(
            services=self.services, clock=lambda: self.now, progress=Progress(applied=1)
        )
        self._routes = OverrideRoutes(
            cast(Reconciler, reconciler), self.store, Anybody("nobody"), _settled, fleet
        )
        self.declare(self.services.values())

    def declare(self, services: Iterable[Service]) -> None:
        """These are the services now."""
        before = dict(self.services)
        self.services.clear()
        self.services.update({service.name: service for service in services})
        self.fitness.follow(dict.fromkeys(before) | self.services)

    def hear(self) -> None:
        """What etcd says now is taken over, if it answers."""
        self.etcd.hear()
        if self.orders:
            self.orders.refresh()

    def pass_time(self, seconds: float) -> None:
        """Time passes, and the daemon's loops see it."""
        self.now += timedelta(seconds=seconds)
        self.store.expire_due()
        if self.orders:
            self.orders.expire_due()
        self.save()

    def save(self) -> None:
        """The daemon tries to bring to disk what has ended."""
        try:
            self.store.save_expired()
        except StoreError:
            assert self.full

    def listed(self) -> list[Json]:
        """`GET /v1/overrides`."""
        return list(self._answer(self._routes.list_overrides, {})["overrides"])

    def give(self, body: Json, fleet: bool) -> Json:
        """`POST /v1/overrides`. Raises RefusedError and StoreError."""
        return self._answer(self._routes.create_override, {"fleet": "1"} if fleet else {}, body)

    def resume(self, body: Json, fleet: bool) -> Json:
        """`DELETE /v1/overrides`. Raises as `give` does."""
        return self._answer(self._routes.clear_overrides, {"fleet": "1"} if fleet else {}, body)

    def backend_statuses(self, service: Service) -> BackendStatuses:
        """How its backends stand."""
        return self.fitness.backend_statuses(service)

    def _answer(self, handler: Any, query: Mapping[str, str], *body: Json) -> Json:
        response = self._loop.run_until_complete(handler(cast(web.Request, Request(query)), *body))
        return cast(Json, loads(response.body))

    def _write(self, path: Path, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        durable.write_atomically(path, data)


def _ignore(*_: object) -> None:
    """There are no checks."""


async def _settled(_: object, changed: bool) -> tuple[bool, str]:
    return True, ""


REFUSALS = (RefusedError, StoreError)
