"""The client against a real etcd: keys, transactions, leases, watches."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from random import Random
from typing import TypeVar

import pytest

from tests.lab.held_ports import held_ports
from tests.sources.etcd.members import Cluster, cluster
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import CompactedError, EndpointError, UnreachableError
from vipd.sources.etcd.fields import Message, text
from vipd.sources.etcd.messages import Delete, KeyRange, ModRevisionEquals, Put, WatchEvent
from vipd.sources.etcd.watch import Watch, WatchBatch

ALL = KeyRange.prefix(b"/t/")


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("trio"), 3) as made:
        yield made


@pytest.fixture
def etcd(trio: Cluster) -> Cluster:
    trio.clear()
    return trio


def client_of(etcd: Cluster, timeout: float = 30.0) -> AbstractAsyncContextManager[EtcdClient]:
    return client_at(*etcd.urls, timeout=timeout)


@asynccontextmanager
async def client_at(*urls: str, timeout: float) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(EtcdSettings(urls, timeout=timeout), Random(1))
    try:
        yield client
    finally:
        await client.close()


T = TypeVar("T")


async def ask(client: EtcdClient, path: str, read: Callable[[Message], T]) -> T:
    """What vipd itself never asks."""
    return await client.connection.call(path, {}, path, read)


async def leader_of(client: EtcdClient) -> str:
    """The leader's id, once the member in use knows of one."""
    async with asyncio.timeout(90):
        while True:
            leader = await ask(client, "/v3/maintenance/status", lambda answer: text(answer, "leader"))
            if leader:
                return leader
            await asyncio.sleep(0.05)


async def beside_the_leader(client: EtcdClient) -> str:
    """The endpoint in use, after another one than the leader has been chosen: its loss means no election."""
    leader = await leader_of(client)
    members: object = await ask(client, "/v3/cluster/member/list", lambda answer: answer["members"])
    assert isinstance(members, list)
    urls = [url for member in members if member["ID"] == leader for url in member["clientURLs"]]
    if client.connection.endpoint in urls:
        client.connection.mark_failed(client.connection.endpoint)
    await client.put(b"/t/first", b"")
    return client.connection.endpoint


@contextmanager
def frozen(etcd: Cluster, *urls: str) -> Iterator[None]:
    """These members stand still meanwhile; afterwards all take writes again."""
    for url in urls:
        etcd.member(url).signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for url in urls:
            etcd.member(url).signal(signal.SIGCONT)
        etcd.wait_for_writes()


async def take(watch: Watch, number: int) -> list[WatchBatch]:
    async with asyncio.timeout(90):
        return [await anext(watch) for _ in range(number)]


async def read_for_ever(client: EtcdClient, revision: int) -> None:
    """Watch from a revision on, again and again: a member may hear a moment later that it is compacted."""
    async with asyncio.timeout(90):
        while True:
            async with client.watch(ALL, revision) as watch:
                await take(watch, 1)


def test_a_key_is_written_read_and_removed(etcd: Cluster) -> None:
    async def scene() -> None:
        async with client_of(etcd) as client:
            header = await client.put(b"/t/a\x00\xff", b"\x00value")
            found = await client.get(b"/t/a\x00\xff")
            assert found is not None
            assert (found.value, found.mod_revision) == (b"\x00value", header.revision)
            assert await client.txn((), [Delete(ALL)])
            assert await client.get(b"/t/a\x00\xff") is None

    asyncio.run(scene())


def test_pages_are_all_of_one_revision(etcd: Cluster) -> None:
    etcd.put_all({f"/t/{n:03}": "old" for n in range(250)})

    async def scene() -> None:
        async with client_of(etcd) as client:
            pages, first = 0, client.range

            async def between(keys: KeyRange, limit: int = 0, revision: int = 0) -> object:
                nonlocal pages
                found = await first(keys, limit, revision)
                pages += 1
                await asyncio.to_thread(etcd.put_all, {f"/t/{n:03}": "new" for n in range(250)})
                return found

            client.range = between  # type: ignore[assignment,method-assign]
            listing = await client.list([ALL], page=100)
            assert pages == 3
            assert [kv.key for kv in listing.kvs] == [f"/t/{n:03}".encode() for n in range(250)]
            assert {kv.value for kv in listing.kvs} == {b"old"}
            assert max(kv.mod_revision for kv in listing.kvs) == listing.header.revision

    asyncio.run(scene())


