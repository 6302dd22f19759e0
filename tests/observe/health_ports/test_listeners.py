from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest
from aiohttp import web

from tests.observe.health_ports.asking import ask, free_port, refused, running, taken, until
from vipd.host.descriptors import DescriptorLimits
from vipd.observe import listeners as room
from vipd.observe.listeners import ListenAddress, Listeners


async def hello(request: web.BaseRequest) -> web.Response:
    """The port asked at."""
    return web.Response(text=str(request.get_extra_info("sockname")[1]))


def run_story(story: Callable[[Listeners], Awaitable[None]]) -> None:
    """Run a story beside listeners that answer with their port."""

    async def run() -> None:
        listeners = Listeners(hello)
        async with running(listeners):
            await story(listeners)

    asyncio.run(asyncio.wait_for(run(), 200))


def place(address: str = "127.0.0.1") -> ListenAddress:
    return ListenAddress(address, free_port())


def test_places_are_opened_and_closed_as_wanted_and_kept_when_wanted_still() -> None:
    a, b, c = place(), place(), place("::1")

    async def story(listeners: Listeners) -> None:
        listeners.set_addresses({a: "a", b: "b"})
        await until(lambda: listeners.open == {a, b}, "both open")
        assert (await ask(a)).body == str(a.port).encode()
        kept = listeners._open[b]
        listeners.set_addresses({b: "b", c: "c"})
        await until(lambda: listeners.open == {b, c}, "a closed, c open")
        assert await refused(a)
        assert (await ask(c)).body == str(c.port).encode()
        assert listeners._open[b] is kept, "a port that is wanted still was reopened: a check may be refused"
        listeners.set_addresses({})
        await until(lambda: not listeners.open, "all closed")
        assert await refused(b)

    run_story(story)


def test_all_is_closed_in_the_end() -> None:
    one = place()

    async def run() -> None:
        listeners = Listeners(hello)
        async with running(listeners):
            listeners.set_addresses({one: "x"})
            await until(lambda: listeners.open, "open")
        assert not listeners.open
        assert await refused(one)

    asyncio.run(asyncio.wait_for(run(), 200))


def test_requests_that_fail_are_answered_logged_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    one, failing = place(), [True]

    async def answer(_: web.BaseRequest) -> web.Response:
        if failing:
            raise KeyError("nobody expects it")
        return web.Response(text="well")

    async def run() -> None:
        listeners = Listeners(answer)
        async with running(listeners):
            listeners.set_addresses({one: "x"})
            await until(lambda: listeners.open, "open")
            for _ in range(20):
                assert (await ask(one)).body == b"internal error; see vipd's log\n"
            (warning,) = listeners.warnings
            assert "internal error while answering: KeyError" in warning
            failing.clear()
            assert (await ask(one)).body == b"well"
            assert listeners.warnings == ()

    asyncio.run(asyncio.wait_for(run(), 200))
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_a_busy_place_is_a_warning_and_had_once_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RETRY_SECONDS", 0.05)
    busy, other = place(), place()

    async def story(listeners: Listeners) -> None:
        with closing(taken(busy)):
            listeners.set_addresses({busy: "the health port of dns", other: "x"})
            await until(lambda: listeners.warnings, "a warning")
            (warning,) = listeners.warnings
            assert f"the health port of dns cannot listen on {busy}: Address already in use" in warning
            assert "ss -ltnp" in warning
            assert (await ask(other)).status == 200, "the others are served meanwhile"
        await until(lambda: busy in listeners.open, "open after a retry")
        assert listeners.warnings == ()
        assert (await ask(busy)).status == 200

    run_story(story)


def test_the_warning_goes_when_the_place_is_wanted_no_more() -> None:
    busy = place()

    async def story(listeners: Listeners) -> None:
        with closing(taken(busy)):
            listeners.set_addresses({busy: "x"})
            await until(lambda: listeners.warnings, "a warning")
            listeners.set_addresses({})
            await until(lambda: not listeners.warnings, "no warning")

    run_story(story)


def test_an_address_of_another_host_is_a_warning() -> None:
    async def story(listeners: Listeners) -> None:
        listeners.set_addresses({ListenAddress("192.0.2.77", 8080): "x"})
        await until(lambda: listeners.warnings, "a warning")
        assert "Cannot assign" in listeners.warnings[0]
        assert "ss -ltnp" not in listeners.warnings[0]

    run_story(story)


def test_both_families_share_a_port() -> None:
    port = free_port()
    both = {ListenAddress("0.0.0.0", port): "x", ListenAddress("::", port): "x"}

    async def story(listeners: Listeners) -> None:
        listeners.set_addresses(both)
        await until(lambda: listeners.open == both.keys() or listeners.warnings, "open")
        assert listeners.warnings == ()
        for address in ("127.0.0.1", "::1"):
            assert (await ask(ListenAddress(address, port))).status == 200

    run_story(story)


def test_a_connection_ends_after_one_answer() -> None:
    one = place()

    async def story(listeners: Listeners) -> None:
        listeners.set_addresses({one: "x"})
        await until(lambda: listeners.open, "open")
        reply = await ask(one)  # reads to the end of the connection
        assert reply.headers["connection"] == "close"

    run_story(story)


def test_an_author_has_a_share_of_the_places_and_leaves_some_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "raise_limit", lambda: DescriptorLimits(clients=100, ports=8, probes=100))
    many, one = [place() for _ in range(20)], place()
    authors = dict.fromkeys(many, "file:/greedy.yaml")

    async def story(listeners: Listeners) -> None:
        listeners.set_addresses(dict.fromkeys(many, "a port"), authors)
        await until(lambda: len(listeners.open) == 4, "a share is open")
        listeners.set_addresses(
            {**dict.fromkeys(many, "a port"), one: "the other port"}, {**authors, one: "file:/calm.yaml"}
        )
        await until(lambda: one in listeners.open, "the other's port is open")
        assert listeners.open - {one} == set(many[:4]), "the first ones"
        (warning,) = listeners.warnings
        assert warning.startswith(
            f"a port cannot listen on {many[4]}, nor can 15 others of file:/greedy.yaml: "
        )
        assert len(caplog.records) == 1

    run_story(story)
