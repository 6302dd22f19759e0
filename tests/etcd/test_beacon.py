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

from tests.etcd.members import Cluster, cluster
from vipd.etcd.beacon import HostBeacon, HostReport
from vipd.etcd.client import EtcdClient
from vipd.etcd.errors import EtcdError
from vipd.etcd.messages import KeyRange, KeyValue
from vipd.etcd.settings import EtcdSettings

KEY = b"/vipd/v1/hosts/n1"
REPORT = HostReport("n1", 7, 0, "0.1.0")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("beacon")) as made:
        yield made


class Host:
    def __init__(self, etcd: Cluster) -> None:
        self.client = EtcdClient(EtcdSettings(etcd.urls, timeout=1.0), Random(1))
        self.report = REPORT
        self.beacon = HostBeacon(
            self.client, "/vipd/v1/", lambda: self.report, lambda: datetime(2030, 1, 2, tzinfo=UTC), 2, 0.05
        )

    async def until(self, true: Callable[[KeyValue | None], object]) -> KeyValue | None:
        async with asyncio.timeout(15):
            while True:
                found = await self.client.get(KEY)
                if true(found):
                    return found
                await asyncio.sleep(0.02)


@asynccontextmanager
async def at_work(etcd: Cluster) -> AsyncIterator[Host]:
    host = Host(etcd)
    task = asyncio.create_task(host.beacon.run())
    try:
        yield host
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
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
            await asyncio.sleep(2.8)
            assert await host.client.get(KEY) == first, "longer than the lease is"
            await host.client.revoke_lease(first.lease)
            again = await host.until(bool)
            assert again is not None
            assert again.lease != first.lease
            await host.client.delete(KeyRange(KEY))
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
            await asyncio.sleep(1.5)
            assert "cannot be published" in host.beacon.fault
            etcd.start_again(member.url)
            # The key is in the store a moment before its writer knows.
            await host.until(lambda kv: kv and not host.beacon.fault)

    asyncio.run(scene())
