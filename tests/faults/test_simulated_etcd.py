"""The etcd of the simulated days answers as the real one does."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.faults.simulated_etcd import SimulatedEtcd
from tests.sources.etcd.members import cluster, install
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import RejectedError
from vipd.sources.etcd.messages import KeyRange, KeyValue, RangeResponse
from vipd.sources.etcd.transport import Transport


def test_it_answers_as_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    prefix = f"/same/{secrets.token_hex(4)}/".encode()
    with cluster(tmp_path) as etcd:
        real = asyncio.run(_story(etcd.urls, prefix))
    simulated = SimulatedEtcd()

    async def opened(_: Transport) -> SimulatedEtcd:
        return simulated

    monkeypatch.setattr(Transport, "_open", opened)
    assert asyncio.run(_story(("http://127.0.0.1:1",), prefix)) == real


async def _story(urls: tuple[str, ...], prefix: bytes) -> list[object]:
    """What is seen of one etcd, its revisions counted from the first one on."""
    client, seen = EtcdClient(EtcdSettings(urls), Random(1)), list[Any]()
    first = (await client.put(prefix + b"a", b"1")).revision
    keys = KeyRange.prefix(prefix)
    ranges = (keys, KeyRange.prefix(prefix + b"none"))

    def counted(kv: KeyValue) -> object:
        return kv.key, kv.value, kv.mod_revision - first, kv.create_revision - first, bool(kv.lease)

    def summary(found: RangeResponse) -> object:
        return list(map(counted, found.kvs)), found.more, found.count

    lease = await client.grant_lease(30)
    seen.append(await client.renew_lease(lease))
    seen.append((await client.put(prefix + b"b", b"2", lease)).revision - first)
    await client.put(prefix + b"a", b"3")
    seen += [summary(await client.range(keys)), summary(await client.range(keys, 1))]
    kept = await client.get(prefix + b"b")
    seen += [kept and counted(kept), await client.get(prefix + b"c")]
    for since in (first, first + 9):
        header, found = await client.changed_since(ranges, since)
        seen += [header.revision - first, list(map(summary, found))]
    async with client.watch(keys, first + 2) as watch:
        await client.revoke_lease(lease)
        events = (await anext(watch)).events
        while len(events) < 2:  # etcd may send both at once
            events += (await anext(watch)).events
    seen += [(event.deleted, event.kv.key, event.kv.value, event.kv.mod_revision - first) for event in events]
    seen.append(await client.renew_lease(lease))
    await client.revoke_lease(lease)
    try:
        await client.put(prefix + b"b", b"2", lease)
    except RejectedError as error:
        seen.append(error.code)
    await client.close()
    return seen
