"""A change costs what has changed, and next to nothing for what exists beside it: counted in calls, for time
would measure the machine. And what a load keeps in memory is bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.lab.inside import Vipd, running
from tests.model.samples import block, many_declared

FEW, MANY = 100, 400
ETCD = {"endpoints": ["http://etcd:2379"]}
Change = Callable[[Vipd], Awaitable[None]]


@contextmanager
def counted(*kinds: str) -> Iterator[list[int]]:
    """How many functions of Python are called meanwhile, without those that a search for garbage makes.
    `kinds`: what counts besides."""
    calls = [0]

    def note(_frame: object, event: str, _argument: object) -> None:
        calls[0] += event in ("call", *kinds)

    gc.disable()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()


def key(number: int, backend: str = "10.244.0.5") -> str:
    return json.dumps(
        {"address": f"10.97.{number >> 8}.{number & 255}", "ports": ["53/udp"], "backends": [backend]}
    )


async def edit_a_large_file(vipd: Vipd) -> None:
    file = vipd.services_dir / "many.yaml"
    file.write_text(file.read_text().replace("10.128.0.11,", "10.250.0.1,"))
    await vipd.reload()


async def edit_a_small_file(vipd: Vipd) -> None:
    vipd.declare(block("10.99.0.1", "small", "10.244.0.9"), name="small.yaml")
    await vipd.reload()


async def remove_a_small_file(vipd: Vipd) -> None:
    (vipd.services_dir / "small.yaml").unlink()
    await vipd.reload()


async def change_a_key(vipd: Vipd) -> None:
    vipd.etcd.put("/vipd/v1/services/s7", key(7, "10.244.0.9"))
    writes = len(vipd.kernel.writes)
    await vipd.until(lambda: len(vipd.kernel.writes) > writes)


async def drain(vipd: Vipd) -> None:
    order = {"service": "small", "backend": "10.244.0.5", "admin": "draining"}
    assert (await vipd.ask("POST", "/v1/overrides", order)).body["applied"]


CHANGES: dict[str, tuple[Change, int]] = {
    "a service of a large file": (edit_a_large_file, 6),
    "a small file": (edit_a_small_file, 6),
    "a small file that goes": (remove_a_small_file, 6),
    "a key of etcd": (change_a_key, 3),
    "an order": (drain, 3),
}
"""What changes, and how many calls it may take for each service that is there besides. A reload looks whether
any file is another one; a service that changes takes more than a thousand."""


def calls(change: Change, count: int) -> tuple[int, list[set[str]]]:
    """The calls of a change, and the services that it writes."""

    def prepare(vipd: Vipd) -> None:
        (vipd.services_dir / "many.yaml").write_text(many_declared(count))
        vipd.declare(block("10.99.0.1", "small", "10.244.0.5", "10.244.0.6"), name="small.yaml")
        for number in range(count):
            vipd.etcd.put(f"/vipd/v1/services/s{number}", key(number))

    async def story(vipd: Vipd) -> tuple[int, list[set[str]]]:
        assert len(vipd.kernel.rules) == 2 * count + 1
        await vipd.reload()
        await asyncio.sleep(10)
        writes = len(vipd.kernel.writes)
        with counted() as made:
            await change(vipd)
        return made[0], [{k.service for k in write} for write in vipd.kernel.writes[writes:]]

    return running(story, prepare, simulated=True, etcd=ETCD)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_costs_the_same_however_many_services_there_are(name: str) -> None:
    change, most = CHANGES[name]
    few, written = calls(change, FEW)
    many, same = calls(change, MANY)
    assert written == same != []
    assert len(written[0]) == 1
    assert many - few <= most * 2 * (MANY - FEW), f"{few} calls with {FEW} of both, {many} with {MANY}"
    assert few > 1000


def test_a_load_keeps_the_memory_of_its_services_and_no_more() -> None:
    """With five backends each, by all parts of vipd together."""

    def kept(count: int) -> int:
        async def story(vipd: Vipd) -> int:
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            (vipd.services_dir / "many.yaml").write_text(many_declared(count))
            await vipd.reload()
            assert len(vipd.kernel.rules) == count
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        tracemalloc.start()
        try:
            return running(story)
        finally:
            tracemalloc.stop()

    kept(10)
    grown = (kept(300) - kept(100)) // 200
    assert 1000 < grown < 20_000
