"""A token of a store that was wiped: a real etcd lets requests with it wait, and a new token is enough."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from tests.sources.etcd.members import Cluster, cluster, etcdctl
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError
from vipd.sources.etcd.messages import KeyRange

KEY = b"/vipd/v1/services/a"
SECONDS = 3.0
ATTEMPTS = 6


def _with_users(made: Cluster) -> None:
    url = made.urls[0]
    etcdctl(url, "user", "add", "root:rootpw")
    etcdctl(url, "user", "grant-role", "root", "root")
    etcdctl(url, "auth", "enable")


@pytest.mark.parametrize("request_kind", ["call", "watch"])
def test_a_wiped_store_is_used_again_without_a_restart(tmp_path: Path, request_kind: str) -> None:
    (tmp_path / "password").write_text("rootpw\n")

    async def once(client: EtcdClient) -> None:
        if request_kind == "call":
            await client.get(KEY)
        else:
            async with client.watch(KeyRange(KEY), 1):
                pass

    async def scene(made: Cluster) -> None:
        password = tmp_path / "password"
        settings = EtcdSettings(made.urls, user="root", password_file=password, timeout=SECONDS)
        client = EtcdClient(settings, Random(1))
        try:
            for _ in range(60):
                await client.put(KEY, b"")
            client.connection._token = None
            await once(client)  # a token whose index the new store does not reach
            member = made.members[0]
            member.stop()
            member.wipe()
            member.start()
            member.wait()
            await asyncio.to_thread(_with_users, made)
            reasons = []
            for _ in range(ATTEMPTS):
                try:
                    await once(client)
                except EtcdError as error:
                    reasons.append(str(error))
                else:
                    return
            raise AssertionError(reasons)
        finally:
            await client.close()

    with cluster(tmp_path / "etcd") as made:
        _with_users(made)
        asyncio.run(scene(made))
