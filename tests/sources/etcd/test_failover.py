"""Three real members; the one that is watched dies, freezes or loses the others while changes stream in."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sources.etcd.following import FAST, Following, following, key, value
from tests.sources.etcd.members import Cluster, cluster
from vipd.sources.etcd.client import Listing
from vipd.sources.etcd.keys import StoreChange

COUNT = 150
PATIENT = replace(FAST, grace=4.0)
"""A watch of a busy machine may be slow to tell of what a probe has seen; that alone is no reason to list."""


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("failover"), 3) as made:
        yield made


@pytest.fixture
def etcd(trio: Cluster) -> Cluster:
    trio.clear()
    return trio


def lists_of(there: Following) -> list[None]:
    """Grows whenever the source lists everything from now on."""
    lists: list[None] = []
    read = there.client.list

    async def counted(*arguments: Any, **options: Any) -> Listing:
        lists.append(None)
        return await read(*arguments, **options)

    there.client.list = counted  # type: ignore[method-assign]
    return lists


def taken_over(there: Following) -> list[str]:
    """Every key that the source takes over from now on, in that order."""
    told: list[str] = []
    take = there.source._keys.apply

    def listening(change: StoreChange, now: float) -> bool:
        told.extend(written.key for written in sorted(change.written, key=lambda w: w.mod_revision))
        return take(change, now)

    there.source._keys.apply = listening  # type: ignore[method-assign]
    return told


async def write_all(etcd: Cluster, urls: list[str]) -> None:
    """New keys one by one, each once, at the first of these members that takes it."""
    async with asyncio.timeout(180):
        for n in range(1, COUNT + 1):
            while not await asyncio.to_thread(written, etcd, n, urls):  # noqa: ASYNC110 (there is no event)
                await asyncio.sleep(0.1)


def written(etcd: Cluster, n: int, urls: list[str]) -> bool:
    """Whether one of these members has taken a key."""
    for url in urls:
        try:
            etcd.create(key(f"s{n:03}"), value(n), url)
        except OSError:
            continue
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_nothing_is_lost_and_order_is_kept(number: signal.Signals, etcd: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        async with following(etcd.urls, tmp_path, PATIENT, timeout=2.0) as there:
            await there.until(lambda: there.source.connected, "the first list")
            told, lists, used = taken_over(there), lists_of(there), there.source.state().endpoint
            others = [url for url in etcd.urls if url != used]
            writing = asyncio.create_task(write_all(etcd, others))
            await there.until(lambda: len(told) > 20, "changes")
            if number is signal.SIGKILL:
                etcd.member(used).stop()
            else:
                etcd.member(used).signal(number)
            try:
                await writing
                await there.until(lambda: len(there.names()) == COUNT, "all changes")
                assert told == [key(f"s{n:03}") for n in range(1, COUNT + 1)]
                assert lists == [], "the next watch goes on where the last one ended"
                await there.until(lambda: there.source.state().endpoint in others, "another member")
                await there.until(lambda: not there.source.faults(), "no fault any more")
            finally:
                if number is signal.SIGSTOP:
                    etcd.member(used).signal(signal.SIGCONT)
                etcd.ensure()

    asyncio.run(scene())


def test_a_member_that_lost_the_others_is_left(etcd: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        async with following(etcd.urls, tmp_path, timeout=2.0) as there:
            await there.until(lambda: there.source.connected, "the first list")
            used = there.source.state().endpoint
            others = [url for url in etcd.urls if url != used]
            for url in others:
                etcd.member(url).signal(signal.SIGSTOP)
            try:
                await there.until(there.source.faults, "no quorum")
            finally:
                for url in others:
                    etcd.member(url).signal(signal.SIGCONT)
            await asyncio.to_thread(etcd.wait_for_writes)
            etcd.put(key("s001"), value(1))
            await there.until(lambda: there.names() == {"s001"}, "followed again")

    asyncio.run(scene())
