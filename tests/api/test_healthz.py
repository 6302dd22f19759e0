from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.api.serving import Api
from tests.api.serving import served as served_api
from tests.control.reconciling import DNS, WEB, IsolatedReconciler, looping
from tests.dataplane.fake_dataplane import broken_tool
from tests.model.samples import declared
from tests.observe.health_ports.asking import PATIENCE_SECONDS, ask, free_port, running, until
from vipd.api.healthz import healthz_listener, healthz_view
from vipd.control import reconciler
from vipd.control.progress import Progress, healthy
from vipd.control.reconciler import Reconciler
from vipd.host.settings.settings import Settings, load_settings
from vipd.host.settings.settings_file import SettingsError
from vipd.observe.listeners import ListenAddress

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def in_sync() -> Progress:
    """A progress whose only wish, of second 0, was fulfilled in second 1."""
    progress = Progress()
    progress.request(at(0))
    progress.succeed(progress.begin())
    progress.last_apply = at(1)
    return progress


def test_idle_is_healthy_for_ever() -> None:
    assert healthy(in_sync(), at(10**8)) == (True, "")


def test_starting_is_healthy_for_a_minute() -> None:
    progress = Progress()
    assert healthy(progress, at(0))[0], "nobody has asked for a step yet"
    progress.request(at(0))
    progress.begin()
    assert healthy(progress, at(60)) == (True, "")
    well, message = healthy(progress, at(61))
    assert not well
    assert message.startswith("no rules are in the kernel since the start after 61 s; hint: ")


@pytest.mark.parametrize("begun", [False, True])
def test_a_change_older_than_a_minute_is_overdue_begun_or_not(begun: bool) -> None:
    progress = in_sync()
    progress.request(at(100))
    if begun:
        progress.begin()
    progress.request(at(150))
    assert healthy(progress, at(160))[0]
    well, message = healthy(progress, at(170))
    assert not well
    assert message.startswith("a change is not in the kernel after 70 s; hint: ")


def test_the_age_is_that_of_the_oldest_wish_left_after_a_step() -> None:
    progress = in_sync()
    progress.request(at(100))
    wish = progress.begin()
    progress.request(at(140))
    progress.request(at(150))
    progress.succeed(wish)
    assert healthy(progress, at(200))[0]
    assert not healthy(progress, at(201))[0]
    progress.succeed(progress.begin())
    assert healthy(progress, at(10**6))[0]


def test_a_fault_counts_at_once_and_until_a_step_has_worked() -> None:
    progress = in_sync()
    progress.request(at(100))
    progress.begin()
    progress.fault = "it said no"
    assert healthy(progress, at(101)) == (False, "it said no")
    wish = progress.begin()  # a new try
    assert healthy(progress, at(102)) == (False, "it said no")
    progress.succeed(wish)
    assert healthy(progress, at(103)) == (True, "")


def test_a_wish_that_a_failed_step_took_up_grows_old_all_the_same() -> None:
    progress = in_sync()
    progress.request(at(100))
    progress.begin()
    progress.begin()
    assert not healthy(progress, at(161))[0]


def test_the_view() -> None:
    progress = in_sync()
    assert healthz_view(progress, at(3600)) == (
        200,
        {
            "lastUpdated": "2026-01-01T00:00:01Z",
            "currentTime": "2026-01-01T01:00:00Z",
            "state": "in-sync",
            "message": "",
        },
    )
    progress.quarantined = {"web": "no such match", "dns": "no such match"}
    status, view = healthz_view(progress, at(3600))
    assert (status, view["state"]) == (200, "degraded"), "a restart would not mend it"
    assert str(view["message"]).startswith("quarantined: dns, web; hint: ")
    progress.fault = "it said no"
    status, view = healthz_view(progress, at(3600))
    assert (status, view["state"], view["message"]) == (503, "failed", "it said no")
    assert healthz_view(Progress(), at(0))[1]["lastUpdated"] is None


class Probed:
    """A isolated whose clock is set by hand, with /healthz over TCP."""

    def __init__(self) -> None:
        self.now = START
        self.isolated = IsolatedReconciler(DNS)
        self.isolated.reconciler = Reconciler(
            (self.isolated.source,), self.isolated.dataplane, self.isolated.host, lambda: self.now
        )
        self.place = ListenAddress("127.0.0.1", free_port())
        self.listeners = healthz_listener(self.isolated.reconciler, self.place)

    async def status(self, path: str = "/healthz") -> int:
        return (await ask(self.place, path)).status

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def probed(story: Callable[[Probed], Awaitable[None]]) -> None:
    """Run a story with the loop and the listener at work."""

    async def run() -> None:
        room = Probed()
        async with looping(room.isolated), running(room.listeners):
            await until(lambda: room.listeners.open, "open")
            await story(room)

    asyncio.run(asyncio.wait_for(run(), 200))


