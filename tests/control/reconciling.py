"""A reconciler between a fake source and a fake dataplane, its loop at work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime

from tests.dataplane.fake_dataplane import FakeDataplane, FakeSurroundings
from tests.lab.simulated_time import simulate
from tests.model.samples import declared, service
from vipd.control.reconciler import Reconciler
from vipd.declaration.problems import Declaration
from vipd.declaration.unit import Unit
from vipd.host.observer import Observer
from vipd.model.service import Service

PATIENCE_SECONDS = 60.0
"""A step takes milliseconds; a machine that does much else may stand still for seconds."""

DNS, WEB = service("dns", "10.96.0.10"), service("web", "10.96.0.11")


class FakeSource:
    """A source of one unit; what is accepted of it is kept."""

    name = "fake"
    location = "nowhere"
    writes = False

    def __init__(self, dataplane: FakeDataplane, *services: Service) -> None:
        self._dataplane = dataplane
        self.candidate = declared(*services)
        self.kept = Declaration()
        self.unit = "fake"

    def units(self) -> Mapping[str, Unit]:
        """The unit."""
        return {self.unit: Unit(self.candidate, self.kept)}

    def faults(self) -> tuple[str, ...]:
        """Never any."""
        return ()

    def held(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

    def accept_removal(self) -> None:
        """Nothing is held."""

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Keep the version that serves, and tell the dataplane's diary."""
        self._dataplane.events.append("accepted")
        self.kept = chosen[self.unit]


class IsolatedReconciler:
    """A reconciler between a fake source and a fake dataplane."""

    def __init__(self, *services: Service) -> None:
        self.dataplane = FakeDataplane()
        self.source = FakeSource(self.dataplane, *services)
        self.host = FakeSurroundings()
        self.reconciler = Reconciler((self.source,), self.dataplane, self.host, lambda: datetime.now(UTC))

    def names(self) -> set[str]:
        """The services in the kernel."""
        return {key.service for key in self.dataplane.kernel}

    async def settled(self, wish: int) -> bool:
        """Whether the kernel is as wished, once a step has taken the wish up."""
        return await self.reconciler.wait_synced(wish, PATIENCE_SECONDS)

    async def fulfilled(self, wish: int) -> None:
        """Return once a wish has come true, after however many tries."""
        end = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while not await self.settled(wish):
            assert asyncio.get_running_loop().time() < end, self.reconciler.progress.fault
            await asyncio.sleep(0.005)


class Heartbeats(Observer):
    """Counts heartbeats."""

    def __init__(self) -> None:
        self.count = 0

    def heartbeat(self) -> None:
        """One more."""
        self.count += 1


Story = Callable[[IsolatedReconciler], Awaitable[None]]


def run_story(story: Story, *services: Service) -> IsolatedReconciler:
    """Run a story with the loop of the reconciler at work."""
    return asyncio.run(_lived(story, *services))


def run_story_simulated(story: Story, *services: Service) -> IsolatedReconciler:
    """The same in simulated time: every pause has its exact length, on any machine. Nothing may be done in
    threads."""
    return simulate(_lived(story, *services))


async def _lived(story: Story, *services: Service) -> IsolatedReconciler:
    isolated = IsolatedReconciler(*services)
    async with asyncio.timeout(2 * PATIENCE_SECONDS), looping(isolated):
        await story(isolated)
    return isolated


@contextlib.asynccontextmanager
async def looping(isolated: IsolatedReconciler) -> AsyncIterator[None]:
    """The loop as a task, which must not have ended by itself."""
    task = asyncio.create_task(isolated.reconciler.run())
    try:
        yield
        assert not task.done(), "the loop has ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
