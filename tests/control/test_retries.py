"""What vipd does when the kernel takes no rules, or not those of one service."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from tests.lab.inside import Vipd, running
from tests.model.samples import block
from vipd.model.forwarding import Forwarding

DNS, WEB = block("10.96.0.10", "dns", "10.244.0.5"), block("10.96.0.11", "web", "10.244.0.6")
BROKEN = ("iptables-restore", "it said no")


async def changed(vipd: Vipd, *blocks: str) -> None:
    vipd.declare(*blocks)
    await vipd.reload()


async def moments(vipd: Vipd, number: int) -> list[float]:
    """When the next failures have happened."""
    clock, seen = asyncio.get_running_loop().time, list[float]()
    left = len(vipd.kernel.failures)
    while len(seen) < number:
        await asyncio.sleep(0.01)
        if len(vipd.kernel.failures) < left:
            left = len(vipd.kernel.failures)
            seen.append(clock())
    return seen


def test_the_pauses_between_tries_grow_to_a_limit_and_the_recovery_is_told() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.failures = [BROKEN] * 8
        vipd.declare(DNS, WEB)
        reload = asyncio.create_task(vipd.reload())
        failed = await moments(vipd, 8)
        pauses = [later - earlier for earlier, later in pairwise(failed)]
        assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30], abs=0.1)
        assert "it said no" in str((await reload).body)
        status = await vipd.status()
        assert (status["state"], status["apply_failures"]) == ("failed", 8)
        assert "iptables-restore failed: it said no" in status["message"]
        await asyncio.sleep(30.5)
        status = await vipd.status()
        assert (status["state"], status["message"], vipd.kernel.names()) == ("in-sync", "", {"dns", "web"})
        assert any("again" in record.getMessage() for record in vipd.journal)

    running(story, lambda vipd: vipd.declare(DNS), simulated=True)


def test_rules_that_cannot_be_read_are_a_failure_that_is_tried_again() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.unreadable = "No buffer space available"
        await changed(vipd, DNS, WEB)
        assert "No buffer space" in (await vipd.status())["message"]
        vipd.kernel.unreadable = ""
        await asyncio.sleep(35)
        assert vipd.kernel.names() == {"dns", "web"}

    running(story, lambda vipd: vipd.declare(DNS), simulated=True)


def test_a_refused_service_keeps_its_last_good_rules_until_it_says_something_else() -> None:
    bad = block("10.96.0.11", "web", "10.244.9.9")

    def refuses(forwarding: Forwarding) -> str:
        return "no" if any(e.address == "10.244.9.9" for e in forwarding.endpoints) else ""

    async def story(vipd: Vipd) -> None:
        before = vipd.kernel.serving()
        vipd.kernel.refuses = refuses
        await changed(vipd, DNS, bad)
        assert vipd.kernel.serving() == before
        assert (await vipd.status())["state"] == "degraded"
        view = (await vipd.service("web"))["status"]
        assert (view["state"], "no" in view["message"]) == ("quarantined", True)
        await changed(vipd, block("10.96.0.10", "dns", "10.244.0.9"), bad)
        assert vipd.kernel.serving() == before | {"dns 10.96.0.10:53/udp": {"10.244.0.9:53": 1}}
        await changed(vipd, DNS, WEB)
        assert (await vipd.status())["state"] == "in-sync", "another version is tried at once"

    running(story, lambda vipd: vipd.declare(DNS, WEB))


def test_a_refused_service_is_tried_again_with_growing_pauses_up_to_a_minute() -> None:
    async def story(vipd: Vipd) -> None:
        tries = list[float]()

        def refuses(forwarding: Forwarding) -> str:
            if forwarding.key.service == "web":
                tries.append(asyncio.get_running_loop().time())
                return "no"
            return ""

        vipd.kernel.refuses = refuses
        await changed(vipd, DNS, WEB)
        for number in range(10):
            await vipd.add({"name": f"n{number}", "address": f"10.96.1.{number}", "ports": [80]})
            await asyncio.sleep(1)
        assert len(tries) == 5, "changes of others neither bring a try forward nor put it off"
        await asyncio.sleep(300)
        assert "web" not in vipd.kernel.names()
        pauses = [later - earlier for earlier, later in pairwise(tries)]
        assert pauses == sorted(pauses)
        assert pauses[0] < 2
        assert pauses[-1] == pytest.approx(60, abs=1)
        assert sum("web is quarantined" in record.getMessage() for record in vipd.journal) == 1
        vipd.kernel.refuses = lambda forwarding: ""
        await asyncio.sleep(61)
        assert vipd.kernel.names() > {"dns", "web"}, "nobody has to change or reload anything"
        writes = len(vipd.kernel.writes)
        await asyncio.sleep(120)
        assert len(vipd.kernel.writes) == writes

    running(story, lambda vipd: vipd.declare(DNS), simulated=True)