def test_compare_and_swap(etcd: Cluster) -> None:
    async def scene() -> None:
        async with client_of(etcd) as client:
            assert await client.txn([ModRevisionEquals(b"/t/a", 0)], [Put(b"/t/a", b"1")])
            assert not await client.txn([ModRevisionEquals(b"/t/a", 0)], [Put(b"/t/a", b"2")])
            found = await client.get(b"/t/a")
            assert found is not None
            assert found.value == b"1"
            assert await client.txn(
                [ModRevisionEquals(b"/t/a", found.mod_revision)], [Delete(KeyRange(b"/t/a"))]
            )
            assert await client.get(b"/t/a") is None

    asyncio.run(scene())


def test_a_lease_takes_its_keys_with_it(etcd: Cluster) -> None:
    async def scene() -> None:
        async with client_of(etcd) as client:
            lease = await client.grant_lease(60)
            await client.put(b"/t/a", b"", lease)
            assert 0 < await client.renew_lease(lease) <= 60
            await client.revoke_lease(lease)
            assert await client.get(b"/t/a") is None
            assert await client.renew_lease(lease) == 0
            await client.revoke_lease(lease)

    asyncio.run(scene())


def test_a_watch_tells_what_happens_in_its_range(etcd: Cluster) -> None:
    start = etcd.put("/t/a/1", "before")

    async def scene() -> None:
        async with client_of(etcd) as client, client.watch(KeyRange.prefix(b"/t/a/"), start) as watch:
            await asyncio.to_thread(etcd.put, "/t/b/1", "unseen")
            await asyncio.to_thread(etcd.put, "/t/a/2", "x")
            await asyncio.to_thread(etcd.delete, "/t/*")
            told: list[WatchEvent] = []
            while len(told) < 4:
                told += (await take(watch, 1))[0].events
            assert [(e.deleted, e.kv.key, e.kv.value) for e in told] == [
                (False, b"/t/a/1", b"before"),
                (False, b"/t/a/2", b"x"),
                (True, b"/t/a/1", b""),
                (True, b"/t/a/2", b""),
            ]
            assert told[2].kv.mod_revision == told[3].kv.mod_revision > told[1].kv.mod_revision

    asyncio.run(scene())


def test_a_value_longer_than_any_buffer(etcd: Cluster) -> None:
    start = etcd.put("/t/big", "x" * 1_000_000)

    async def scene() -> None:
        async with client_of(etcd) as client, client.watch(ALL, start) as watch:
            (changes,) = await take(watch, 1)
            assert len(changes.events[0].kv.value) == 1_000_000

    asyncio.run(scene())


def test_a_revision_that_comes_in_fragments_is_told_at_once(etcd: Cluster) -> None:
    """etcd cuts a message at some 2 MB: 8,000 long keys that are deleted by one request."""
    etcd.put_all({f"/t/{n:0300}": "" for n in range(8000)})

    async def scene() -> None:
        async with client_of(etcd) as client:
            here = (await client.range(ALL, limit=1)).header.revision
            async with client.watch(ALL, here + 1) as watch:
                await client.txn((), [Delete(ALL)])
                (changes,) = await take(watch, 1)
                assert sum(event.deleted for event in changes.events) == 8000

    asyncio.run(scene())


def test_a_compacted_revision_is_told(etcd: Cluster) -> None:
    first = etcd.put("/t/a", "1")
    etcd.compact(etcd.put("/t/a", "2"))

    async def scene() -> None:
        async with client_of(etcd) as client:
            with pytest.raises(CompactedError) as told:
                await read_for_ever(client, first)
            assert told.value.revision > first
            with pytest.raises(CompactedError):
                await client.range(ALL, revision=first)

    asyncio.run(scene())


