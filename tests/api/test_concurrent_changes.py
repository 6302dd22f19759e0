"""Requests that come while a step is under way: each builds on what the ones before have stored."""

from __future__ import annotations

import asyncio

from tests.api.specs import DNS, WEB, stored
from tests.lab.inside import Answer, Vipd, running

BACKENDS = "/v1/services/kube-system%2Fkube-dns/backends"
PAIRS: dict[str, tuple[list[tuple[str, str, object]], list[int]]] = {
    "two adds cannot take one frontend": (
        [("POST", "/v1/services", {"service": {**WEB, "name": name}}) for name in ("one", "two")],
        [200, 409],
    ),
    "two adds cannot take one name": (
        [("POST", "/v1/services", {"service": {**WEB, "address": f"10.96.1.{n}"}}) for n in (1, 2)],
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


def test_each_request_sees_what_the_one_before_it_stored() -> None:
    for case, (requests, statuses) in PAIRS.items():

        async def story(vipd: Vipd, requests: list[tuple[str, str, object]] = requests) -> list[Answer]:
            assert (await vipd.add(DNS)).status == 200
            if requests[0][0] == "DELETE":
                assert (await vipd.add(WEB)).status == 200
            answers = await during_a_step(vipd, requests)
            names = stored(vipd)
            assert {service["name"] for service in (await vipd.ask("GET", "/v1/services")).body["services"]} == names
            assert vipd.kernel.names() == names
            if case == "two weights are both kept":
                dns = await vipd.service("kube-system%2Fkube-dns")
                assert [backend["weight"] for backend in dns["spec"]["backends"][:2]] == [7, 8]
            if case == "an add after a remove is a change":
                assert "web" in names
            return answers

        assert [answer.status for answer in running(story)] == statuses, case
