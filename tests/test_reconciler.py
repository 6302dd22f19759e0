from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime

import pytest

from tests.fake_dataplane import FakeDataplane, FakeSurroundings, broken_tool
from tests.samples import broken, declared, service
from vipd import reconciler as room
from vipd.catalog import Unit
from vipd.declaration.problems import Declaration
from vipd.model import Family, Service
from vipd.reconciler import Reconciler


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
        self.reconciler = Reconciler(
            (self.source,), self.dataplane, self.host, lambda: datetime.now(UTC)
        )

    def names(self) -> set[str]:
        """The services in the kernel."""
        return {key.service for key in self.dataplane.kernel}


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


DNS, WEB = service("dns", "10.96.0.10"), service("web", "10.96.0.11")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between tries."""
    monkeypatch.setattr(room, "FIRST_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(room, "LONGEST_RETRY_SECONDS", 0.08)


def test_a_wake_brings_what_is_declared_into_the_kernel() -> None:
    async def story(world: World) -> None:
        assert world.reconciler.progress.state == "starting"
        assert await world.reconciler.settled(world.reconciler.wake(), 5)
        assert world.names() == {"dns", "web"}
        assert world.reconciler.progress.state == "in-sync"
        assert world.reconciler.progress.last_apply is not None

    lived(story, DNS, WEB)


def test_the_accepted_versions_are_kept_before_the_kernel_is_written() -> None:
    async def story(world: World) -> None:
        await world.reconciler.settled(world.reconciler.wake(), 5)
        assert world.dataplane.events == ["accepted", "update", "plan", "apply"]

    lived(story, DNS)


def test_nothing_is_written_when_nothing_is_different() -> None:
    async def story(world: World) -> None:
        for _ in range(3):
            assert await world.reconciler.settled(world.reconciler.wake(), 5)
        assert world.dataplane.events.count("apply") == 1
        assert world.reconciler.progress.applies == 1

    lived(story, DNS)


def test_a_hundred_wakes_during_a_step_cost_one_more() -> None:
    async def story(world: World) -> None:
        world.dataplane.gate = asyncio.Event()
        wishes = [world.reconciler.wake()]
        await asyncio.sleep(0.02)
        assert world.dataplane.applying
        world.source.candidate = declared(DNS, WEB)
        wishes += [world.reconciler.wake() for _ in range(100)]
        assert world.reconciler.progress.state != "in-sync"
        world.dataplane.gate.set()
        assert all([await world.reconciler.settled(wish, 5) for wish in wishes])
        assert world.names() == {"dns", "web"}
        assert world.dataplane.events.count("plan") == 2

    lived(story, DNS)


def test_a_wish_made_during_a_step_is_not_settled_by_that_step() -> None:
    async def story(world: World) -> None:
        world.dataplane.gate = asyncio.Event()
        world.reconciler.wake()
        await asyncio.sleep(0.02)
        world.source.candidate = declared(WEB)
        waiting = asyncio.create_task(world.reconciler.settled(world.reconciler.wake(), 5))
        world.dataplane.gate.set()
        assert await waiting
        assert world.names() == {"web"}

    lived(story, DNS)


def test_settled_is_false_after_a_failure_and_after_the_time_is_up(quick: None) -> None:
    async def story(world: World) -> None:
        world.dataplane.gate = asyncio.Event()
        wish = world.reconciler.wake()
        began = time.monotonic()
        assert not await world.reconciler.settled(wish, 0.1)
        assert 0.09 < time.monotonic() - began < 1
        world.dataplane.failures = [broken_tool()]
        world.dataplane.gate.set()
        assert not await world.reconciler.settled(wish, 5)
        assert world.reconciler.progress.state == "failed"
        assert "it said no" in world.reconciler.progress.fault
        assert "look at its words" in world.reconciler.progress.fault

    lived(story, DNS)


def test_failures_are_tried_again_and_the_recovery_is_told(quick: None) -> None:
    async def story(world: World) -> None:
        world.dataplane.failures = [broken_tool() for _ in range(4)]
        wish = world.reconciler.wake()
        while world.reconciler.progress.done < wish:
            await asyncio.sleep(0.005)
        assert world.names() == {"dns"}
        assert world.reconciler.progress.state == "in-sync"
        assert world.reconciler.progress.failures == 4
        assert world.reconciler.progress.fault == ""

    lived(story, DNS)


def test_the_pauses_between_tries_grow_to_a_limit(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []

    async def story(world: World) -> None:
        world.dataplane.failures = [broken_tool() for _ in range(6)]
        applied = FakeDataplane.apply

        async def timed(self: FakeDataplane, plan: object) -> None:
            moments.append(time.monotonic())
            await applied(self, plan)  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(FakeDataplane, "apply", timed)
        wish = world.reconciler.wake()
        while world.reconciler.progress.done < wish:
            await asyncio.sleep(0.005)

    lived(story, DNS)
    pauses = [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]
    assert pauses[0] < pauses[1]
    assert pauses[0] < 0.06, "the first pause is the shortest"
    assert all(0.07 < pause < 0.5 for pause in pauses[3:]), pauses


def test_the_first_retry_comes_after_the_first_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FIRST_RETRY_SECONDS", 0.3)
    moments: list[float] = []

    async def story(world: World) -> None:
        world.dataplane.failures = [broken_tool()]
        wish = world.reconciler.wake()
        await world.reconciler.settled(wish, 5)
        moments.append(time.monotonic())
        while world.reconciler.progress.done < wish:
            await asyncio.sleep(0.005)
        moments.append(time.monotonic())

    lived(story, DNS)
    assert 0.25 < moments[1] - moments[0] < 0.55


def test_a_crash_in_a_step_is_a_failure_and_does_not_end_the_loop(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        world.dataplane.plan_failures = [ZeroDivisionError("oops")]
        wish = world.reconciler.wake()
        assert not await world.reconciler.settled(wish, 5)
        assert "ZeroDivisionError: oops" in world.reconciler.progress.fault
        while world.reconciler.progress.done < wish:
            await asyncio.sleep(0.005)
        assert world.names() == {"dns"}

    with caplog.at_level(logging.ERROR):
        lived(story, DNS)
    assert "Traceback" in caplog.text


def test_a_crash_before_the_plan_loses_no_change(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        taken = FakeDataplane.update
        crashes = [RuntimeError("oops")]

        def crashing(self: FakeDataplane, changes: Mapping[object, object]) -> None:
            if crashes:
                raise crashes.pop()
            taken(self, changes)  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(FakeDataplane, "update", crashing)
        wish = world.reconciler.wake()
        while world.reconciler.progress.done < wish:
            await asyncio.sleep(0.005)
        assert world.names() == {"dns"}, "in sync is told, but the service is not in the kernel"

    lived(story, DNS)


def test_only_changed_services_reach_the_dataplane(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    choose = room.choose

    def counted(service: Service, *rest: object) -> object:
        chosen.append(service.name)
        return choose(service, *rest)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(room, "choose", counted)

    async def story(world: World) -> None:
        many = [service(f"s{n}", f"10.97.0.{n}") for n in range(1, 200)]
        world.source.candidate = declared(*many)
        await world.reconciler.settled(world.reconciler.wake(), 5)
        chosen.clear()
        new = service("s7", "10.97.0.7", "", 1, "10.244.9.9")
        world.source.candidate = declared(*[new if s.name == "s7" else s for s in many if s.name != "s9"])
        await world.reconciler.settled(world.reconciler.wake(), 5)
        assert chosen == ["s7"]
        assert world.dataplane.updates[-1] == {"s7", "s9"}
        assert "s9" not in world.names()

    lived(story, DNS)


def test_a_reparsed_service_that_says_the_same_is_no_change() -> None:
    async def story(world: World) -> None:
        await world.reconciler.settled(world.reconciler.wake(), 5)
        world.source.candidate = declared(service("dns", "10.96.0.10"))
        await world.reconciler.settled(world.reconciler.wake(), 5)
        assert world.dataplane.updates[-1] == set()
        assert world.reconciler.progress.applies == 1

    lived(story, DNS)


def test_the_host_is_prepared_for_the_families_in_use_before_the_kernel_is_written() -> None:
    async def story(world: World) -> None:
        world.host.warnings = ("net.ipv6.conf.all.forwarding cannot be set",)
        await world.reconciler.settled(world.reconciler.wake(), 5)
        assert world.host.prepared == [{Family.IPV4, Family.IPV6}]
        assert world.reconciler.progress.warnings == world.host.warnings

    lived(story, DNS, service("six", "fd00::10", "", 1, "fd01::5"))


def test_a_host_that_cannot_be_read_is_a_failure_that_is_tried_again(quick: None) -> None:
    async def story(world: World) -> None:
        world.host.failures = [OSError(105, "No buffer space available")]
        wish = world.reconciler.wake()
        assert not await world.reconciler.settled(wish, 5)
        assert "No buffer space" in world.reconciler.progress.fault
        while world.reconciler.progress.done < wish:
            await asyncio.sleep(0.005)
        assert world.names() == {"dns"}

    lived(story, DNS)


def test_bad_input_leaves_the_kernel_as_it_is_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        await world.reconciler.settled(world.reconciler.wake(), 5)
        world.source.candidate = broken("/d/a.yaml")
        for _ in range(2):
            assert await world.reconciler.settled(world.reconciler.wake(), 5)
        assert world.names() == {"dns"}
        assert set(world.reconciler.problems) == {"fake"}

    with caplog.at_level(logging.ERROR):
        lived(story, DNS)
    assert caplog.text.count("it is wrong") == 1


def test_the_difference_is_shown_without_being_written() -> None:
    async def story(world: World) -> None:
        await world.reconciler.settled(world.reconciler.wake(), 5)
        assert await world.reconciler.difference() == ""
        world.dataplane.kernel = {}
        assert "dns" in await world.reconciler.difference()
        assert world.names() == set()
        assert await world.reconciler.settled(world.reconciler.wake(), 5)
        assert world.names() == {"dns"}

    lived(story, DNS)


def test_the_difference_waits_for_a_running_step() -> None:
    async def story(world: World) -> None:
        world.dataplane.gate = asyncio.Event()
        world.reconciler.wake()
        await asyncio.sleep(0.02)
        asked = asyncio.create_task(world.reconciler.difference())
        await asyncio.sleep(0.02)
        world.dataplane.gate.set()
        assert await asked == ""
        assert world.dataplane.misuse == []

    lived(story, DNS)


def test_cancelling_ends_the_loop_during_a_step() -> None:
    async def run() -> None:
        world = World(DNS)
        world.dataplane.gate = asyncio.Event()
        task = asyncio.create_task(world.reconciler.run())
        world.reconciler.wake()
        await asyncio.sleep(0.02)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        assert done, "cancelling must end the loop"

    asyncio.run(run())
