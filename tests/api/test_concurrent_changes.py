"""Requests that come while a step is under way: each must build on what the ones before have stored."""

from __future__ import annotations

import asyncio

from tests.api.serving import DNS, PATIENCE_SECONDS, WEB, Answer, Api, served


async def during_a_step(api: Api, *requests: tuple[str, str, object]) -> list[Answer]:
    """Send requests one after the other while the kernel is being written; their answers."""
    api.dataplane.gate = asyncio.Event()
    api.dataplane.kernel = {}
    api.reconciler.request_sync()
    api.dataplane.entered.clear()
    await asyncio.wait_for(api.dataplane.entered.wait(), PATIENCE_SECONDS)
    tasks, before = [], api.begun
    for number, (method, path, body) in enumerate(requests, 1):
        tasks.append(asyncio.create_task(api.ask(method, path, body)))
        await api.until(lambda number=number: api.begun == before + number)  # type: ignore[misc]
        await asyncio.sleep(0.05)
    api.dataplane.gate.set()
    return [await task for task in tasks]


def test_two_adds_at_once_cannot_take_one_frontend() -> None:
    async def story(api: Api) -> None:
        assert (await api.add(DNS)).status == 200
        first, second = ({**WEB, "name": "one"}, {**WEB, "name": "two"})
        answers = await during_a_step(
            api, ("POST", "/v1/services", {"service": first}), ("POST", "/v1/services", {"service": second})
        )
        assert [a.status for a in answers] == [200, 409]
        assert api.stored() == {"kube-system/kube-dns", "one"}

    served(story)


def test_two_adds_at_once_cannot_take_one_name() -> None:
    async def story(api: Api) -> None:
        assert (await api.add(DNS)).status == 200
        other = {**WEB, "address": "10.96.0.12"}
        answers = await during_a_step(
            api, ("POST", "/v1/services", {"service": WEB}), ("POST", "/v1/services", {"service": other})
        )
        assert [a.status for a in answers] == [200, 409]

    served(story)


def test_two_weights_set_at_once_are_both_kept() -> None:
    async def story(api: Api) -> None:
        assert (await api.add(DNS)).status == 200
        path = "/v1/services/kube-system%2Fkube-dns/backends"
        answers = await during_a_step(
            api,
            ("PATCH", f"{path}/10.244.0.5", {"weight": 7}),
            ("PATCH", f"{path}/10.244.0.6", {"weight": 9}),
        )
        assert [a.status for a in answers] == [200, 200]
        spec = (await api.ask("GET", "/v1/services/kube-system%2Fkube-dns")).body["service"]["spec"]
        assert spec["backends"][:2] == [
            {"address": "10.244.0.5", "weight": 7},
            {"address": "10.244.0.6", "weight": 9},
        ]

    served(story)


def test_an_add_right_after_a_remove_is_not_unchanged() -> None:
    async def story(api: Api) -> None:
        assert (await api.add(WEB)).status == 200
        assert (await api.add(DNS)).status == 200
        await during_a_step(
            api, ("DELETE", "/v1/services/web", None), ("POST", "/v1/services", {"service": WEB})
        )
        assert "web" in api.stored()

    served(story)


def test_a_reload_does_not_disturb_a_step_under_way() -> None:
    async def story(api: Api) -> None:
        assert (await api.add(DNS)).status == 200
        api.dataplane.misuse.clear()
        await during_a_step(api, ("POST", "/v1/reload", None))
        assert api.dataplane.misuse == [], "something else than forget() came while the kernel was written"

    served(story)