def test_changed_since_sees_writes_and_counts_keys(etcd: Cluster) -> None:
    etcd.put_all({"/t/a": "1", "/t/b": "1", "/u/a": "1"})
    before = etcd.put("/t/c", "1")
    etcd.put("/t/d", "1")
    etcd.put("/t/b", "2")

    async def scene() -> None:
        async with client_of(etcd) as client:
            _, (t, u) = await client.changed_since([ALL, KeyRange.prefix(b"/u/")], before)
            assert ([kv.key for kv in t.kvs], t.count) == ([b"/t/b"], 4)
            assert ([kv.key for kv in u.kvs], u.count) == ([], 1)

    asyncio.run(scene())


def test_a_dead_member_is_left_for_another_which_is_kept(etcd: Cluster) -> None:
    async def scene() -> None:
        async with client_of(etcd) as client:
            await client.put(b"/t/a", b"")
            used = client.connection.endpoint
            etcd.member(used).stop()
            try:
                await client.put(b"/t/b", b"")
                second = client.connection.endpoint
                assert second != used
                await client.put(b"/t/c", b"")
                assert client.connection.endpoint == second
            finally:
                etcd.start_again(used)

    asyncio.run(scene())


def test_a_frozen_member_costs_one_timeout(etcd: Cluster) -> None:
    async def scene() -> None:
        async with client_of(etcd, timeout=3.0) as client:
            used = await beside_the_leader(client)
            with frozen(etcd, used):
                await client.put(b"/t/b", b"")
                assert client.connection.endpoint != used

    asyncio.run(scene())


def test_a_swap_whose_answer_is_lost_is_not_sent_twice(etcd: Cluster) -> None:
    async def scene() -> None:
        async with client_of(etcd, timeout=3.0) as client:
            used = await beside_the_leader(client)
            with frozen(etcd, used):
                with pytest.raises(UnreachableError) as told:
                    await client.txn([ModRevisionEquals(b"/t/b", 0)], [Put(b"/t/b", b"")])
                assert list(told.value.reasons) == [used]

    asyncio.run(scene())


def test_a_watch_ends_when_its_member_has_lost_the_cluster(etcd: Cluster) -> None:
    now = etcd.put("/t/a", "")

    async def scene() -> None:
        async with client_of(etcd) as client, client.watch(ALL, now + 1) as watch:
            others = [url for url in etcd.urls if url != watch.endpoint]
            with (
                frozen(etcd, *others),
                pytest.raises(EndpointError, match=r"no leader|ended the watch"),
            ):
                await take(watch, 100)

    asyncio.run(scene())


def test_no_endpoint_answers_and_each_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, held_ports(1) as (closed,):
        urls = [f"http://127.0.0.1:{port}" for port in (silent.getsockname()[1], closed)]

        async def scene() -> dict[str, str]:
            async with client_at(*urls, timeout=1.0) as client:
                with pytest.raises(UnreachableError) as told:
                    await client.get(b"a")
                return {url: str(why) for url, why in told.value.reasons.items()}

        reasons = asyncio.run(scene())
        assert reasons == {
            urls[0]: "no answer within 1 s",
            urls[1]: "cannot connect: Connection refused",
        }


def test_watch_sockets_are_looked_after_by_the_kernel(etcd: Cluster) -> None:
    now = etcd.put("/t/a", "")

    async def scene() -> None:
        async with client_of(etcd) as client, client.watch(ALL, now) as watch:
            transport = watch._lines._body._protocol.transport
            assert transport is not None
            opened = transport.get_extra_info("socket")
            assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0

    asyncio.run(scene())


def test_a_fleet_spreads_over_the_members() -> None:
    urls = ("http://a:1", "http://b:1", "http://c:1")
    first = {EtcdClient(EtcdSettings(urls), Random(seed)).connection.endpoint for seed in range(50)}
    assert first == set(urls)
