"""Long answers and large changes: what one user asks for many times costs as much as once, and delays nobody
else's small changes."""

from __future__ import annotations

import asyncio
import io
import json
import time
from functools import cache

from tests.api.specs import WEB, stored
from tests.faults.instrumented import standstills
from tests.lab.inside import Vipd, running
from tests.lab.stories import story_of
from tests.model.samples import many_declared

READERS, FEW, MANY = 40, 300, 2000


def many(vipd: Vipd, number: int = MANY) -> None:
    (vipd.services_dir / "many.yaml").write_text(many_declared(number, 3))


@cache
def body(number: int) -> bytes:
    """A change of so many services, of a large body."""
    spec = {**WEB, "backends": [f"10.128.0.{n}" for n in range(1, 6)]}
    specs = [{**spec, "name": f"s{n}", "address": f"10.97.{n >> 8}.{n & 255}"} for n in range(number)]
    return json.dumps({"services": specs}).encode()


def test_many_readers_cost_one_answer_which_is_never_of_an_earlier_state() -> None:
    async def services(vipd: Vipd) -> int:
        async with vipd.session.get("http://vipd/v1/services") as response:
            return (await response.read()).count(b'"owner"')

    async def story(vipd: Vipd) -> None:
        for number in range(1, 3):
            added = {**WEB, "name": f"w{number}", "address": f"10.250.0.{number}"}
            assert (await vipd.add(added)).status == 200
            began = time.thread_time()
            assert await services(vipd) == FEW + number
            alone, began = time.thread_time() - began, time.thread_time()
            assert (await vipd.add({**added, "backends": []})).status == 409
            await vipd.ask("PATCH", f"/v1/services/w{number}", {"service": {"backends": ["10.244.0.1"]}})
            began = time.thread_time()
            counts = await asyncio.gather(*(services(vipd) for _ in range(READERS)))
            assert set(counts) == {FEW + number}
            assert time.thread_time() - began < READERS / 2 * alone
            exported = (await vipd.ask("GET", "/v1/export")).body["services"]
            assert added["name"] in [spec["name"] for spec in exported]
        assert (await vipd.ask("DELETE", "/v1/services/w1")).status == 200
        assert await services(vipd) == FEW + 1

    running(story, lambda vipd: many(vipd, FEW))


@story_of(running)
async def test_small_changes_pass_large_ones(vipd: Vipd) -> None:
    numbers = (MANY - 2, MANY - 1, MANY)
    assert all(map(body, numbers)), "made before the time that counts"
    done = []

    async def large(number: int, query: str) -> None:
        url = f"http://vipd/v1/apply{query}"
        async with vipd.session.post(url, data=io.BytesIO(body(number))) as response:
            assert response.status == 200
        done.append(number)

    tasks = [asyncio.create_task(large(number, "?dry_run=1")) for number in numbers[:2]]
    tasks.append(asyncio.create_task(large(numbers[2], "")))
    await asyncio.sleep(0.05)
    assert (await vipd.add({**WEB, "address": "10.250.0.1"})).body["applied"] is True
    assert len(done) < 3
    await asyncio.gather(*tasks)
    assert len(stored(vipd)) == len(vipd.kernel.names()) == MANY + 1


def test_numbers_of_many_services_do_not_hold_the_loop() -> None:
    """In one piece they held it for 283 ms at 10,000 services."""

    async def story(vipd: Vipd) -> None:
        task = asyncio.current_task()
        assert task
        task.set_name("client")
        vipd.kernel.new_flows = {("bench/web-7", "10.128.0.32:8080"): 7}
        answers = [asyncio.create_task(vipd.ask("GET", "/v1/stats"), name="client") for _ in range(2)]
        for answer in await asyncio.gather(*answers):
            assert len(answer.body["services"]) == MANY

    async def loaded(vipd: Vipd) -> None:
        with standstills("client") as found:
            await story(vipd)
        assert found == []

    running(loaded, many)
