"""Scrapes over TCP, as Prometheus makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import ClientSession

from tests.observe.page.examples import mixed
from tests.observe.page.watched import Watched, free_place, until, watched
from vipd.observe.metrics.event_counts import MetricCounters
from vipd.observe.metrics.scrape import Metrics

Story = Callable[[ClientSession, str], Awaitable[None]]


def run_story(story: Story) -> Watched:
    async def run() -> Watched:
        async with watched(mixed()) as world:
            tally = MetricCounters(world.reconciler, (world.source,))
            metrics = Metrics(world.reconciler, (world.source,), tally, world.dataplane, world.read_flows)
            place = free_place()
            listener = metrics.listener(place, {"lb1", "lb1.example.com"})
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

    assert run_story(story).counted == 2, "each scrape reads the counts anew"


def test_several_at_once_are_answered_one_after_the_other() -> None:
    async def story(session: ClientSession, url: str) -> None:
        async def one() -> int:
            async with session.get(url + "metrics") as answer:
                return len(await answer.read())

        assert all(size > 1000 for size in await asyncio.gather(*(one() for _ in range(8))))

    run_story(story)


def test_there_is_nothing_else_and_nothing_to_change() -> None:
    async def story(session: ClientSession, url: str) -> None:
        for method, path, status in (("GET", "", 404), ("GET", "state", 404), ("POST", "metrics", 405)):
            async with session.request(method, url + path) as answer:
                assert answer.status == status
        async with session.head(url + "metrics") as answer:
            assert (answer.status, await answer.read()) == (200, b"")

    run_story(story)


SCRAPER = {"User-Agent": "Prometheus/2.42.0", "X-Prometheus-Scrape-Timeout-Seconds": "10"}
BROWSERS = (
    {"Accept-Language": "en", "User-Agent": "x"},
    {"Accept-Language": "", "User-Agent": "x"},  # as a script may set it, which cannot leave it out
    {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:109.0) Gecko/20100101 Firefox/115.0"},
    {"Origin": "http://rebound.example", "User-Agent": "x"},
)


def test_prometheus_may_use_any_name_and_a_web_page_none_but_this_hosts_own() -> None:
    async def status(session: ClientSession, url: str, host: str, headers: dict[str, str]) -> int:
        async with session.get(url + "metrics", headers={**headers, "Host": host}) as answer:
            return answer.status

    async def story(session: ClientSession, url: str) -> None:
        for host in ("lb1.example.com:9253", "lb.of-all.example", "10.0.0.1:9253", "", "[::1"):
            assert await status(session, url, host, SCRAPER) == 200
        for headers in BROWSERS:
            for host in ("127.0.0.1:9253", "localhost:9253", "LB1:9253", "lb1.example.com", "[::1]:1"):
                assert await status(session, url, host, headers) == 200
            for host in ("rebound.example:9253", "lb1.rebound.example", "192.0.2.7", "", "x" * 5000):
                assert await status(session, url, host, headers) == 421

    run_story(story)