def test_a_hung_first_step_shows_after_a_minute() -> None:
    async def story(room: Probed) -> None:
        room.isolated.dataplane.gate = asyncio.Event()
        wish = room.isolated.reconciler.request_sync()
        await until(lambda: room.isolated.dataplane.applying, "hanging")
        room.later(59)
        assert await room.status() == 200
        room.later(2)
        reply = await ask(room.place, "/healthz")
        assert (reply.status, reply.json["state"]) == (503, "starting")
        assert await room.status("/livez") == 503
        room.isolated.dataplane.gate.set()
        assert await room.isolated.reconciler.wait_synced(wish, PATIENCE_SECONDS)
        assert await room.status() == 200

    probed(story)


def test_a_hung_change_shows_after_a_minute_though_others_are_wished_for_meanwhile() -> None:
    async def story(room: Probed) -> None:
        assert await room.isolated.reconciler.wait_synced(
            room.isolated.reconciler.request_sync(), PATIENCE_SECONDS
        )
        room.later(3600)
        assert await room.status() == 200, "idle"
        room.isolated.dataplane.gate = asyncio.Event()
        room.isolated.source.candidate = declared(DNS, WEB)
        room.isolated.reconciler.request_sync()
        await until(lambda: room.isolated.dataplane.applying, "hanging")
        for _ in range(3):
            room.later(20)
            room.isolated.reconciler.request_sync()
        assert await room.status() == 200
        room.later(1)
        reply = await ask(room.place, "/healthz")
        assert (reply.status, reply.json["state"]) == (503, "pending")
        room.isolated.dataplane.gate.set()
        assert await room.isolated.reconciler.wait_synced(
            room.isolated.reconciler.request_sync(), PATIENCE_SECONDS
        )
        assert await room.status() == 200

    probed(story)


def test_a_failed_step_shows_until_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "FIRST_RETRY_SECONDS", 0.2)

    async def story(room: Probed) -> None:
        room.isolated.dataplane.failures = [broken_tool() for _ in range(1000)]
        wish = room.isolated.reconciler.request_sync()
        assert not await room.isolated.reconciler.wait_synced(wish, PATIENCE_SECONDS)
        reply = await ask(room.place, "/healthz")
        assert (reply.status, reply.json["state"]) == (503, "failed")
        assert "it said no" in str(reply.json["message"])
        room.isolated.dataplane.failures.clear()
        await room.isolated.fulfilled(wish)
        assert await room.status() == 200

    probed(story)


def test_the_tcp_address_answers_health_and_nothing_else() -> None:
    async def story(room: Probed) -> None:
        await room.isolated.reconciler.wait_synced(room.isolated.reconciler.request_sync(), PATIENCE_SECONDS)
        reply = await ask(room.place, "/livez?verbose")
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        head = await ask(room.place, "/healthz", "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert (await ask(room.place, "/healthz", "POST")).status == 405
        for path in ("/", "/v1/status", "/v1/services", "/healthz/"):
            assert await room.status(path) == 404

    probed(story)


def test_the_apis_socket_answers_too() -> None:
    async def story(api: Api) -> None:
        async with api.session.get("http://vipd/healthz") as answer:
            assert (answer.status, (await answer.json())["state"]) == (200, "in-sync")
        api.dataplane.failures = [broken_tool() for _ in range(1000)]
        await api.add({"address": "10.96.0.10", "ports": ["53/udp"], "backends": ["10.244.0.5"]})
        for path in ("/healthz", "/livez"):
            async with api.session.get(f"http://vipd{path}") as answer:
                assert (answer.status, (await answer.json())["state"]) == (503, "failed")

    served_api(story)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("127.0.0.1:10256", ("127.0.0.1", 10256)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:10256", ("::1", 10256)),
        ("[FD00:0::1]:1", ("fd00::1", 1)),
    ],
)
def test_health_address(given: str, place: tuple[str, int]) -> None:
    assert load_settings(environment={"VIPD_HEALTH_ADDRESS": given}).health_socket_address() == place


def test_health_address_is_off_unless_set() -> None:
    assert Settings().health_socket_address() is None


@pytest.mark.parametrize(
    "given",
    ["10256", "127.0.0.1", ":10256", "localhost:10256", "::1:10256", "127.0.0.1:0", "1.2.3.4:5/udp", ""],
)
def test_what_is_no_health_address_is_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "vipd.yaml").write_text(f"health_address: '{given}'\n")
    with pytest.raises(SettingsError, match="health_address"):
        load_settings(tmp_path / "vipd.yaml")
