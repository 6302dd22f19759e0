"""The page's server beside a real reconciler whose kernel, checks and flow counts are played."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

from aiohttp import ClientSession

from tests.control.reconciling import FakeSource
from tests.dataplane.fake_dataplane import FakeDataplane, FakeSurroundings
from tests.model.samples import declared
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.reconciler import Reconciler, ReconcilerDependencies
from vipd.dataplane.counting import BackendKey as BackendPlace
from vipd.host.supervisor import Supervisor
from vipd.model.backend_status import BackendStatus, BackendStatuses
from vipd.model.flow_limits import Limit
from vipd.model.service import Service
from vipd.observe.events.recorder import Recorder
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import ConntrackTable
from vipd.observe.listeners import ListenAddress
from vipd.observe.metrics.flows import FlowReading
from vipd.observe.page.page_state import PageSources, PageState
from vipd.observe.page.server import StatusPage

PATIENCE_SECONDS = 60.0

ABOUT = {"host": "lb1", "version": "1.2.3", "started": "2026-01-01T00:00:00Z"}


class BackendStatusSource(BackendStatusTracker):
    """Says how backends stand, as a test tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.stood: dict[str, dict[str, BackendStatus]] = {}

    def stand(self, service: str, backend: str, standing: BackendStatus | None) -> None:
        """From now on a backend stands like this; None: as declared."""
        of_service = self.stood.setdefault(service, {})
        of_service.pop(backend, None)
        if standing is not None:
            of_service[backend] = standing
        self._dirty.add(service)

    def follow(self, changes: Mapping[str, Service | None]) -> None:
        """All are known."""

    def backend_statuses(self, service: Service) -> BackendStatuses:
        """As told."""
        return dict(self.stood.get(service.name, {}))


PAGE = "keeping the status page"


class Watched:
    """A reconciler, and the page over it on a port of loopback."""

    def __init__(self, services: Sequence[Service], recorder: Recorder | None = None) -> None:
        self.dataplane, self.judges = FakeDataplane(), BackendStatusSource()
        self.source = FakeSource(self.dataplane, *services)
        foreign_chains = FakeSurroundings()
        self.reconciler = Reconciler(
            (self.source,),
            self.dataplane,
            foreign_chains,
            lambda: datetime.now(UTC),
            ReconcilerDependencies(self.judges),
        )
        self.totals, self.warnings, self.counted = FlowTotals(), list[str](), 0
        self.refused: dict[str, dict[Limit, int]] = {}
        """Flows over each limit of services."""
        self.table = ConntrackTable(4200, 262144, accounting=False)
        facts = PageSources(
            self.reconciler,
            self.dataplane,
            (self.source,),
            ABOUT,
            lambda: self.warnings,
            recorder,
            self.read_flows,
        )
        self.board = PageState(facts)
        self.place = free_place()
        self.at: Callable[[], datetime] = lambda: datetime.now(UTC)
        """When the counts were read."""
        self.page = StatusPage(self.board, self.place, {"lb1"})
        self.tasks: list[asyncio.Task[None]] = []

    async def die(self) -> None:
        """The page's port is closed, as when vipd ends."""
        task = self.tasks.pop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def live_again(self) -> None:
        """As when vipd starts again."""
        self.tasks.append(asyncio.create_task(self.page.listener.run()))
        await until(lambda: self.page.listener.open)

    @property
    def url(self) -> str:
        """The page's."""
        return f"http://{self.place}/"

    async def read_flows(self) -> FlowReading:
        """The counts as they are played."""
        self.counted += 1
        return FlowReading(self.at(), self.totals, self.table, refused=deepcopy(self.refused))

    def flow(self, service: str, *numbers: int) -> None:
        """New flows to the first backends of a service's first forwarding."""
        forwarding = self.reconciler.forwardings[service][0]
        places = (BackendPlace(forwarding.key, e.address, e.port) for e in forwarding.reachable())
        self.totals.add(dict(zip(places, numbers, strict=False)))

    async def declare(self, services: Collection[Service]) -> None:
        """Other services from now on."""
        self.source.candidate = declared(*services)
        await self.step()

    async def step(self) -> None:
        """Return once the reconciler has taken up whatever is new."""
        await self.reconciler.wait_synced(self.reconciler.request_sync(), PATIENCE_SECONDS)

    async def get(self, path: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and body of a GET."""
        async with ClientSession() as session, session.get(self.url + path, headers=headers) as response:
            return response.status, dict(response.headers), await response.text()

    async def state(self, after: str = "") -> dict[str, Any]:
        """The answer to /state."""
        async with ClientSession() as session, session.get(f"{self.url}state?after={after}") as response:
            assert response.status == 200
            found: dict[str, Any] = await response.json()
            return found


@contextlib.asynccontextmanager
async def watched(services: Sequence[Service], recorder: Recorder | None = None) -> AsyncIterator[Watched]:
    """All its loops at work, the port open."""
    isolated = Watched(services, recorder)
    page = Supervisor().run(PAGE, isolated.board.run)
    runs = (isolated.reconciler.run(), page, isolated.page.listener.run())
    tasks = isolated.tasks = [asyncio.create_task(run) for run in runs]
    try:
        await isolated.step()
        await until(lambda: isolated.page.listener.open)
        yield isolated
        assert not any(task.done() for task in tasks), "a loop has ended by itself"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def free_place() -> ListenAddress:
    """A TCP port that nobody has, at an address of loopback that is this process's alone: no other one takes
    the port before it is used."""
    number = os.getpid()
    address = f"127.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
    with socket.socket() as probe:
        probe.bind((address, 0))
        return ListenAddress(address, probe.getsockname()[1])


async def until(condition: Callable[[], object]) -> None:
    """Return once a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)
