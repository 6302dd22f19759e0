"""The report of a host in a real etcd: there while it runs, again when lost, gone when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from random import Random

import pytest

from tests.sources.etcd.members import Cluster, cluster
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.supervisor import Loop, Supervisor
from vipd.sources.etcd import heartbeat as beacon
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError
from vipd.sources.etcd.heartbeat import HostHeartbeat, HostReport
from vipd.sources.etcd.messages import Delete, KeyRange, KeyValue

KEY = b"/vipd/v1/hosts/n1"
REPORT = HostReport("n1", 7, 0, "0.1.0")
TTL_SECONDS = 6
"""Renewed every two seconds: a busy machine may be late by four."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("beacon")) as made:
        yield made


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken back at the end is taken back however busy the machine is."""
    monkeypatch.setattr(beacon, "CLOSE_TIMEOUT_SECONDS", 30.0)


class BeatingHost:
    def __init__(self, etcd: Cluster) -> None:
        self.client = EtcdClient(EtcdSettings(etcd.urls, timeout=30.0), Random(1))
        self.report = REPORT
        self.beacon = HostHeartbeat(
            self.client,
            "/vipd/v1/",
            lambda: self.report,
            lambda: datetime(2030, 1, 2, tzinfo=UTC),
            TTL_SECONDS,
            0.05,
        )

    async def until(self, true: Callable[[KeyValue | None], object]) -> KeyValue | None:
        async with asyncio.timeout(90):
            while True:
                found = await self.client.get(KEY)
                if true(found):
                    return found
                await asyncio.sleep(0.02)

    async def renewed(self, lease: int) -> None:
        """Return once a lease has more time left than a moment ago; fail when it runs out."""
        async with asyncio.timeout(90):
            _, before = await self.client.lease_times(lease)
            while True:
                granted, left = await self.client.lease_times(lease)
                assert granted, "it has run out"
                if left > before:
                    return
                before = left
                await asyncio.sleep(0.05)


@asynccontextmanager
async def at_work(etcd: Cluster) -> AsyncIterator[BeatingHost]:
    host = BeatingHost(etcd)
    loop = Loop(host.beacon.run, host.beacon.loop_state)
    task = asyncio.create_task(Supervisor((EtcdError,)).run("reporting", loop))
    try:
        yield host
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await host.beacon.close()
        assert await host.client.get(KEY) is None, "it is taken back"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await host.client.close()


def test_a_report_is_written_when_it_is_different(etcd: Cluster) -> None:
    async def scene() -> None:
        async with at_work(etcd) as host:
            first = await host.until(bool)
            assert first is not None
            assert json.loads(first.value) == {
                "name": "n1",
                "revision": 7,
                "problems": 0,
                "version": "0.1.0",
                "services": 0,
                "time": "2030-01-02T00:00:00Z",
                "announced": {},
                "maintenance": False,
            }
            await asyncio.sleep(0.3)
            same = await host.client.get(KEY)
            assert same == first, "and not otherwise"
            host.report = replace(REPORT, revision=8)
            await host.until(lambda kv: kv and json.loads(kv.value)["revision"] == 8)

    asyncio.run(scene())


def test_a_lost_lease_is_replaced_and_a_held_one_kept(etcd: Cluster) -> None:
    async def scene() -> None:
        async with at_work(etcd) as host:
            first = await host.until(bool)
            assert first is not None
            for _ in range(2):
                await host.renewed(first.lease)
            assert await host.client.get(KEY) == first
            await host.client.revoke_lease(first.lease)
            again = await host.until(bool)
            assert again is not None
            assert again.lease != first.lease
            await host.client.txn((), [Delete(KeyRange(KEY))])
            await host.until(bool)

    asyncio.run(scene())


def test_a_wiped_store_gets_the_report_again(etcd: Cluster) -> None:
    async def scene() -> None:
        async with at_work(etcd) as host:
            await host.until(bool)
            member = etcd.members[0]
            member.stop()
            member.wipe()
            with pytest.raises(EtcdError):
                await host.until(lambda _: False)
            async with asyncio.timeout(90):
                while "cannot be published" not in host.beacon.fault:  # noqa: ASYNC110 (there is no event)
                    await asyncio.sleep(0.02)
            etcd.start_again(member.url)
            # The key is in the store a moment before its writer knows.
            await host.until(lambda kv: kv and not host.beacon.fault)

    asyncio.run(scene())
