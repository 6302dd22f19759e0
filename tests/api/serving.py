"""The real API server on a UNIX socket, with the real sources and a fake dataplane beneath."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, UnixConnector, web
from aiohttp.typedefs import Handler
from yarl import URL

from tests.dataplane.fake_dataplane import FakeDataplane, FakeSurroundings
from tests.model.samples import HEAD
from vipd.api.context import ApiContext
from vipd.api.peers import Permission, bind_socket
from vipd.api.server import application
from vipd.api.socket_server import serving
from vipd.control.address_policy import AddressPolicy
from vipd.control.announcer import Announcer, Others, Reconciled
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.reconciler import Reconciler, ReconcilerDependencies
from vipd.health.checker import HealthChecker
from vipd.host.observer import Observers
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import AnnounceMethod
from vipd.sources.confirmation import Clocks
from vipd.sources.files import FileSource
from vipd.sources.maintenance_store import MaintenanceStore
from vipd.sources.override_store import OverrideStore
from vipd.sources.store import StoreSource

PATIENCE_SECONDS = 60.0

DNS: dict[str, object] = {
    "name": "kube-system/kube-dns",
    "address": ["10.96.0.10", "fd00:0:10::10"],
    "ports": ["53/udp"],
    "backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 2}, "fd01::5"],
}
WEB: dict[str, object] = {
    "name": "web",
    "address": "10.96.0.11",
    "ports": ["80/tcp"],
    "backends": ["10.244.0.7"],
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and decoded body."""

    status: int
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """The kind of error; empty when it is none."""
        return str(self.body.get("error", {}).get("kind", ""))


class FakeAnnouncements:
    """Remembers what is announced."""

    def __init__(self) -> None:
        self.addresses: frozenset[str] = frozenset()

    async def read(self) -> frozenset[str]:
        """What was announced last."""
        return self.addresses

    async def ensure(self, addresses: frozenset[str]) -> None:
        """Announce these."""
        self.addresses = addresses


@dataclass(slots=True)
class Api:
    """A served API in a directory of its own, and a client of it."""

    root: Path
    dataplane: FakeDataplane = field(default_factory=FakeDataplane)
    app: web.Application = field(init=False)
    session: ClientSession = field(init=False)
    files: FileSource = field(init=False)
    store: StoreSource = field(init=False)
    overrides: OverrideStore = field(init=False)
    maintenance: MaintenanceStore = field(init=False)
    announcer: Announcer = field(init=False)
    reconciler: Reconciler = field(init=False)
    claims: AddressPolicy = field(default_factory=AddressPolicy)
    """What services may claim."""
    clocks: Clocks = field(default_factory=Clocks)
    """Those of the store."""
    others: Others | None = None
    """Reads what other hosts announce."""
    begun: int = 0
    """Requests that the server has begun to answer."""

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.root / "vipd.sock"

    @property
    def services_dir(self) -> Path:
        """The files' directory."""
        return self.root / "services.d"

    @property
    def store_path(self) -> Path:
        """The store's file."""
        return self.root / "services.yaml"

    def wire(self) -> None:
        """Make the objects, as the daemon does."""
        self.services_dir.mkdir(exist_ok=True)
        self.files = FileSource(self.services_dir, self.root / "accepted")
        self.files.scan()
        self.store = StoreSource(self.store_path, self.clocks)
        self.store.load()
        sources = (self.files, self.store)
        observers = Observers()
        self.overrides = OverrideStore(self.root / "overrides.json", lambda: datetime.now(UTC), observers)
        self.overrides.load()
        fitness = BackendStatusTracker((self.overrides,), HealthChecker(), time.monotonic)
        observers.add(fitness)
        self.reconciler = Reconciler(
            sources,
            self.dataplane,
            FakeSurroundings(allowed=self.claims),
            lambda: datetime.now(UTC),
            ReconcilerDependencies(fitness),
        )
        self.maintenance = MaintenanceStore(
            self.root / "maintenance.json", lambda: datetime.now(UTC), observers
        )
        self.maintenance.load()
        self.announcer = Announcer(
            Settings(),
            {AnnounceMethod.ROUTES: FakeAnnouncements()},
            Reconciled(self.reconciler.progress, self._asking),
            lambda: self.maintenance.current,
            self.others,
        )

    def _asking(self) -> dict[ForwardingKey, Forwarding]:
        """The forwardings that ask for an announcement, as `Host.announcing`."""
        found = (f for each in self.reconciler.forwardings.values() for f in each)
        return {forwarding.key: forwarding for forwarding in found if forwarding.announcement}

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once a condition holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.01)

    async def rescan(self) -> None:
        """Read the sources anew."""
        await asyncio.to_thread(self.files.scan)
        self.store.reload()

    def declare(self, name: str, *blocks: str) -> None:
        """Write a file of declarations."""
        (self.services_dir / name).write_text(HEAD + "".join(blocks))

    def stored(self) -> set[str]:
        """What is on disk: the names that a restarted store would read."""
        store = StoreSource(self.store_path)
        store.load()
        assert store.faults() == (), "the store's own file must always be a good declaration"
        return set(store.services)

    async def ask(self, method: str, path: str, body: object = None, data: bytes | None = None) -> Answer:
        """One request; `path` is sent as it stands."""
        sent = {"data": data} if data is not None else {} if body is None else {"json": body}
        url = URL(f"http://vipd{path}", encoded=True)
        async with self.session.request(method, url, **sent) as response:
            assert response.content_type == "application/json", await response.text()
            answer = Answer(response.status, await response.json())
        assert answer.body["apiVersion"] == "vipd/v1"
        assert ("error" in answer.body) == (answer.status != 200)
        return answer

    async def add(self, spec: object) -> Answer:
        """POST /v1/services."""
        return await self.ask("POST", "/v1/services", {"service": spec})


@contextlib.asynccontextmanager
async def _served(api: Api, permission: Permission) -> AsyncIterator[None]:
    about = {
        "version": "0",
        "pid": 1,
        "started": "2026-01-01T00:00:00Z",
        "settings": {"chain_prefix": "VIPD"},
    }
    sources = (api.files, api.store)
    served = ApiContext(
        api.reconciler,
        api.dataplane,
        sources,
        api.store,
        api.overrides,
        api.rescan,
        about,
        address_policy=lambda: api.claims,
        maintenance=api.maintenance,
        announcer=api.announcer,
    )

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        api.begun += 1
        return await handler(request)

    app = api.app = application(served, permission)
    app.middlewares.append(note)
    loop = asyncio.create_task(api.reconciler.run())
    try:
        async with serving(app, bind_socket(api.socket, "no-such-group")):
            await api.reconciler.wait_synced(api.reconciler.request_sync(), PATIENCE_SECONDS)
            async with ClientSession(connector=UnixConnector(str(api.socket))) as api.session:
                yield
    finally:
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop


def served(story: Callable[[Api], Awaitable[None]], prepare: Callable[[Api], None] | None = None) -> None:
    """Run a story beside a served API; `prepare` may lay out files before it starts."""

    async def run(root: Path) -> None:
        api = Api(root)
        api.services_dir.mkdir()
        if prepare:
            prepare(api)
        api.wire()
        async with _served(api, Permission("no-such-group")):
            await story(api)

    # Not the test's own directory: a socket's path must be shorter than 108 bytes.
    with tempfile.TemporaryDirectory(prefix="vipd-api-") as directory:
        asyncio.run(asyncio.wait_for(run(Path(directory)), 2 * PATIENCE_SECONDS))
