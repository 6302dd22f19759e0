"""What vipd does about etcd hour after hour, in simulated time."""

from __future__ import annotations

import asyncio

import pytest

from tests.lab.inside import Vipd, running, vipctl
from tests.lab.simulated_etcd import SimulatedEtcd
from tests.sources.etcd.following import Follower, key, value

URL = "http://etcd:2379"
KEY = "/vipd/v1/backends/web/10.0.0.5:80"


def test_what_a_watch_missed_serves_within_ten_minutes() -> None:
    """It has reported a later change, so that no probe notices."""

    async def story(vipd: Vipd) -> None:
        host = Follower(vipd)
        await asyncio.sleep(60)
        vipd.etcd.deaf = True
        vipd.etcd.put(key("a"), value(1, "10.244.0.9"))
        vipd.etcd.deaf = False
        vipd.etcd.put(key("b"), value(2))
        await asyncio.sleep(300)
        assert host.serving() == {"a": {"10.244.0.5:80"}, "b": {"10.244.0.5:80"}}
        await asyncio.sleep(300)
        assert host.serving() == {"a": {"10.244.0.9:80"}, "b": {"10.244.0.5:80"}}
        said = f"the watch of etcd had missed 1 keys, such as {key('a')}"
        assert said in [record.getMessage() for record in vipd.journal]

    running(story, lambda vipd: vipd.etcd.put(key("a"), value(1)), simulated=True, etcd={"endpoints": [URL]})


def test_services_outlive_a_permission_that_is_lost_while_they_are_followed() -> None:
    async def story(vipd: Vipd) -> None:
        host = Follower(vipd)
        await asyncio.sleep(60)
        vipd.etcd.denies = True
        vipd.etcd.put(key("a"), value(1, "10.244.0.9"))
        await asyncio.sleep(600)
        problems = await host.problems()
        assert problems.startswith("etcd denies watch of /vipd/v1/services/*; hint: grant the user's role")
        assert problems.endswith("; the last known services go on serving")
        assert host.serving() == {"a": {"10.244.0.9:80"}}, "the open watch has reported it"
        vipd.etcd.put(key("a"), value(1, "10.244.0.8"))
        await asyncio.sleep(600)
        assert host.serving() == {"a": {"10.244.0.9:80"}}
        vipd.etcd.denies = False
        await asyncio.sleep(60)
        assert (host.serving(), await host.problems()) == ({"a": {"10.244.0.8:80"}}, "")

    running(story, lambda vipd: vipd.etcd.put(key("a"), value(1)), simulated=True, etcd={"endpoints": [URL]})


def test_a_registration_says_once_what_lasts_for_hours(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(etcd: SimulatedEtcd) -> None:
        await asyncio.sleep(3600)
        etcd.away = True
        await asyncio.sleep(7200)
        etcd.away = False
        await asyncio.sleep(60)
        etcd.delete(KEY)
        await asyncio.sleep(60)
        assert KEY.encode() in etcd.kvs

    assert vipctl(["register", "web", "10.0.0.5:80", "--ttl", "30s", "--endpoint", URL], story) == 0
    assert [line.removeprefix(f"vipctl: {KEY}: ") for line in capsys.readouterr().err.splitlines()] == [
        "registered",
        f"etcd cannot be reached: {URL}: the connection broke: [Errno 111] Connection refused",
        "the lease has expired",
        "registered",
        "the key is gone",
        "registered",
        "taken back",
    ]
