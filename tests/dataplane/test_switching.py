"""A switch that fails, for whatever reason, leaves nothing of the new dataplane."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.dataplane.declared import numbered
from tests.dataplane.fake_dataplane import FakeDataplane, Rules, broken_tool
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.base import ApplyError, Dataplane, DataplaneName
from vipd.dataplane.counting import BackendKey, RefusedKey
from vipd.dataplane.forward_accept.accepts import AcceptPlan
from vipd.dataplane.forward_accept.driver import ForwardAccepts
from vipd.dataplane.switching import Ready, SwitchableDataplane, no_preparation
from vipd.host.host_changes import HostChanges
from vipd.host.process import run
from vipd.host.settings.settings import Settings
from vipd.model.service import Family


class FakeCounter:
    """Counts what a test adds to `flows`, or cannot be read."""

    seconds = 0.0
    flows = 0
    error: Exception | None = None

    async def take(self) -> dict[BackendKey, int]:
        """All since the last call."""
        if self.error:
            raise self.error
        taken, self.flows = self.flows, 0
        return {BackendKey(next(iter(rules())), "10.244.0.1", 80): taken}

    async def refused(self) -> dict[RefusedKey, int]:
        """No limits."""
        return {}

    async def collect_garbage(self) -> dict[BackendKey, int]:
        """Nothing is left."""
        return {}

    def saved_state(self) -> object:
        """Nothing."""

    def restore(self, memory: object) -> None:
        """Nothing."""


class Fake(FakeDataplane):
    """One that can be told to doubt, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = FakeCounter()

    def invalidate(self, chains: object) -> None:
        """Nothing is remembered here."""

    @property
    def counter(self) -> FakeCounter:
        """It is shown in tests of their own how dataplanes count."""
        return self.flows


class NoAccepts(ForwardAccepts):
    """On a host without any chain of others."""

    async def plan(self, dataplane: str, families: Collection[Family]) -> AcceptPlan:
        return AcceptPlan()


class Opening:
    """Two fake dataplanes with a kernel each."""

    prefix = "VIPD"

    def __init__(self) -> None:
        self.accepts: ForwardAccepts = NoAccepts(Settings(), HostChanges(Path("/none")), run)
        self.dataplanes = {"iptables": Fake(), "nftables": Fake()}
        self.remove_failures: list[Exception] = []

    async def open(self, name: DataplaneName) -> Dataplane:
        """That of the name."""
        return self.dataplanes[name]

    async def remove(self, name: DataplaneName, ready: Ready = no_preparation) -> bool:
        """Empty its kernel."""
        await asyncio.sleep(0)
        await ready()
        if self.remove_failures:
            raise self.remove_failures.pop(0)
        there = bool(self.dataplanes[name].kernel)
        self.dataplanes[name].kernel = {}
        return there


def rules() -> Rules:
    settings = Settings()
    policy = SelectionPolicy({family: settings.masquerade_for(family) for family in Family})
    return {f.key: f for f in select_backends(numbered(1, "10.244.0.1"), policy)}


async def started(opening: Opening) -> SwitchableDataplane:
    dataplane = await SwitchableDataplane.start("iptables", opening)
    dataplane.update(dict(rules()))
    await dataplane.apply(await dataplane.plan())
    await dataplane.collect_garbage()
    return dataplane


@pytest.mark.parametrize("error", [broken_tool(), RuntimeError("unexpected"), OSError(24, "no descriptors")])
def test_what_fails_half_way_is_removed(error: Exception) -> None:
    async def story() -> None:
        opening = Opening()
        dataplane, new = await started(opening), opening.dataplanes["nftables"]
        new.failures.append(error)
        new.kernel = rules()  # half a table
        with pytest.raises(type(error)):
            await dataplane.switch("nftables")
        assert dataplane.name == "iptables"
        assert new.kernel == {}
        assert opening.dataplanes["iptables"].kernel == rules()
        assert await dataplane.switch("nftables")
        assert opening.dataplanes["iptables"].kernel == {}

    asyncio.run(story())


def test_a_switch_that_is_cancelled_is_undone() -> None:
    async def story() -> None:
        opening = Opening()
        dataplane, new = await started(opening), opening.dataplanes["nftables"]
        new.kernel, new.gate = rules(), asyncio.Event()
        switching = asyncio.create_task(dataplane.switch("nftables"))
        await new.entered.wait()
        switching.cancel()
        await asyncio.sleep(0)
        switching.cancel()  # also while it is undone
        with pytest.raises(asyncio.CancelledError):
            await switching
        assert new.kernel == {}
        assert dataplane.name == "iptables"

    asyncio.run(story())


def test_an_end_of_the_counting_that_fails_is_undone_too() -> None:
    async def story() -> None:
        opening = Opening()
        dataplane = await started(opening)

        async def count() -> None:
            raise OSError("the counters cannot be read")

        with pytest.raises(OSError, match="counters"):
            await dataplane.switch("nftables", count)
        assert opening.dataplanes["nftables"].kernel == {}
        assert opening.dataplanes["iptables"].kernel == rules()

    asyncio.run(story())


def test_flows_that_both_have_counted_count_once() -> None:
    """The new rules count flows as soon as they are written; the old ones go on translating until then."""

    async def story() -> None:
        opening = Opening()
        dataplane = await started(opening)
        old, new = (opening.dataplanes[name].flows for name in ("iptables", "nftables"))
        taken = []

        async def count() -> None:
            new.flows += 1  # one that only the new rules have translated
            taken.append(await dataplane.counter.take())

        old.flows, new.flows = 5, 2
        await dataplane.switch("nftables", count)
        new.flows += 1
        taken.append(await dataplane.counter.take())
        assert [sum(flows.values()) for flows in taken] == [5, 2]

    asyncio.run(story())


def test_counts_that_cannot_be_read_do_not_stop_a_switch() -> None:
    async def story() -> None:
        opening = Opening()
        dataplane = await started(opening)
        opening.dataplanes["nftables"].flows.error = ApplyError("nft hangs", "it did nothing for 10 s")
        assert await dataplane.switch("nftables")

    asyncio.run(story())


def test_what_cannot_be_removed_at_once_is_told_and_swept() -> None:
    async def story() -> None:
        opening = Opening()
        dataplane, new = await started(opening), opening.dataplanes["nftables"]
        new.kernel = rules()
        new.failures.append(broken_tool())
        opening.remove_failures.append(ApplyError("nft hangs", "it did nothing for 10 s"))
        with pytest.raises(ApplyError, match="said no"):
            await dataplane.switch("nftables")
        assert "rules of the nftables dataplane are still there: nft hangs" in dataplane.warnings()[0]
        await dataplane.collect_garbage()
        assert new.kernel == {}
        assert dataplane.warnings() == ()

    asyncio.run(story())
