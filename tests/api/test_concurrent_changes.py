"""Requests that come while a step is under way: each builds on what the ones before have stored."""

from __future__ import annotations

import asyncio
from functools import partial

from tests.api.specs import DNS, WEB, stored
from tests.lab.inside import Answer, Vipd, running

BACKENDS = "/v1/services/kube-system%2Fkube-dns/backends"
ONE = {**WEB, "name": "one"}
PAIRS: dict[str, tuple[list[tuple[str, str, object]], list[int]]] = {
    "two adds cannot take one frontend": (
        [("POST", "/v1/services", {"service": {**WEB, "name": name}}) for name in ("one", "two")],
        [200, 409],
    ),
    "two adds cannot take one name": (
        [
            ("POST", "/v1/services", {"service": {**WEB, "name": "one", "address": f"10.96.1.{n}"}})
            for n in (1, 2)
        ],
        [200, 409],
    ),
    "two weights are both kept": (
        [("PATCH", f"{BACKENDS}/10.244.0.{n}", {"weight": n + 2}) for n in (5, 6)],
        [200, 200],
    ),
    "an add after a remove is a change": (
        [("DELETE", "/v1/services/web", None), ("POST", "/v1/services", {"service": WEB})],
        [200, 200],
    ),
    "a reload does not disturb the step": ([("POST", "/v1/reload", None)], [200]),
}


async def during_a_step(vipd: Vipd, requests: list[tuple[str, str, object]]) -> list[Answer]:
    """Send requests one after the other while the kernel is being written; their answers."""
    vipd.kernel.gate.clear()
    vipd.kernel.writing.clear()
    other = {**WEB, "name": "other", "address": "10.96.0.99"}
    tasks = [asyncio.create_task(vipd.add(other))]
    await vipd.kernel.writing.wait()
    for method, path, body in requests:
        tasks.append(asyncio.create_task(vipd.ask(method, path, body)))
        await asyncio.sleep(0.05)
    vipd.kernel.gate.set()
    return [await task for task in tasks][1:]


async def story_of(vipd: Vipd, requests: list[tuple[str, str, object]]) -> list[int]:
    """The statuses; what is stored, shown and written is the same in the end."""
    assert (await vipd.add(DNS)).status == 200
    if requests[0][0] == "DELETE":
        assert (await vipd.add(WEB)).status == 200
    answers = await during_a_step(vipd, requests)
    services = {each["name"]: each for each in (await vipd.ask("GET", "/v1/services")).body["services"]}
    assert services.keys() == stored(vipd) == vipd.kernel.names()
    weights = [backend["weight"] for backend in services["kube-system/kube-dns"]["spec"]["backends"][1:2]]
    assert weights == ([8] if requests[0][0] == "PATCH" else [2])
    assert ("web" in services) is (requests[0][0] == "DELETE")
    return [answer.status for answer in answers]


def test_each_request_sees_what_the_one_before_it_stored() -> None:
    found = {case: running(partial(story_of, requests=requests)) for case, (requests, _) in PAIRS.items()}
    assert found == {case: statuses for case, (_, statuses) in PAIRS.items()}
