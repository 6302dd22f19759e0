"""The page's server: whom it answers, what it says, and what never."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.observe.page.examples import DRAINED, UNHEALTHY, mixed, web
from tests.observe.page.watched import PAGE, PATIENCE_SECONDS, Watched, until, watched
from vipd.host import supervisor
from vipd.model.backend_status import BackendStatus
from vipd.model.check import Check, HttpProbe
from vipd.model.service import Service
from vipd.observe.browsers import own_name
from vipd.observe.page import page_state as room
from vipd.observe.page import server
from vipd.observe.page.server import content_policy

SECRET = "hunter2"
START = datetime(2026, 1, 1, tzinfo=UTC)

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(room, "WAIT_TIMEOUT_SECONDS", PATIENCE_SECONDS)


def run_story(story: Callable[[Watched], Awaitable[None]], *services: Service) -> None:
    async def run() -> None:
        async with watched(services or mixed()) as world:
            await story(world)

    asyncio.run(asyncio.wait_for(run(), 2 * PATIENCE_SECONDS))


async def state_after(world: Watched, first: Json, wanted: Callable[[Json], object]) -> Json:
    """What came after a state, once it is as wanted."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not wanted(later := await world.state(first["version"])):  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.02)
        return later


def by_name(state: Json) -> dict[str, Json]:
    return {service["name"]: service for service in state["services"]}


class Stream:
    """The lines of /stream, as the page hears them."""

    def __init__(self, lines: asyncio.StreamReader | Any) -> None:
        self._lines = lines

    async def next(self) -> Json:
        """The next news; heartbeats are passed over."""
        while True:
            line = (await asyncio.wait_for(self._lines.readline(), PATIENCE_SECONDS)).decode()
            assert line, "the stream has ended"
            if line.startswith("data: {"):
                found: Json = json.loads(line.removeprefix("data: "))
                return found

    async def news(self, wanted: Callable[[Json], object]) -> Json:
        """The first news that are wanted."""
        while not wanted(found := await self.next()):
            pass
        return found


def test_the_page_comes_with_a_policy_that_lets_nothing_else_run() -> None:
    async def story(world: Watched) -> None:
        status, headers, html = await world.get()
        assert status == 200
        policy = headers["Content-Security-Policy"]
        assert policy == content_policy(html)
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", html) == []
        assert re.findall(r"<[^>]+\s(?:on\w+|style)=", html.split("<script>")[0]) == []

    run_story(story)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(method: str) -> None:
    async def story(world: Watched) -> None:
        async with ClientSession() as session, session.request(method, world.url + "state") as answer:
            assert answer.status == 405
            assert answer.headers["Allow"] == "GET, HEAD"

    run_story(story)


def test_a_head_has_no_body() -> None:
    async def story(world: Watched) -> None:
        async with ClientSession() as session, session.head(world.url) as answer:
            assert (answer.status, await answer.text()) == (200, "")

    run_story(story)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:9254", True),
        ("127.9.9.9", True),
        ("[::1]:9254", True),
        ("localhost:8080", True),
        ("LOCALHOST", True),
        ("192.0.2.7:9254", True),
        ("192.0.2.8:9254", False),
        ("evil.example:9254", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("", False),
        ("[fd00::1]", False),
    ],
)
def test_which_host_names_are_its_own(host: str, own: bool) -> None:
    assert own_name(host, "192.0.2.7") is own


def test_a_name_that_was_made_to_point_here_is_refused() -> None:
    async def story(world: Watched) -> None:
        for path in ("", "state", "stream"):
            foreign = {"Host": f"evil.example:{world.place.port}", "Accept-Language": "en"}
            status, _, body = await world.get(path, **foreign)
            assert status == 421
            assert "checkout" not in body

    run_story(story)


def test_a_browser_may_use_the_names_of_this_host_as_for_metrics() -> None:
    async def story(world: Watched) -> None:
        for name in ("lb1", "LB1"):
            status, _, _ = await world.get(
                "", **{"Host": f"{name}:{world.place.port}", "Accept-Language": "en"}
            )
            assert status == 200
        status, _, _ = await world.get("", Host=f"lb.example:{world.place.port}")
        assert status == 200, "no browser asks, so no foreign page reads the answer"

    run_story(story)


