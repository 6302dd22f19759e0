"""The announcer decides on what the kernel has; what fails at one method or with etcd harms nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime

import pytest

from tests.control.test_announcements import OUTSIDE, ROUTES, SERVED, UNSERVED
from tests.lab.simulated_time import simulate
from vipd.control.announcements import OtherHosts
from vipd.control.announcer import Announcer, Others, Reconciled
from vipd.control.progress import Progress
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.maintenance import Maintenance
from vipd.model.service import Family

VIP = OUTSIDE.address


class Driver:
    """Remembers what is announced; fails if told to."""

    def __init__(self, *before: str) -> None:
        self.addresses, self.fault = frozenset(before), ""
        self.writes: list[tuple[float, frozenset[str]]] = []
        """Changes, with the time of each."""

    async def read(self) -> frozenset[str]:
        if self.fault:
            raise OSError(5, self.fault)
        return self.addresses

    async def ensure(self, addresses: frozenset[str]) -> None:
        if self.fault:
            raise OSError(5, self.fault)
        if addresses != self.addresses:
            self.writes.append((asyncio.get_running_loop().time(), addresses))
        self.addresses = addresses


class IsolatedAnnouncer:
    """An announcer, with what it sees."""

    def __init__(
        self, *before: str, others: Others | None = None, announce_withdraw_after: float = 0
    ) -> None:
        self.driver, self.progress = Driver(*before), Progress(applied=1, attempted=1, requested=1)
        self.asking: dict[ForwardingKey, Forwarding] = {}
        self.maintenance: Maintenance | None = None
        settings = Settings(announce_withdraw_after=announce_withdraw_after, announce_return_after=0)
        self.announcer = Announcer(
            settings,
            {ROUTES: self.driver},
            Reconciled(self.progress, self._asking),
            lambda: self.maintenance,
            others,
        )

    def _asking(self) -> Mapping[ForwardingKey, Forwarding]:
        return self.asking

    def loops(self) -> list[Callable[[], Coroutine[object, object, None]]]:
        """What runs beside a daemon."""
        return [self.announcer.run, self.announcer.follow_others]

    async def stepped(self, forwarding: Forwarding) -> frozenset[str]:
        """What is announced after a step that has written this."""
        self.asking = {forwarding.key: forwarding}
        self.announcer.take()
        await self.announcer.update()
        return self.driver.addresses


def test_a_step_that_failed_announces_nothing_new_and_withdraws_nothing() -> None:
    async def story() -> None:
        isolated = IsolatedAnnouncer()
        isolated.progress.fault = "no"
        assert await isolated.stepped(SERVED) == frozenset()
        isolated.progress.fault = ""
        assert await isolated.stepped(SERVED) == {VIP}
        isolated.progress.fault = "no"
        assert await isolated.stepped(UNSERVED) == {VIP}
        isolated.progress.fault = ""
        assert await isolated.stepped(UNSERVED) == frozenset()

    asyncio.run(story())


def test_the_family_that_is_written_is_announced_and_an_earlier_announcement_of_the_other_stays() -> None:
    async def story() -> None:
        isolated = IsolatedAnnouncer("2001:db8::10")
        isolated.progress.applied = 0
        isolated.progress.fault, isolated.progress.behind = "no ip6tables", frozenset({Family.IPV6})
        isolated.progress.begun = frozenset({Family.IPV4})
        assert await isolated.stepped(SERVED) == {VIP, "2001:db8::10"}
        assert await isolated.stepped(UNSERVED) == {"2001:db8::10"}
        isolated.progress.fault, isolated.progress.applied = "", 2
        assert await isolated.stepped(UNSERVED) == frozenset()

    asyncio.run(story())


def test_a_quarantined_service_stays_as_it_was() -> None:
    async def story() -> None:
        isolated = IsolatedAnnouncer()
        await isolated.stepped(SERVED)
        isolated.progress.quarantined = {"web": "the kernel says no"}
        assert await isolated.stepped(UNSERVED) == {VIP}
        fresh = IsolatedAnnouncer()
        fresh.progress.quarantined = {"web": "the kernel says no"}
        assert await fresh.stepped(SERVED) == frozenset()

    asyncio.run(story())


def test_before_the_first_step_only_maintenance_withdraws() -> None:
    async def story() -> None:
        isolated = IsolatedAnnouncer(VIP)
        isolated.progress.applied = 0
        await isolated.announcer.update()
        assert isolated.driver.addresses == {VIP}
        isolated.maintenance = Maintenance("root", datetime.now(UTC))
        await isolated.announcer.update()
        assert isolated.driver.addresses == frozenset()

    asyncio.run(story())


def test_a_table_that_cannot_be_written_is_a_fault_until_it_can() -> None:
    async def story() -> None:
        isolated = IsolatedAnnouncer()
        await isolated.stepped(SERVED)
        isolated.driver.fault = "the disk is gone"
        with pytest.raises(OSError, match="the disk is gone"):
            await isolated.stepped(UNSERVED)
        assert isolated.announcer.faults == {ROUTES: "the disk is gone"}
        isolated.driver.fault = ""
        assert await isolated.stepped(UNSERVED) == frozenset()
        assert isolated.announcer.faults == {}

    asyncio.run(story())


async def nobody() -> OtherHosts:
    return OtherHosts()


async def hangs() -> OtherHosts:
    await asyncio.sleep(3600)
    return OtherHosts()


async def slow() -> OtherHosts:
    await asyncio.sleep(2.5)
    return OtherHosts()


@pytest.mark.parametrize(
    ("others", "withdraw_after", "expected"),
    [
        (None, 3, [(3, set())]),
        (hangs, 3, [(3, set())]),
        (hangs, 0, [(1, set())]),
        (nobody, 3, []),
        (nobody, 0, []),
        (slow, 3, []),
        (slow, 0, [(1, set()), (2.5, {VIP})]),
    ],
)
def test_an_address_is_withdrawn_in_time_whether_etcd_answers_or_not(
    others: Others | None, withdraw_after: float, expected: list[tuple[float, set[str]]]
) -> None:
    """Simulated seconds after the last backend has gone, each with what is announced from then on; it is kept
    as soon as this host knows that no other one announces it."""

    async def story() -> list[tuple[float, set[str]]]:
        isolated = IsolatedAnnouncer(others=others, announce_withdraw_after=withdraw_after)
        clock = asyncio.get_running_loop().time
        loops = [asyncio.create_task(run()) for run in isolated.loops()]
        await isolated.stepped(SERVED)
        await asyncio.sleep(100)
        isolated.driver.writes.clear()
        began = clock()
        await isolated.stepped(UNSERVED)
        await asyncio.sleep(100)
        found = [(round(at - began, 1), set(addresses)) for at, addresses in isolated.driver.writes]
        assert bool(isolated.announcer.others_fault) is (others is hangs)
        await isolated.stepped(SERVED)
        await asyncio.sleep(100)
        assert isolated.driver.addresses == {VIP}
        assert isolated.announcer.others_fault == ""
        for loop in loops:
            loop.cancel()
        return found

    assert simulate(story()) == expected


def test_hosts_that_fail_together_do_not_withdraw_an_address_for_each_other() -> None:
    """Another host's report says that it serves until it has noticed the same fault, and reported that."""

    async def story() -> None:
        clock = asyncio.get_running_loop().time

        async def report() -> OtherHosts:
            return OtherHosts(served={OUTSIDE} if clock() - began < 2 else set())

        isolated = IsolatedAnnouncer(others=report, announce_withdraw_after=3)
        loops = [asyncio.create_task(run()) for run in isolated.loops()]
        began = clock()
        await isolated.stepped(SERVED)
        await isolated.stepped(UNSERVED)
        await asyncio.sleep(100)
        assert [set(addresses) for _, addresses in isolated.driver.writes] == [{VIP}]
        for loop in loops:
            loop.cancel()

    simulate(story())


def test_while_etcd_hangs_maintenance_withdraws_at_once() -> None:
    async def story() -> None:
        isolated = IsolatedAnnouncer(others=hangs)
        loops = [asyncio.create_task(run()) for run in isolated.loops()]
        await isolated.stepped(SERVED)
        await isolated.stepped(UNSERVED)
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
        isolated.maintenance = Maintenance("root", datetime.now(UTC))
        await isolated.announcer.update()
        assert isolated.driver.addresses == frozenset()
        assert asyncio.get_running_loop().time() == began
        for loop in loops:
            loop.cancel()

    simulate(story())
