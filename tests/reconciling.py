"""A reconciler between a fake source and a fake dataplane, its loop at work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime

from tests.fake_dataplane import FakeDataplane, FakeSurroundings
from tests.samples import declared, service
from vipd.catalog import Unit
from vipd.declaration.problems import Declaration
from vipd.model import Service
from vipd.reconciler import Reconciler

DNS, WEB = service("dns", "10.96.0.10"), service("web", "10.96.0.11")


class FakeSource:
    """A source of one unit; what is accepted of it is kept."""

    name = "fake"
    location = "nowhere"

    def __init__(self, dataplane: FakeDataplane, *services: Service) -> None:
        self._dataplane = dataplane
        self.candidate = declared(*services)
        self.kept = Declaration()

    def units(self) -> Mapping[str, Unit]:
        """The unit."""
        return {"fake": Unit(self.candidate, self.kept)}

    def faults(self) -> tuple[str, ...]:
        """Never any."""
        return ()

    def accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Keep the version that serves, and tell the dataplane's diary."""
        self._dataplane.events.append("accepted")
        self.kept = chosen["fake"]


class World:
    """A reconciler between a fake source and a fake dataplane."""

    def __init__(self, *services: Service) -> None:
        self.dataplane = FakeDataplane()
        self.source = FakeSource(self.dataplane, *services)
        self.host = FakeSurroundings()
        self.reconciler = Reconciler((self.source,), self.dataplane, self.host, lambda: datetime.now(UTC))

    def names(self) -> set[str]:
        """The services in the kernel."""
        return {key.service for key in self.dataplane.kernel}

    async def fulfilled(self, wish: int) -> None:
        """Return once a wish has come true, after however many tries."""
        for _ in range(400):
            if await self.reconciler.settled(wish, 5):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"not fulfilled: {self.reconciler.progress.fault}")


def lived(story: Callable[[World], Awaitable[None]], *services: Service) -> World:
    """Run a story with the loop of the reconciler at work."""

    async def run() -> World:
        world = World(*services)
        async with looping(world):
            await story(world)
        return world

    return asyncio.run(asyncio.wait_for(run(), 20))


@contextlib.asynccontextmanager
async def looping(world: World) -> AsyncIterator[None]:
    """The loop as a task, which must not have ended by itself."""
    task = asyncio.create_task(world.reconciler.run())
    try:
        yield
        assert not task.done(), "the loop has ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
