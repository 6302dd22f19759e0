"""The announcer decides on what the kernel has; what fails at one method or with etcd harms nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from tests.control.test_announcements import OUTSIDE, ROUTES, SERVED, UNSERVED
from vipd.control import announcer as announcing
from vipd.control.announcements import OtherHosts
from vipd.control.announcer import Announcer, Others, Reconciled
from vipd.control.progress import Progress
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.maintenance import Maintenance

VIP = OUTSIDE.address


class Driver:
    """Remembers what is announced; fails if told to."""

    def __init__(self, *before: str) -> None:
        self.addresses, self.fault = frozenset(before), ""

    async def read(self) -> frozenset[str]:
        if self.fault:
            raise OSError(5, self.fault)
        return self.addresses

    async def ensure(self, addresses: frozenset[str]) -> None:
        if self.fault:
            raise OSError(5, self.fault)
        self.addresses = addresses


class IsolatedAnnouncer:
    """An announcer, with what it sees."""

    def __init__(self, *before: str, others: Others | None = None) -> None:
        self.driver, self.progress = Driver(*before), Progress(applied=1, attempted=1, requested=1)
        self.asking: dict[ForwardingKey, Forwarding] = {}
        self.maintenance: Maintenance | None = None
        settings = Settings(announce_withdraw_after=0, announce_return_after=0)
        self.announcer = Announcer(
            settings,
            {ROUTES: self.driver},
            Reconciled(self.progress, self._asking),
            lambda: self.maintenance,
            others,
        )

    def _asking(self) -> Mapping[ForwardingKey, Forwarding]:
        return self.asking

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


def test_without_an_answer_of_etcd_an_address_is_withdrawn_as_without_etcd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcing, "OTHERS_TIMEOUT_SECONDS", 0.01)

    async def hangs() -> OtherHosts:
        await asyncio.sleep(60)
        return OtherHosts()

    async def nobody() -> OtherHosts:
        return OtherHosts()

    async def story() -> None:
        for others, expected in ((nobody, {VIP}), (hangs, frozenset()), (None, frozenset())):
            isolated = IsolatedAnnouncer(others=others)
            await isolated.stepped(SERVED)
            assert await isolated.stepped(UNSERVED) == expected
            assert bool(isolated.announcer.others_fault) is (others is hangs)
            assert await isolated.stepped(SERVED) == {VIP}
            assert isolated.announcer.others_fault == ""

    asyncio.run(story())
