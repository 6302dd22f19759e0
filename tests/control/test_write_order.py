"""Small changes are written before large ones, which follow in parts, and nothing that moves is parted."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.api.specs import WEB, stored
from tests.lab.inside import Vipd, running
from tests.model.samples import block
from vipd.model.forwarding import Forwarding

SMALL = block("10.96.0.10", "small", "10.244.0.5")
NEW: dict[str, Any] = {**WEB, "name": "new", "address": "10.96.0.11"}
PART, STEP = 2000, 5000
"""Services, and backends, that one write takes of a load."""


def large(ports: int, address: str = "10.96.0.20", name: str = "large") -> dict[str, Any]:
    """A service each of whose ports takes a write of its own."""
    backends = [f"10.{100 + (n >> 16)}.{n >> 8 & 255}.{n & 255}" for n in range(STEP)]
    named = [{"port": 80 + n, "name": f"p{n}"} for n in range(ports)]
    return {"name": name, "address": address, "ports": named, "backends": backends}


def load(number: int) -> list[str]:
    return [block(f"10.98.{n >> 8}.{n & 255}", f"s{n}", "10.244.0.5") for n in range(number)]


def writes(vipd: Vipd) -> list[set[str]]:
    """The services of each write after the first one."""
    return [{key.service for key in write} for write in vipd.kernel.writes[1:]]


async def during_a_write(vipd: Vipd, first: Any, second: Any) -> tuple[Any, Any]:
    """Begin the second once the first is being written; both as tasks."""
    vipd.kernel.gate.clear()
    vipd.kernel.writing.clear()
    tasks = [asyncio.create_task(first)]
    await vipd.kernel.writing.wait()
    tasks.append(asyncio.create_task(second))
    await asyncio.sleep(0.3)
    vipd.kernel.gate.set()
    return tasks[0], tasks[1]


async def applied(task: asyncio.Task[Any]) -> bool:
    return bool((await task).body["applied"])


def test_what_is_small_is_in_the_kernel_while_what_is_large_is_being_written() -> None:
    async def story(vipd: Vipd) -> None:
        held = list[bool]()

        def hold_after_new(forwarding: Forwarding) -> str:
            if forwarding.key.service == "new" and not held:
                held.append(True)
                vipd.kernel.gate.clear()
            return ""

        vipd.kernel.refuses = hold_after_new
        adding, new = await during_a_write(vipd, vipd.add(large(3)), vipd.add(NEW))
        assert await applied(new)
        assert "new" in vipd.kernel.names()
        assert not adding.done()
        states = [(await vipd.service(name))["status"]["state"] for name in ("large", "new", "small")]
        assert states == ["pending", "unchecked", "unchecked"]
        vipd.kernel.gate.set()
        assert await applied(adding)
        assert (await vipd.status())["state"] == "in-sync"
        assert writes(vipd) == [{"large"}, {"new"}, {"large"}, {"large"}]

    running(story, lambda vipd: vipd.declare(SMALL))


def test_a_small_change_of_another_author_is_written_between_the_parts_of_a_load() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.declare(*load(2 * PART + 500), name="load.yaml")
        loading, new = await during_a_write(vipd, vipd.reload(), vipd.add(NEW))
        assert await applied(new)
        assert len(vipd.kernel.rules) < 2 * PART, "parts of the load are not written"
        assert await applied(loading)
        assert len(vipd.kernel.rules) == 2 * PART + 502
        assert max(map(len, writes(vipd))) <= PART

        vipd.kernel.writes.clear()
        vipd.declare(name="load.yaml")
        (vipd.services_dir / "load.yaml").unlink()
        removing, changed = await during_a_write(
            vipd,
            vipd.reload(),
            vipd.ask("PATCH", "/v1/services/new", {"service": {"backends": ["10.244.0.9"]}}),
        )
        assert await applied(changed)
        assert len(vipd.kernel.rules) > PART // 4, "parts of the load are still there"
        assert await applied(removing)
        assert vipd.kernel.names() == {"small", "new"}
        assert max(map(len, vipd.kernel.writes)) <= PART

    running(story, lambda vipd: vipd.declare(SMALL, name="small.yaml"))


def test_at_the_start_all_is_written_at_once() -> None:
    def prepare(vipd: Vipd) -> None:
        vipd.declare(SMALL, *load(PART + 1))

    async def story(vipd: Vipd) -> None:
        assert (len(vipd.kernel.writes), len(vipd.kernel.rules)) == (1, PART + 2)

    running(story, prepare)


def test_small_changes_in_each_write_keep_no_large_one_out() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.gate.clear()
        tasks = [asyncio.create_task(vipd.add(large(3)))]
        for number in range(10):
            await vipd.kernel.writing.wait()
            spec = {**WEB, "name": f"b{number}", "address": f"10.96.1.{number}"}
            tasks.append(asyncio.create_task(vipd.add(spec)))
            await vipd.until(lambda name=f"b{number}": name in stored(vipd))  # type: ignore[misc]
            vipd.kernel.writing.clear()
            vipd.kernel.gate.set()
            await asyncio.sleep(0)
            vipd.kernel.gate.clear()
        assert sum(key.service == "large" for key in vipd.kernel.rules) == 3
        vipd.kernel.gate.set()
        assert all([await applied(task) for task in tasks])

    running(story, lambda vipd: vipd.declare(SMALL))


def test_a_large_service_that_goes_before_it_is_written_leaves_nothing() -> None:
    async def story(vipd: Vipd) -> None:
        adding, removing = await during_a_write(
            vipd, vipd.add(large(3)), vipd.ask("DELETE", "/v1/services/large")
        )
        assert await applied(removing)
        await adding
        assert vipd.kernel.names() == {"small"}
        assert (await vipd.status())["state"] == "in-sync"

    running(story, lambda vipd: vipd.declare(SMALL))


def test_a_large_service_that_cannot_be_written_is_not_thought_to_be() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.failures = [("iptables-restore", "it fails")] * 2
        added = await vipd.add(large(2))
        assert (added.body["applied"], "it fails" in added.body["message"]) == (False, True)
        assert (await vipd.service("large"))["status"]["state"] == "pending"
        await vipd.until_status(lambda status: status["state"] == "in-sync")
        assert len(vipd.kernel.rules) == 3

    running(story, lambda vipd: vipd.declare(SMALL))


def test_a_part_that_is_refused_is_held_and_what_was_there_stays() -> None:
    async def story(vipd: Vipd) -> None:
        known = dict(vipd.kernel.rules)
        vipd.kernel.refuses = lambda forwarding: "no" if forwarding.key.port_name == "p1" else ""
        await vipd.add(large(3))
        status = await vipd.service("large")
        assert status["status"]["state"] == "quarantined"
        assert {key: f for key, f in vipd.kernel.rules.items() if key.service != "large"} == known
        assert {key.port_name for key in vipd.kernel.rules} == {"", "p0", "p2"}

    running(story, lambda vipd: vipd.declare(SMALL))


def test_an_address_that_moves_is_never_missing_nor_served_twice() -> None:
    """Whatever its old and its new service are, and whatever else waits."""

    async def story(vipd: Vipd) -> None:
        def watch(_: Forwarding) -> str:
            addresses = [a for f in vipd.kernel.rules.values() if f.port == 80 for a in f.addresses]
            twice.extend(a for a in addresses if addresses.count(a) > 1)
            return ""

        twice = list[str]()
        moving = [{**large(1), "name": "one"}, large(1, "10.96.0.21", "two"), {**WEB, "name": "three"}]
        await vipd.ask("POST", "/v1/apply", {"services": moving})
        vipd.kernel.refuses = watch
        for turn in (1, 2, 1):
            addresses = [spec["address"] for spec in moving]
            turned = addresses[turn:] + addresses[:turn]
            moving = [{**spec, "address": to} for spec, to in zip(moving, turned, strict=True)]
            vipd.kernel.writes.clear()
            body = {"services": [*moving, large(2, "10.96.0.40", f"waits{turn}")]}
            assert (await vipd.ask("POST", "/v1/apply", body)).body["applied"]
            (write,) = [w for w in vipd.kernel.writes if any(k.service in ("one", "two", "three") for k in w)]
            assert {key.service for key in write} >= {"one", "two", "three"}
            await vipd.ask("DELETE", f"/v1/services/waits{turn}")

    running(story, lambda vipd: vipd.declare(SMALL))
