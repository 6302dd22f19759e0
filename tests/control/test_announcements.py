"""Which addresses a host announces, and when: it follows what its kernel has, damped, and what other hosts
report. What fails elsewhere neither withdraws nor delays."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, NamedTuple

from tests.lab.inside import Vipd, running

VIP, OTHER_VIP = "203.0.113.10", "203.0.113.99"
ETCD = {"endpoints": ["http://etcd:2379"]}
OTHER_HOST = "/vipd/v1/hosts/host-b"
announcing = partial(running, simulated=True, announce_addresses=["203.0.113.0/24"])


def web(*backends: str, **keys: str) -> str:
    keys = {"external_addresses": f"[{VIP}]", "announce": "routes", **keys}
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    return (
        f"  - {{name: web, address: 10.96.0.10, ports: [80/tcp], backends: [{', '.join(backends)}]{more}}}\n"
    )


SERVED, UNSERVED = web("10.0.0.1"), web()


async def changed(vipd: Vipd, *blocks: str) -> None:
    vipd.declare(*blocks)
    await vipd.reload()


async def happens(vipd: Vipd, word: str) -> None:
    """Something of a story."""
    if word in ("served", "unserved"):
        await changed(vipd, SERVED if word == "served" else UNSERVED)
    elif word == "maintenance":
        await vipd.ask("POST", "/v1/maintenance", {})
    elif word == "resume":
        await vipd.ask("DELETE", "/v1/maintenance")
    elif word.startswith("other"):
        reasons = {"other serves": "served", "other keeps": "last-host", "other withdraws": "withdrawing"}
        announced = {f"routes {VIP}": reasons[word]} if word in reasons else {}
        vipd.etcd.put(OTHER_HOST, json.dumps({"announced": announced}))
    elif word == "etcd goes":
        vipd.etcd.away = True
    else:
        vipd.etcd.seconds = float(word.removeprefix("etcd takes "))


async def moments(vipd: Vipd, seconds: float) -> list[tuple[float, bool]]:
    """At which second, to a half, the address is withdrawn and announced meanwhile."""
    clock, seen = asyncio.get_running_loop().time, list[tuple[float, bool]]()
    began, last = clock(), VIP in vipd.announced
    while clock() - began < seconds:
        await asyncio.sleep(0.125)
        if (VIP in vipd.announced) is not last:
            last = not last
            seen.append((round(2 * (clock() - began)) / 2, last))
    return seen


async def why(vipd: Vipd) -> str:
    (shown,) = [a for a in (await vipd.service("web"))["announced"] if a["address"] == VIP]
    return str(shown["reason"])


class Story(NamedTuple):
    """Of an address that is announced, and served by a backend, for half a minute."""

    events: dict[float, str]
    """What happens at which second."""
    moments: list[tuple[float, bool]]
    """At which second it is withdrawn (False) or announced (True)."""
    reason: str
    """Why, at the end."""
    etcd: bool = False
    after: float = 3
    """`announce_withdraw_after`; it returns after ten seconds."""


OFF, ON = False, True
STORIES = {
    "a short failure withdraws nothing": Story({0: "unserved", 2.5: "served"}, [], "served"),
    "a failure that is not over": Story({0: "unserved", 9: "unserved"}, [(3, OFF)], "no-backend"),
    "a return that lasts": Story({0: "unserved", 5: "served"}, [(3, OFF), (15, ON)], "served"),
    "a return that does not last": Story(
        {0: "unserved", 5: "served", 12: "unserved", 14: "served"}, [(3, OFF), (24, ON)], "served"
    ),
    "maintenance withdraws at once and ends at once": Story(
        {0: "maintenance", 8: "resume"}, [(0, OFF), (8, ON)], "served"
    ),
    "no other host serves it": Story({0: "unserved"}, [], "last-host", etcd=True),
    "no other host serves it, at once": Story({0: "unserved"}, [], "last-host", etcd=True, after=0),
    "another host serves it": Story({0: "other serves", 1: "unserved"}, [(4, OFF)], "no-backend", etcd=True),
    "another one keeps it, too": Story({0: "other keeps", 1: "unserved"}, [], "last-host", etcd=True),
    "another one begins to serve it": Story(
        {0: "unserved", 9: "other keeps", 18: "other serves"}, [(22.5, OFF)], "no-backend", etcd=True
    ),
    "hosts that fail together keep it": Story(
        {0: "other serves", 1: "unserved", 3: "other withdraws"}, [], "last-host", etcd=True
    ),
    "hosts that withdrew it for each other take it back": Story(
        {0: "other serves", 1: "unserved", 6: "other keeps", 14: "other is gone"},
        [(4, OFF), (18.5, ON)],
        "last-host",
        etcd=True,
    ),
    "what was kept is served again, and fails again": Story(
        {0: "unserved", 8: "served", 39: "unserved"}, [], "withdrawing", etcd=True
    ),
    "a return while another host serves it": Story(
        {0: "other serves", 1: "unserved", 8: "served"}, [(4, OFF), (18, ON)], "served", etcd=True
    ),
    "a return while nobody else announces it": Story(
        {0: "other serves", 1: "unserved", 8: "served", 9: "other is gone"},
        [(4, OFF), (13.5, ON)],
        "served",
        etcd=True,
    ),
    "a return while another host refuses its clients": Story(
        {0: "other serves", 1: "unserved", 8: "served", 9: "other keeps"},
        [(4, OFF), (13.5, ON)],
        "served",
        etcd=True,
    ),
    "etcd is away": Story({0: "etcd goes", 1: "unserved"}, [(4, OFF)], "no-backend", etcd=True),
    "etcd is away, at once": Story(
        {0: "etcd goes", 1: "unserved"}, [(1, OFF)], "no-backend", etcd=True, after=0
    ),
    "etcd does not answer": Story({0: "etcd takes 3600", 1: "unserved"}, [(4, OFF)], "no-backend", etcd=True),
    "etcd does not answer, at once": Story(
        {0: "etcd takes 3600", 1: "unserved"}, [(2, OFF)], "no-backend", etcd=True, after=0
    ),
    "etcd is slow": Story({0: "etcd takes 2.5", 1: "unserved"}, [], "last-host", etcd=True),
    "etcd is slow, at once": Story(
        {0: "etcd takes 2.5", 1: "unserved"}, [(2, OFF), (3.5, ON)], "last-host", etcd=True, after=0
    ),
}


def test_when_an_address_is_withdrawn_and_announced_again() -> None:
    def lived(story: Story) -> tuple[list[tuple[float, bool]], str]:
        async def told(vipd: Vipd) -> tuple[list[tuple[float, bool]], str]:
            await asyncio.sleep(30)
            assert vipd.announced == {VIP}
            watched = asyncio.create_task(moments(vipd, 40))
            began = asyncio.get_running_loop().time()
            for at, word in story.events.items():
                await asyncio.sleep(began + at - asyncio.get_running_loop().time())
                await happens(vipd, word)
            return await watched, await why(vipd)

        settings: dict[str, Any] = {"announce_withdraw_after": story.after, "announce_return_after": 10}
        settings |= {"etcd": ETCD} if story.etcd else {}
        return announcing(told, prepare, **settings)

    def prepare(vipd: Vipd) -> None:
        vipd.declare(SERVED)
        vipd.etcd.seconds = 0.001

    seen = {name: lived(story) for name, story in STORIES.items()}
    assert seen == {name: (story.moments, story.reason) for name, story in STORIES.items()}


def test_a_host_that_never_announced_an_address_does_not_begin_to_as_the_last_one() -> None:
    async def story(vipd: Vipd) -> None:
        assert await moments(vipd, 60) == []
        assert (set(vipd.announced), await why(vipd)) == (set(), "no-backend")

    announcing(story, lambda vipd: vipd.declare(UNSERVED), etcd=ETCD)


def test_maintenance_withdraws_before_etcd_is_asked_whether_this_host_was_the_last() -> None:
    async def story(vipd: Vipd, slow: float) -> list[str]:
        await asyncio.sleep(30)
        asked = asyncio.create_task(vipd.ask("POST", "/v1/maintenance", {}))
        vipd.etcd.seconds = slow
        await asyncio.sleep(0.1)
        assert vipd.announced == set()
        began = asyncio.get_running_loop().time()
        warnings = list((await asked).body["warnings"])
        assert asyncio.get_running_loop().time() - began < 3
        return warnings

    def prepare(vipd: Vipd, elsewhere: dict[str, str]) -> None:
        vipd.declare(SERVED)
        vipd.etcd.put(OTHER_HOST, json.dumps({"announced": elsewhere}))

    alone = f"no other host announces {VIP}: clients elsewhere reach it nowhere then"
    too = {f"routes {VIP}": "served"}
    for slow, elsewhere, warnings in ((2, {}, [alone]), (2, too, []), (3600, {}, [])):
        lived = partial(story, slow=slow), partial(prepare, elsewhere=elsewhere)
        assert announcing(*lived, etcd=ETCD) == warnings


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


def test_a_table_of_routes_that_cannot_be_written_is_a_fault_until_it_can() -> None:
    async def story(vipd: Vipd) -> None:
        async def faults() -> tuple[object, bool]:
            shown = (await vipd.ask("GET", "/v1/announcements")).body["faults"]
            return shown, "the disk is gone" in str((await vipd.status())["warnings"])

        await asyncio.sleep(5)
        vipd.announce_fault = "the disk is gone"
        await changed(vipd, UNSERVED)
        await asyncio.sleep(60)
        assert vipd.announced == {VIP}
        assert await faults() == ({"routes": "the disk is gone"}, True)
        vipd.announce_fault = ""
        await asyncio.sleep(60)
        assert vipd.announced == set()
        assert await faults() == ({}, False)

    announcing(story, lambda vipd: vipd.declare(SERVED))


def test_what_an_earlier_process_announced_stays_until_the_first_write_but_for_maintenance() -> None:
    def earlier(vipd: Vipd) -> None:
        vipd.announced = frozenset({VIP, OTHER_VIP})
        vipd.kernel.gate.clear()
        vipd.declare(UNSERVED)

    async def in_maintenance(vipd: Vipd) -> None:
        await asyncio.sleep(35)
        assert vipd.announced == {VIP, OTHER_VIP}
        assert (await vipd.ask("POST", "/v1/maintenance", {})).status == 200
        assert vipd.announced == set()
        vipd.kernel.gate.set()

    async def written(vipd: Vipd) -> None:
        began = asyncio.create_task(moments(vipd, 40))
        vipd.kernel.gate.set()
        await asyncio.sleep(2)
        assert (set(vipd.announced), await why(vipd)) == ({VIP}, "withdrawing"), (
            "nobody asks for the other one"
        )
        assert await began == [(3, OFF)]

    announcing(in_maintenance, earlier)
    announcing(written, earlier, announce_withdraw_after=3)


def test_only_what_is_asked_for_is_announced() -> None:
    other = web("10.0.0.1").replace("web", "api").replace("80/tcp", "443/tcp")
    local = "{external: local}"
    inside = "{by: routes, addresses: all}"
    asked = {
        SERVED: {VIP},
        web("10.0.0.1", announce="none"): set(),
        web("10.0.0.1", traffic_policy=local): set(),
        web("{address: 10.0.0.1, node: host-a}", traffic_policy=local): {VIP},
        web("10.0.0.1", announce=inside): {VIP, "10.96.0.10"},
        web("10.0.0.1", announce=inside).replace(f"external_addresses: [{VIP}], ", ""): {"10.96.0.10"},
        UNSERVED: set(),
        UNSERVED + other: {VIP},
    }

    async def story(vipd: Vipd) -> frozenset[str]:
        await asyncio.sleep(5)
        return vipd.announced

    settings = {"announce_addresses": ["203.0.113.0/24", "10.96.0.0/16"]}
    seen = {
        block: running(story, lambda vipd, block=block: vipd.declare(block), simulated=True, **settings)  # type: ignore[misc,arg-type]
        for block in asked
    }
    assert seen == asked


def test_why_a_host_must_get_no_flows() -> None:
    reasons = {
        SERVED: "",
        UNSERVED: "no backend can serve",
        web("10.0.0.1", traffic_policy="{external: local}"): (
            "no backend on this host can serve, and the traffic policy is local"
        ),
        web(traffic_policy="{external: local}"): "no backend can serve",
    }

    async def story(vipd: Vipd) -> str:
        before = (await vipd.ask("GET", "/v1/services/web/ready")).body
        await vipd.ask("POST", "/v1/maintenance", {"reason": "kernel update"})
        after = (await vipd.ask("GET", "/v1/services/web/ready")).body
        assert before["ready"] is not bool(before["why"])
        assert after["why"] == "this host is in maintenance (kernel update)"
        return str(before["why"])

    seen = {block: announcing(story, lambda vipd, block=block: vipd.declare(block)) for block in reasons}  # type: ignore[misc]
    assert seen == reasons


def test_the_addresses_of_a_service_are_shown_in_order() -> None:
    async def story(vipd: Vipd) -> list[str]:
        await asyncio.sleep(5)
        return [shown["address"] for shown in (await vipd.service("web"))["announced"]]

    block = web(
        "10.0.0.1", announce="{by: routes, addresses: all}", external_addresses=f"[{OTHER_VIP}, {VIP}]"
    )
    allowed = ["203.0.113.0/24", "10.96.0.0/16"]
    shown = running(story, lambda vipd: vipd.declare(block), simulated=True, announce_addresses=allowed)
    assert shown == ["10.96.0.10", VIP, OTHER_VIP]
