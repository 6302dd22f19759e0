"""The API's request about events: what it picks, its stream, and followers that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, StreamReader, UnixConnector, web

from tests.faults.instrumented import standstills
from tests.model.samples import service
from tests.observe.events.made import Clock, occurrence, recorder
from vipd.api import event_routes
from vipd.api.event_routes import EventRoutes
from vipd.api.server import _errors
from vipd.host.containment import Containment
from vipd.observe.events.event import EventRecord
from vipd.observe.events.recorder import MAX_QUEUED, Recorder

PATIENCE_SECONDS = 60.0

WEB = service("web", "10.96.0.10", "/etc/vipd/web.yaml", 3, "10.244.0.11")

Story = Callable[["EventServer"], Awaitable[None]]
Json = dict[str, Any]


class EventServer:
    """The request alone on a socket, and a recorder behind it."""

    def __init__(self, made: Recorder, path: Path, session: ClientSession, runner: web.AppRunner) -> None:
        self.recorder, self.path, self.session, self.runner = made, path, session, runner

    def record(self, number: int, **more: Any) -> None:
        self.recorder.record(occurrence(number, "service-changed", services=(f"s{number}",), **more))

    async def get(self, query: str = "") -> tuple[int, Json]:
        async with self.session.get(f"http://vipd/v1/events{query}") as response:
            return response.status, await response.json()

    async def reasons(self, query: str) -> list[str]:
        return [event["reason"] for event in (await self.get(query))[1]["events"]]


def run_story(story: Story, directory: Path) -> None:
    """Run a story beside the request."""

    async def run() -> None:
        made = recorder(directory, Clock())
        routes = EventRoutes(made, lambda: {"web": WEB})
        app = web.Application(middlewares=[_errors(Containment())])
        app.add_routes(routes.routes())
        app.on_shutdown.append(routes.end)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=4 * PATIENCE_SECONDS)
        await runner.setup()
        path = directory / "s"
        try:
            await web.UnixSite(runner, str(path)).start()
            async with ClientSession(connector=UnixConnector(str(path))) as session:
                await story(EventServer(made, path, session, runner))
        finally:
            await runner.cleanup()
            made.close()

    asyncio.run(asyncio.wait_for(run(), 4 * PATIENCE_SECONDS))


def test_what_a_query_picks(tmp_path: Path) -> None:
    async def story(server: EventServer) -> None:
        for number in range(5):
            server.record(number, reason=str(number))
        about = {"services": ("web",), "reason": "named"}
        server.recorder.record(occurrence(10, "service-changed", **about))
        server.recorder.record(
            occurrence(11, "declaration-refused", unit="file:/etc/vipd/web.yaml", reason="file")
        )
        server.recorder.record(occurrence(12, "override-ended", backends=("10.244.0.11",), reason="address"))
        server.recorder.record(
            occurrence(13, "backend-health", services=("s1",), backends=("10.244.0.11",), reason="other")
        )
        assert len(await server.reasons("")) == 9
        assert await server.reasons("?limit=2") == ["address", "other"]
        assert await server.reasons("?limit=0") == []
        assert await server.reasons("?service=web") == ["named", "file", "address"]
        assert await server.reasons("?service=10.96.0.10:53/udp&limit=1") == ["address"]
        assert await server.reasons("?service=s3") == ["3"]
        assert await server.reasons("?since=2026-01-01T00:00:12Z") == ["address", "other"]
        every = (await server.get())[1]["events"]
        assert await server.reasons(f"?after={every[6]['id']}") == ["address", "other"]
        assert every[5] == {
            "id": every[5]["id"],
            "time": "2026-01-01T00:00:10.000Z",
            "event": "service-changed",
            "level": "info",
            "services": ["web"],
            "backends": [],
            "unit": "",
            "cause": "",
            "reason": "named",
            "count": 1,
            "first": every[5]["id"],
            "since": "2026-01-01T00:00:10.000Z",
        }
        for wrong in ("since=soon", "after=-1", "limit=x", "follow=yes", "colour=red"):
            status, body = await server.get(f"?{wrong}")
            assert (status, body["error"]["kind"]) == (400, "malformed")

    run_story(story, tmp_path)


def test_a_stream_begins_with_what_is_kept_beats_and_ends_with_vipd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_routes, "HEARTBEAT_SECONDS", 0.05)

    async def story(server: EventServer) -> None:
        for number in range(5):
            server.record(number)
        async with server.session.get("http://vipd/v1/events?follow=1&limit=2") as response:
            lines = response.content
            first = json.loads(await lines.readline())
            told = [json.loads(await lines.readline())["event"] for _ in range(2)]
            assert [event["services"] for event in told] == [["s3"], ["s4"]]
            assert first["last"] == told[-1]["id"]
            assert set(json.loads(await lines.readline())) == {"heartbeat"}
            server.record(5)
            assert (await next_event(lines))["services"] == ["s5"]
            stopping = asyncio.create_task(server.runner.cleanup())
            rest = await asyncio.wait_for(lines.read(), PATIENCE_SECONDS)
            assert all("heartbeat" in json.loads(line) for line in rest.splitlines())
            await asyncio.wait_for(stopping, PATIENCE_SECONDS)

    run_story(story, tmp_path)


def test_what_happens_while_the_ring_is_read_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(server: EventServer) -> None:
        read = server.recorder.read

        def read_late() -> list[EventRecord]:
            server.record(1)  # its follower is there already
            return read()

        monkeypatch.setattr(server.recorder, "read", read_late)
        async with server.session.get("http://vipd/v1/events?follow=1") as response:
            assert (await next_event(response.content))["services"] == ["s1"]
            server.record(2)
            assert (await next_event(response.content))["services"] == ["s2"]

    run_story(story, tmp_path)


def unread(path: Path) -> socket.socket:
    """A follower that never reads, with the least room in its socket."""
    idle = socket.socket(socket.AF_UNIX)
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    idle.connect(str(path))
    idle.sendall(b"GET /v1/events?follow=1&limit=0 HTTP/1.1\r\nHost: vipd\r\nConnection: close\r\n\r\n")
    return idle


def test_a_follower_that_never_reads_is_let_go_and_others_miss_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_routes, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(event_routes, "HEARTBEAT_SECONDS", 0.2)  # by which one that has gone is noticed

    async def story(server: EventServer) -> None:
        idle = unread(server.path)
        async with server.session.get("http://vipd/v1/events?follow=1&limit=0") as response:
            await until(lambda: server.recorder.subscriptions == 2)
            json.loads(await response.content.readline())
            for number in range(4000):
                server.record(number, reason="x" * 900)
                assert (await next_event(response.content))["services"] == [f"s{number}"]
            await until(lambda: server.recorder.subscriptions == 1)
            server.record(4001)
            assert (await next_event(response.content))["services"] == ["s4001"]
        idle.close()
        await until(lambda: server.recorder.subscriptions == 0)

    run_story(story, tmp_path)


def test_a_follower_that_reads_too_late_gets_what_waited_and_a_note(tmp_path: Path) -> None:
    async def story(server: EventServer) -> None:
        idle = unread(server.path)
        await until(lambda: server.recorder.subscriptions == 1)
        for number in range(4000):
            server.record(number, reason="x" * 900)
            if number % 100 == 0:
                await asyncio.sleep(0)
        reader, writer = await asyncio.open_unix_connection(sock=idle)
        said = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        writer.close()
        assert said.count(b'"event":') >= MAX_QUEUED
        assert said.count(b'"event":') < 4000
        assert b'{"dropped": "too far behind' in said

    run_story(story, tmp_path)


async def next_event(lines: StreamReader) -> Json:
    """The next event of a stream, heartbeats passed over."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if found := json.loads(await lines.readline()).get("event"):
                return dict(found)


async def until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


def test_many_stored_events_do_not_hold_the_loop(tmp_path: Path) -> None:
    """7,000 of them held it for 181 ms."""

    async def story(server: EventServer) -> None:
        task = asyncio.current_task()
        assert task
        task.set_name("client")
        for number in range(5000):
            server.record(number, reason=str(number))
        assert len(await server.reasons("")) == 5000
        async with server.session.get("http://vipd/v1/events?follow=1") as response:
            await response.content.readline()
            lines = [json.loads(await response.content.readline()) for _ in range(5000)]
            assert [line["event"]["reason"] for line in lines] == [str(number) for number in range(5000)]
            server.record(5000, reason="later")
            assert json.loads(await response.content.readline())["event"]["reason"] == "later"

    with standstills("client") as found:
        run_story(story, tmp_path)
    assert found == []
