"""Events of a vipd as the API gives them: what a query picks, streams, and followers that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import StreamReader

from tests.faults.instrumented import standstills
from tests.lab.inside import Vipd, running
from tests.model.samples import HEAD
from tests.observe.watching import block

Json = dict[str, Any]
QUEUE = 500
"""So many events wait for a follower at most."""


async def events(vipd: Vipd, query: str = "") -> list[Json]:
    answer = await vipd.ask("GET", f"/v1/events{query}")
    assert answer.status == 200, answer
    return list(answer.body["events"])


async def reasons(vipd: Vipd, query: str) -> list[str]:
    return [event["reason"] for event in await events(vipd, query)]


async def next_event(lines: StreamReader) -> Json:
    """The next event of a stream, heartbeats passed over."""
    while True:
        line = await lines.readline()
        assert line, "the stream has ended"
        if event := json.loads(line).get("event"):
            return dict(event)


async def change(vipd: Vipd, number: int) -> None:
    """One event: an override, whose reason is its number."""
    body = {"address": f"10.244.0.{number}", "weight": 2, "reason": f"number {number}"}
    assert (await vipd.ask("POST", "/v1/overrides", body)).status == 200


CHANGING = block("web", 1, *(f"10.244.0.{number}" for number in range(100)))
"""Its backends are those that `change` is about."""


async def refuse(vipd: Vipd, numbers: Iterable[int], size: int = 900) -> None:
    """An event for each number, of the file of this name, all at once."""
    for number in numbers:
        text = f"{HEAD}- {{name: a, {'x' * size}: 1}}\n"
        (vipd.services_dir / f"{number}.yaml").write_text(text)
    assert (await vipd.reload()).status == 422


def numbers_of(refused: Iterable[Json]) -> list[int]:
    return sorted(int(Path(event["unit"]).stem) for event in refused if event["unit"])


def test_what_a_query_picks() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.declare(block("web", 10, "10.244.0.11"), name="web.yaml")
        await vipd.reload()
        await vipd.add({"name": "other", "address": "10.96.0.20", "ports": [80], "backends": ["10.244.0.12"]})
        vipd.declare(block("web", 10, "10.244.0.1100"), name="web.yaml")
        await vipd.reload()
        order = {"address": "10.244.0.11", "weight": 2, "reason": "of its backend"}
        await vipd.ask("POST", "/v1/overrides", order)
        await vipd.ask("POST", "/v1/overrides", {"service": "other", "backend": "10.244.0.12", "weight": 3})
        every = await events(vipd)
        names = [event["event"] for event in every]
        added, refused, of_backend = (
            next(e for e in every if e["event"] == name and e["services"] == services)
            for name, services in (
                ("service-added", ["web"]),
                ("declaration-refused", []),
                ("override-given", ["web"]),
            )
        )
        of_other = every[-1]
        assert await events(vipd, "?limit=2") == every[-2:]
        assert await events(vipd, "?limit=0") == []
        about_web = [added, refused, of_backend]
        assert await events(vipd, "?service=web") == about_web, names
        assert await events(vipd, "?service=10.96.0.10:80/tcp&limit=1") == [of_backend]
        assert of_other in await events(vipd, "?service=other")
        assert await events(vipd, f"?since={quote(of_backend['time'])}") == [of_backend, of_other]
        assert await events(vipd, f"?after={refused['id']}") == every[every.index(refused) + 1 :]
        file = vipd.services_dir / "web.yaml"
        assert added == {
            "id": added["id"],
            "time": added["time"],
            "event": "service-added",
            "level": "info",
            "services": ["web"],
            "backends": [],
            "unit": f"file:{file}",
            "cause": f"file {file}:3",
            "reason": "1 backend, 1 unchecked",
            "count": 1,
            "first": added["id"],
            "since": added["time"],
        }
        for wrong in ("since=soon", "after=-1", "limit=x", "follow=yes", "colour=red"):
            assert (await vipd.ask("GET", f"/v1/events?{wrong}")).kind == "malformed", wrong

    running(story, lambda vipd: vipd.declare(block("first", 1, "10.244.0.5")))


def test_a_stream_begins_with_what_is_kept_and_beats_every_fifteen_seconds() -> None:
    async def story(vipd: Vipd) -> None:
        for number in range(5):
            await change(vipd, number)
        async with vipd.session.get("http://vipd/v1/events?follow=1&limit=2") as response:
            lines = response.content
            first = json.loads(await lines.readline())
            kept = [await next_event(lines) for _ in range(2)]
            assert [event["reason"] for event in kept] == [f"weight 2 (number {number})" for number in (3, 4)]
            assert first["last"] == kept[-1]["id"]
            began = asyncio.get_running_loop().time()
            assert set(json.loads(await lines.readline())) == {"heartbeat"}
            assert asyncio.get_running_loop().time() - began == 15
            await change(vipd, 5)
            assert (await next_event(lines))["reason"] == "weight 2 (number 5)"

    running(story, lambda vipd: vipd.declare(CHANGING), simulated=True)


def test_followers_who_come_while_much_happens_miss_nothing_and_hear_nothing_twice() -> None:
    async def story(vipd: Vipd) -> None:
        async def follow(late: float) -> list[int]:
            await asyncio.sleep(late)
            async with vipd.session.get("http://vipd/v1/events?follow=1") as response:
                seen: list[Json] = []
                while not seen or seen[-1]["reason"] != "weight 2 (number 99)":
                    seen.append(await next_event(response.content))
                return [event["id"] for event in seen]

        async def happen() -> None:
            for number in range(100):
                await change(vipd, number)

        *followed, _ = await asyncio.gather(*(follow(n / 30) for n in range(12)), happen())
        kept = [event["id"] for event in await events(vipd)]
        assert [ids for ids in followed if ids != kept] == []

    running(story, lambda vipd: vipd.declare(CHANGING))


def unread(vipd: Vipd) -> socket.socket:
    """A follower that never reads, with the least room in its socket."""
    idle = socket.socket(socket.AF_UNIX)
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    idle.connect(str(vipd.socket))
    idle.sendall(b"GET /v1/events?follow=1&limit=0 HTTP/1.1\r\nHost: vipd\r\nConnection: close\r\n\r\n")
    return idle


def test_a_follower_that_never_reads_is_let_go_and_others_miss_nothing() -> None:
    async def story(vipd: Vipd) -> None:
        with unread(vipd) as idle:
            async with vipd.session.get("http://vipd/v1/events?follow=1&limit=0") as response:
                await response.content.readline()
                for first in range(0, 1000, 250):
                    numbers = range(first, first + 250)
                    await refuse(vipd, numbers)
                    news = [await next_event(response.content) for _ in (*numbers, "reloaded")]
                    assert numbers_of(news) == list(numbers)
                    await asyncio.sleep(20)
                assert any("has taken nothing for 30 s" in record.getMessage() for record in vipd.journal)
                await vipd.reload()
                assert (await next_event(response.content))["event"] == "reloaded"
            reader, writer = await asyncio.open_unix_connection(sock=idle)
            text = await reader.read()
            writer.close()
            assert 0 < text.count(b'{"event":') < 1000, "the end was cut off"

    running(story, lambda vipd: vipd.declare(CHANGING), simulated=True)


def test_a_follower_that_reads_too_late_gets_what_waited_and_a_note() -> None:
    async def story(vipd: Vipd) -> None:
        with unread(vipd) as idle:
            await asyncio.sleep(1)
            await refuse(vipd, range(1000))
            await asyncio.sleep(1)
            reader, writer = await asyncio.open_unix_connection(sock=idle)
            text = await reader.read()
            writer.close()
        assert QUEUE <= text.count(b'{"event":') < 1000
        assert b'{"dropped": "too far behind' in text

    running(story, lambda vipd: vipd.declare(CHANGING), simulated=True)


def test_many_stored_events_do_not_hold_the_loop(tmp_path: Path) -> None:
    async def first(vipd: Vipd) -> dict[str, Any]:
        await refuse(vipd, [1])
        return (await events(vipd))[-2]

    event = running(first, lambda vipd: vipd.declare(CHANGING), tmp_path)
    numbers = range(event["id"] - 2000, event["id"])
    rows = ((str(n).encode(), json.dumps({**event, "id": n, "first": n})) for n in numbers)
    with closing(sqlite3.connect(next(tmp_path.rglob("cache.db")))) as database, database:
        database.executemany("insert into entry values ('event', ?, ?)", rows)

    async def story(vipd: Vipd) -> None:
        asyncio.current_task().set_name("client")  # type: ignore[union-attr]
        with standstills("client") as held_up:
            number = len(await events(vipd))
            assert number > 2000
            async with vipd.session.get("http://vipd/v1/events?follow=1") as response:
                for _ in range(number):
                    await next_event(response.content)
        assert held_up == []

    running(story, lambda vipd: vipd.declare(CHANGING), tmp_path)


def test_an_event_is_kept_whatever_the_level_of_the_log_and_what_it_says_is_harmless_and_bounded() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.failures = [("iptables-restore", "it is\n\x1b[31mred" + "y" * 5000)] * 9
        await vipd.add({"name": "dns", "address": "10.96.0.20", "ports": [80], "backends": ["10.244.0.12"]})
        kept = {event["event"]: event for event in await events(vipd)}
        assert kept["service-added"]["level"] == "info"
        failed = kept["apply-failed"]
        assert (failed["level"], len(failed["reason"])) == ("error", 1000)
        assert r"it is \x1b[31mredyyy" in failed["reason"]

    running(story, log_level="error")


RUBBISH = (b"\0" * 4096, b'{"id": 5}\n', b"[]\n", b"\xff\xfe\n", b'{"id": "x', b"7\n", b"[" * 100_000)


def test_rubbish_between_is_left_out(tmp_path: Path) -> None:
    async def life(vipd: Vipd) -> list[int]:
        await refuse(vipd, [len(list(vipd.services_dir.iterdir()))])
        return [event["id"] for event in await events(vipd)]

    kept = running(life, lambda vipd: vipd.declare(CHANGING), tmp_path)
    for rubbish in RUBBISH:
        with closing(sqlite3.connect(next(tmp_path.rglob("cache.db")))) as database, database:
            database.execute("insert into entry values ('event', ?, ?)", (b"x" + rubbish[:9], rubbish))
        later = running(life, root=tmp_path)
        assert later[: len(kept)] == kept
        assert later == sorted(set(later))
        kept = later


def test_while_the_disk_takes_nothing_status_says_so_and_no_event_is_lost(tmp_path: Path) -> None:
    async def story(vipd: Vipd) -> None:
        def numbers() -> list[int]:
            return numbers_of(event for event in kept if event["event"] == "declaration-refused")

        file = vipd.state_dir / "cache.db"
        await refuse(vipd, [1])
        file.unlink(missing_ok=True)
        file.mkdir()
        await refuse(vipd, [2, 3, 4])
        await vipd.until_status(lambda status: "cache.db: cannot be written" in str(status["warnings"]))
        kept = await events(vipd)
        assert numbers() == [1, 2, 3, 4]
        file.rmdir()
        await vipd.until_status(lambda status: "cache.db" not in str(status["warnings"]))
        logged = [record.getMessage() for record in vipd.journal]
        assert len([line for line in logged if "cache.db: cannot be written" in line]) == 1

    async def later(vipd: Vipd) -> list[int]:
        return numbers_of(event for event in await events(vipd) if event["event"] == "declaration-refused")

    running(story, lambda vipd: vipd.declare(CHANGING), tmp_path)
    assert running(later, root=tmp_path) == [1, 1, 2, 2, 3, 3, 4, 4], "they are refused again"