def test_the_state_has_services_shares_and_health_but_no_secrets() -> None:
    probe = HttpProbe(path=f"/health?token={SECRET}")
    checked = Service("web", ("10.96.1.1",), web(1).ports, web(1).backends, check=Check(probe))

    async def story(world: Watched) -> None:
        world.judges.stand("shop/checkout", "10.244.2.17:8443", DRAINED)
        world.judges.stand("shop/search", "10.244.2.18:9200", UNHEALTHY)
        await world.declare([*mixed(), checked])
        state = await world.state()
        services = by_name(state)
        assert state["full"] is True
        assert {name: s["state"] for name, s in services.items() if s["state"] != "unchecked"} == {
            "mail/smtp": "no-backends",
            "shop/cache": "degraded",
            "shop/search": "degraded",
        }
        assert (services["shop/checkout"]["ready"], services["shop/checkout"]["backends"]) == (4, 5)
        (forwarding,) = services["shop/checkout"]["forwardings"]
        endpoints = {e["endpoint"]: e for e in forwarding["endpoints"]}
        assert endpoints["10.244.3.17:8443"]["share"] == pytest.approx(2 / 5)
        assert endpoints["10.244.2.17:8443"]["admin"] == "draining"
        assert endpoints["10.244.2.17:8443"]["ready"] is False
        (forwarding,) = services["shop/search"]["forwardings"]
        (unhealthy,) = (e for e in forwarding["endpoints"] if e["health"] == "unhealthy")
        assert unhealthy["reason"] == "unhealthy: connection refused, 3 of 3"
        assert state["daemon"]["host"] == "lb1"
        assert "settings" not in state["daemon"]
        assert SECRET not in json.dumps(state)
        assert "spec" not in services["web"]

    run_story(story)


def test_only_what_came_later_is_told() -> None:
    async def story(world: Watched) -> None:
        first = await world.state()
        assert len(first["services"]) == len(mixed())
        world.judges.stand("shop/search", "10.244.1.18:9200", DRAINED)
        await world.step()
        await world.declare([s for s in mixed() if s.name != "mail/smtp"])
        later = await state_after(world, first, lambda state: state["gone"] and state["services"])
        assert (later["full"], later["gone"]) == (False, ["mail/smtp"])
        assert [s["name"] for s in later["services"]] == ["shop/search"]
        assert (await world.state("other-7"))["full"] is True

    run_story(story)


def test_many_viewers_share_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TICK_SECONDS", 1.0)
    made, answer = list[bool](), room._answer

    def noted(head: str, services: Sequence[str], compressed: bool) -> bytes:
        made.append(compressed)
        return answer(head, services, compressed)

    monkeypatch.setattr(room, "_answer", noted)

    async def story(world: Watched) -> None:
        await world.state()
        made.clear()
        before = world.board.version
        states = await asyncio.gather(*(world.state() for _ in range(40)))
        versions = {state["version"] for state in states}
        assert len(made) <= len(versions | {before})
        assert all(len(state["services"]) == len(mixed()) for state in states)

    run_story(story)


def test_who_is_far_behind_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """So there are few different answers, whatever is asked for."""
    monkeypatch.setattr(room, "MAX_BEHIND", 1)

    async def story(world: Watched) -> None:
        first = await world.state()
        await state_after(world, first, lambda state: state["full"])

    run_story(story)


def test_a_stream_tells_everything_once_and_then_differences() -> None:
    async def story(world: Watched) -> None:
        async with ClientSession() as session, session.get(world.url + "stream") as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            stream = Stream(answer.content)
            assert len((await stream.next())["services"]) == len(mixed())
            world.judges.stand("shop/search", "10.244.1.18:9200", UNHEALTHY)
            await world.step()
            ready = 4
            while ready == 4:  # it may be told of the verdict before the rules follow
                news = await stream.news(lambda n: n["services"])
                assert [s["name"] for s in news["services"]] == ["shop/search"]
                ready = news["services"][0]["ready"]
            assert ready == 3

    run_story(story)


