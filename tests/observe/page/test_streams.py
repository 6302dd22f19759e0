"""What came later than a version that a viewer knows, by `/state?after=` and by `/stream`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from aiohttp import ClientSession, StreamReader

from tests.lab.inside import PATIENCE_SECONDS, Vipd, running
from tests.observe.page.declared import declared
from tests.observe.watching import free_address, listening, state

STREAMS = 32
"""So many watchers have a stream; further ones ask from time to time."""

Json = dict[str, Any]


async def news(lines: StreamReader, wanted: Callable[[Json], object]) -> Json:
    """The first of a stream's news that are wanted; heartbeats are passed over."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while line := (await lines.readline()).decode():
            if line.startswith("data: {") and wanted(document := json.loads(line.removeprefix("data: "))):
                return dict(document)
    raise AssertionError("the stream has ended")


async def after(vipd: Vipd, first: Json, wanted: Callable[[Json], object]) -> Json:
    """What came after a state, once it is as wanted."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not wanted(later := await state(vipd, first["version"])):  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.02)
    return later


def test_only_what_came_later_is_told() -> None:
    async def story(vipd: Vipd) -> None:
        first = await state(vipd)
        vipd.backends["10.244.1.18:9200"] = "connection refused"
        vipd.declare(declared().replace("  - {name: mail/smtp, address: 10.96.9.25, ports: 25}\n", ""))
        await vipd.reload()
        later = await after(vipd, first, lambda document: document["gone"] and document["services"])
        assert (later["full"], later["gone"]) == (False, ["mail/smtp"])
        assert [service["name"] for service in later["services"]] == ["shop/search"]
        for unknown in ("other-7", f"{first['version']}9999999999999999", "", "x"):
            assert (await state(vipd, unknown))["full"] is True

    running(story, lambda vipd: vipd.declare(declared()), status_page=free_address())


def test_a_stream_tells_of_a_verdict_and_what_a_check_says_although_no_rule_changes() -> None:
    async def story(vipd: Vipd) -> None:
        url = await listening(vipd, "status_page")
        async with ClientSession() as session, session.get(f"{url}stream") as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            first = await news(answer.content, lambda document: document["full"])
            assert len(first["services"]) == 13
            vipd.backends["10.244.1.18:9200"] = "connection refused"
            later = await news(answer.content, lambda n: n["services"] and n["services"][0]["ready"] == 2)
            assert [service["name"] for service in later["services"]] == ["shop/search"]
            vipd.backends["10.244.1.18:9200"] = "no route"
            later = await news(answer.content, lambda n: "no route" in json.dumps(n["services"]))
            assert later["services"][0]["ready"] == 2

    def prepare(vipd: Vipd) -> None:
        vipd.declare(declared())
        vipd.backends["10.244.2.18:9200"] = "connection refused"

    running(story, prepare, status_page=free_address())


def test_further_streams_are_refused_so_that_the_page_asks_instead() -> None:
    async def story(vipd: Vipd) -> None:
        url = await listening(vipd, "status_page")
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(ClientSession())
            for _ in range(STREAMS):
                stream = await stack.enter_async_context(session.get(f"{url}stream"))
                await news(stream.content, lambda document: document["full"])
            async with session.get(f"{url}stream") as refused:
                assert refused.status == 503
            assert (await state(vipd))["full"] is True

    running(story, status_page=free_address())
