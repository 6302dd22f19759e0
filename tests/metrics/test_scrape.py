"""Scrapes over TCP, as Prometheus makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import ClientSession

from tests.page.examples import mixed
from tests.page.watched import Watched, free_place, until, watched
from vipd.observe.metrics.scrape import Metrics
from vipd.observe.metrics.tally import Tally

Story = Callable[[ClientSession, str], Awaitable[None]]


def lived(story: Story) -> Watched:
    async def run() -> Watched:
        async with watched(mixed()) as world:
            tally = Tally(world.reconciler, (world.source,))
            metrics = Metrics(world.reconciler, (world.source,), tally, world.dataplane, world.read_flows)
            place = free_place()
            listener = metrics.listener(place)
            task = asyncio.create_task(listener.run())
            await until(lambda: listener.open)
            async with ClientSession() as session:
                await story(session, f"http://{place}/")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return world

    return asyncio.run(asyncio.wait_for(run(), 120))


def test_a_scrape() -> None:
    async def story(session: ClientSession, url: str) -> None:
        async with session.get(url + "metrics") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert answer.headers["Content-Encoding"] == "gzip"
            text = await answer.text()
        assert "\nvipd_in_sync 1.0\n" in text
        assert "\nprocess_resident_memory_bytes " in text
        async with session.get(url + "metrics", headers={"Accept-Encoding": "identity"}) as answer:
            assert "Content-Encoding" not in answer.headers
            assert "\nvipd_in_sync 1.0\n" in await answer.text()

    assert lived(story).counted == 2, "each scrape reads the counts anew"


def test_several_at_once_are_answered_one_after_the_other() -> None:
    async def story(session: ClientSession, url: str) -> None:
        async def one() -> int:
            async with session.get(url + "metrics") as answer:
                return len(await answer.read())

        assert all(size > 1000 for size in await asyncio.gather(*(one() for _ in range(8))))

    lived(story)


def test_there_is_nothing_else_and_nothing_to_change() -> None:
    async def story(session: ClientSession, url: str) -> None:
        for method, path, status in (("GET", "", 404), ("GET", "state", 404), ("POST", "metrics", 405)):
            async with session.request(method, url + path) as answer:
                assert answer.status == status
        async with session.head(url + "metrics") as answer:
            assert (answer.status, await answer.read()) == (200, b"")

    lived(story)
