"""Whatever keeps `vipctl register` from etcd, the backend stays, or comes back by itself."""

from __future__ import annotations

import asyncio
from typing import cast

from tests.lab.simulated_time import simulate
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.messages import Header, KeyValue
from vipd.sources.etcd.registration import Registration

DAY_SECONDS = 86_400.0


class Client:
    """One whose every answer may be an exception that nobody expects."""

    def __init__(self) -> None:
        self.failing = True
        self.revoked = False

    async def grant_lease(self, seconds: int) -> int:
        if self.failing:
            raise KeyError("nobody expects it")
        return 7

    async def put(self, key: bytes, value: bytes, lease: int) -> Header:
        return Header("1", "1", 1)

    async def renew_lease(self, lease: int) -> int:
        return 10

    async def get(self, key: bytes) -> KeyValue:
        return KeyValue(key, b"", 1, 1, 7)

    async def revoke_lease(self, lease: int) -> None:
        self.revoked = True
        raise KeyError("nobody expects it")


def test_an_internal_error_is_reported_once_and_retried() -> None:
    reports: list[tuple[bool, str]] = []

    async def story() -> None:
        client = Client()
        registered = Registration(
            cast("EtcdClient", client),
            "/k",
            "{}",
            10,
            lambda standing, what: reports.append((standing, what)),
        )
        work = asyncio.create_task(registered.run())
        await asyncio.sleep(DAY_SECONDS)
        client.failing = False
        await asyncio.sleep(10)
        assert reports[-1] == (True, "registered")
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled()
        assert client.revoked

    simulate(story())
    assert "internal error while registering: KeyError" in reports[0][1]
    assert reports[1] == (True, "registered"), "a day of failures is one line"
    assert "ends by itself after 10 s: internal error" in reports[2][1]
