"""What a host announces follows what its kernel has; what fails elsewhere neither withdraws nor delays."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.lab.inside import Vipd, running

VIP = "203.0.113.10"
ETCD = {"endpoints": ["http://etcd:2379"]}
announcing = partial(running, simulated=True, announce_addresses=["203.0.113.0/24"])


def web(*backends: str, **keys: str) -> str:
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    return (
        f"  - {{name: web, address: 10.96.0.10, external_addresses: [{VIP}], ports: [80/tcp], "
        f"announce: routes, backends: [{', '.join(backends)}]{more}}}\n"
    )


SERVED, UNSERVED = web("10.0.0.1"), web()


async def changed(vipd: Vipd, *blocks: str) -> None:
    vipd.declare(*blocks)
    await vipd.reload()


async def moments(vipd: Vipd, seconds: float) -> list[tuple[int, bool]]:
    """At which second the address is withdrawn and announced in the next seconds."""
    clock, found = asyncio.get_running_loop().time, list[tuple[int, bool]]()
    began, last = clock(), VIP in vipd.announced
    while clock() - began < seconds:
        await asyncio.sleep(0.05)
        if (VIP in vipd.announced) is not last:
            last = not last
            found.append((round(clock() - began), last))
    return found


async def why(vipd: Vipd) -> str:
    (found,) = [a for a in (await vipd.service("web"))["announced"] if a["address"] == VIP]
    return str(found["reason"])


def test_a_short_failure_withdraws_nothing_and_a_long_one_until_a_backend_has_served_for_a_while() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(1)
        assert vipd.announced == {VIP}
        assert await why(vipd) == "served"
        await changed(vipd, UNSERVED)
        assert await why(vipd) == "withdrawing"
        await asyncio.sleep(2)
        await changed(vipd, SERVED)
        assert await moments(vipd, 20) == []
        await changed(vipd, UNSERVED)
        assert await moments(vipd, 20) == [(3, False)]
        assert await why(vipd) == "no-backend"
        await changed(vipd, SERVED)
        assert await why(vipd) == "returning"
        assert await moments(vipd, 20) == [(10, True)]

    settings: dict[str, Any] = {"announce_withdraw_after": 3, "announce_return_after": 10}
    announcing(story, lambda vipd: vipd.declare(SERVED), **settings)


def test_what_fails_announces_nothing_new_and_withdraws_nothing() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.failures = [("iptables-restore", "no")] * 3
        await changed(vipd, SERVED)
        assert vipd.announced == set()
        await asyncio.sleep(35)
        assert vipd.announced == {VIP}
        vipd.kernel.failures = [("iptables-restore", "no")] * 1000
        await changed(vipd, UNSERVED)
        await asyncio.sleep(65)
        assert vipd.announced == {VIP}
        vipd.kernel.failures.clear()
        await asyncio.sleep(65)
        assert vipd.announced == set()
        vipd.kernel.refuses = lambda forwarding: "no" if forwarding.endpoints else ""
        await changed(vipd, SERVED)
        await asyncio.sleep(35)
        assert vipd.announced == set(), "a refused service stays as it was"

    announcing(story, announce_withdraw_after=0, announce_return_after=0)


def test_what_an_earlier_process_announced_stays_until_the_first_write_but_for_maintenance() -> None:
    def earlier(vipd: Vipd) -> None:
        vipd.announced = frozenset({VIP})
        vipd.kernel.gate.clear()
        vipd.declare(SERVED)

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(35)
        assert vipd.announced == {VIP}
        assert (await vipd.ask("POST", "/v1/maintenance", {})).status == 200
        assert vipd.announced == set()
        vipd.kernel.gate.set()
        await vipd.ask("DELETE", "/v1/maintenance")
        await asyncio.sleep(35)
        assert vipd.announced == {VIP}

    announcing(story, earlier)


@pytest.mark.parametrize(
    ("etcd", "withdraw_after", "expected"),
    [
        ("none", 3, [3]),
        ("away", 0, [0]),
        ("there", 0, []),
    ],
)
def test_an_address_is_withdrawn_in_time_whether_etcd_answers_or_not(
    etcd: str, withdraw_after: float, expected: list[int]
) -> None:
    """It is kept where this host knows that no other one announces it."""

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(20.123)
        assert vipd.announced == {VIP}
        vipd.etcd.away = etcd == "away"
        await asyncio.sleep(65)
        watched = asyncio.create_task(moments(vipd, 60))
        await changed(vipd, UNSERVED)
        found = await watched
        assert found == [(seconds, False) for seconds in expected]
        began = asyncio.get_running_loop().time()
        answer = await vipd.ask("POST", "/v1/maintenance", {})
        assert answer.status == 200
        assert vipd.announced == set(), "at once"
        assert asyncio.get_running_loop().time() - began < 10

    settings: dict[str, Any] = {"announce_withdraw_after": withdraw_after}
    settings |= {} if etcd == "none" else {"etcd": ETCD}
    announcing(story, lambda vipd: vipd.declare(SERVED), **settings)


def test_only_what_is_asked_for_is_announced() -> None:
    other = SERVED.replace("web", "api").replace("80/tcp", "443/tcp").replace("10.96.0.10", "10.96.0.11")
    asked = {
        SERVED: {VIP},
        SERVED.replace("announce: routes, ", ""): set(),
        web("10.0.0.1", traffic_policy="{external: local}"): set(),
        web("{address: 10.0.0.1, node: host-a}", traffic_policy="{external: local}"): {VIP},
        UNSERVED: set(),
        UNSERVED + other: {VIP},
    }

    async def story(vipd: Vipd) -> frozenset[str]:
        await asyncio.sleep(5)
        return vipd.announced

    found = {block: announcing(story, lambda vipd, block=block: vipd.declare(block)) for block in asked}  # type: ignore[misc]
    assert found == asked