def test_rates_are_of_the_time_between_readings() -> None:
    async def story(world: Watched) -> None:
        moments = (START + timedelta(seconds=number / 2) for number in itertools.count())
        world.at = lambda: next(moments)
        world.flow("shop/search", 5)
        async with ClientSession() as session, session.get(world.url + "stream") as answer:
            stream = Stream(answer.content)
            first = await stream.news(lambda n: n.get("flows"))
            assert first["flows"]["services"].get("shop/search", [0])[0] == 0, "what was before is no rate"
            await stream.news(lambda n: n.get("flows"))
            world.flow("shop/search", 30, 10)
            news = await stream.news(lambda n: n.get("flows", {}).get("services"))
            rate, _, backends, *_ = news["flows"]["services"]["shop/search"]
            assert rate == pytest.approx(80), "40 flows between two readings half a second apart"
            assert backends["shop/search/tcp/10.244.1.18:9200"] == pytest.approx(rate * 3 / 4, rel=0.01)
            assert news["flows"]["tracked"] is False
            await stream.news(lambda n: n.get("flows") and not n["flows"]["services"])

    run_story(story)


def test_what_a_check_finds_is_told_although_no_rule_changes() -> None:
    async def story(world: Watched) -> None:
        first = await world.state()
        told = BackendStatus(health="unknown", probe_result="connection refused, 1 of 3")
        world.judges.stood["shop/search"] = {"10.244.1.18:9200": told}
        later = await state_after(world, first, lambda state: state["services"])
        (endpoint, *_) = later["services"][0]["forwardings"][0]["endpoints"]
        assert endpoint["check"] == "connection refused, 1 of 3"

    run_story(story)


def test_further_streams_are_refused_so_that_the_page_asks_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS", 1)

    async def story(world: Watched) -> None:
        async with ClientSession() as session, session.get(world.url + "stream") as first:
            await Stream(first.content).next()
            async with session.get(world.url + "stream") as second:
                assert second.status == 503
            assert (await world.state())["full"] is True

    run_story(story)


def test_nothing_is_renewed_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "IDLE_TIMEOUT_SECONDS", 0.3)

    async def story(world: Watched) -> None:
        assert world.counted == 0
        await world.state()
        assert world.counted > 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            counted = -1
            while counted != world.counted:  # ten times as long as one pause
                counted = world.counted
                await asyncio.sleep(0.5)
        await world.state()
        assert world.counted > counted

    run_story(story)


def test_a_fault_of_the_page_is_said_once_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while somebody goes on looking at it."""
    monkeypatch.setattr(supervisor.Backoff, "delay", lambda *_: 0.01)
    attempts = 0

    async def story(world: Watched) -> None:
        read = world.read_flows

        async def broken() -> Any:
            nonlocal attempts
            attempts += 1
            raise RuntimeError("no luck")

        object.__setattr__(world.board._facts, "read_flows", broken)
        world.board.request_updates()
        await until(lambda: attempts > 4)
        assert caplog.text.count("Traceback") == caplog.text.count(f"{PAGE} fails") == 1
        assert not world.board.ended
        object.__setattr__(world.board._facts, "read_flows", read)
        assert len((await world.state())["services"]) == len(mixed())

    run_story(story)


def colours(html: str) -> list[dict[str, str]]:
    """The named colours of the light and the dark scheme."""
    blocks = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block)) for block in blocks)
    return [light, {**light, **dark}]


def luminance(colour: str) -> float:
    """WCAG's relative luminance."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio, 1 to 21."""
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def test_contrast_is_enough_in_both_schemes() -> None:
    html = Path(room.__file__).with_name("status.html").read_text()
    texts, grounds = ("text", "quiet", "accent", "good", "warn", "bad"), ("page", "card", "sunken")
    pairs = [(text, ground) for text in texts for ground in grounds]
    pairs += [(kind, f"{kind}-soft") for kind in ("good", "warn", "bad", "accent")] + [("quiet", "line")]
    poor = [
        (text, ground, round(contrast(named[text], named[ground]), 2))
        for named in colours(html)
        for text, ground in pairs
        if contrast(named[text], named[ground]) < 4.5
    ]
    assert poor == []
    assert all(contrast(named["strong-line"], named["card"]) >= 3 for named in colours(html))
