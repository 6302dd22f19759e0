"""The page in a real Chromium: what is seen, what moves, and on which screens. Pictures are artefacts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.observe.page.browser import PROGRAM, Browser, browser
from tests.observe.page.examples import DRAINED, UNHEALTHY, mixed, web
from tests.observe.page.watched import Watched, until, watched
from vipd.host.systemd.fields import Event, fields
from vipd.model.flow_limits import Limit
from vipd.model.service import Service
from vipd.observe.events.log_handler import recording
from vipd.observe.page import page_state as room
from vipd.observe.page import server

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no chromium here; hint: apt-get install chromium (tests/run.sh does)"
)

log = logging.getLogger("vipd.tests.observe.page")

Story = Callable[[Watched, Browser], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TICK_SECONDS", 0.1)


def shown(tmp_path: Path, story: Story, *services: Service) -> None:
    """Run a story with the page open in a browser, which must have nothing to complain of."""

    async def run() -> None:
        with recording(tmp_path) as recorder:
            async with watched(services or mixed(), recorder) as world, browser() as tab:
                await tab.size(1360, 900)
                await tab.open(world.url)
                await tab.until("document.querySelector('tr.row')")
                await story(world, tab)
                assert tab.faults == []

    asyncio.run(asyncio.wait_for(run(), 240))


@contextlib.asynccontextmanager
async def flowing(world: Watched) -> AsyncIterator[None]:
    """For a while new flows begin all the time."""

    async def flow() -> None:
        while True:
            world.flow("shop/checkout", 4, 3, 5)
            world.flow("shop/search", 1, 2)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(flow())
    try:
        yield
    finally:
        task.cancel()


def text(selector: str) -> str:
    """An expression: the text of an element."""
    return f"document.querySelector({selector!r}).textContent"


def row(service: str) -> str:
    """An expression: the row of a service, as text."""
    rows = "[...document.querySelectorAll('tr.row')]"
    return f"{rows}.find(row => row.textContent.includes({service!r}))?.textContent"


NAMES = "[...document.querySelectorAll('.open')].map(name => name.textContent)"
PHONE = 360
WIDER = f"document.documentElement.scrollWidth - {PHONE}"  # a phone zooms out: innerWidth grows


def test_what_is_seen_and_how_it_follows(tmp_path: Path) -> None:
    async def story(world: Watched, tab: Browser) -> None:
        reason = "services[0]: <b>bold</b> is no port"
        log.error("x", extra=fields(Event.DECLARATION_REFUSED, unit="file:/a.yaml", reason=reason))
        await tab.until(f"{text('#state')} === 'In sync'")
        await tab.until(f"{text('#host')} === 'lb1'")
        await tab.until(f"{text('#n-services')} === '{len(mixed())}'")
        await tab.until(f"{NAMES}.slice(0, 3).join() === 'mail/smtp,shop/cache,kube-system/kube-dns'")
        await tab.until(f"{row('shop/checkout')}.includes('5 of 5')")
        await tab.until(f"{text('#events')}.includes({reason!r})")
        assert await tab.value("document.querySelector('#events b')") is None, "names are text, never HTML"

        await tab.value(
            "[...document.querySelectorAll('.open')].find(o => /checkout/.test(o.textContent)).focus()"
        )
        await tab.key("Enter")
        await tab.until(
            "[...document.querySelectorAll('.backends')].some(t => t.textContent.includes('10.244.3.17'))"
        )
        await tab.until(f"{text('.backends')}.includes('33 %') && {text('.backends')}.includes('Unchecked')")

        world.judges.stand("shop/checkout", "10.244.2.17:8443", DRAINED)
        world.judges.stand("shop/search", "10.244.2.18:9200", UNHEALTHY)
        world.warnings.append("nf_conntrack is 91 % full; hint: raise net.netfilter.nf_conntrack_max")
        await world.step()
        await tab.until(f"{row('shop/checkout')}.includes('4 of 5')")
        await tab.until(f"{text('.backends')}.includes('kernel update')")
        await tab.until(f"{text('.backends')}.includes('40 %')")
        await tab.until(f"{row('shop/search')}.includes('Degraded')")
        await tab.until(f"{NAMES}.slice(0, 3).includes('shop/search')")  # problems come first
        await tab.until(f"{text('#troubles')}.includes('Hint: raise')")
        dead = "10.244.2.18 is unhealthy in 1 service (shop/search): connection refused, 3 of 3"
        await tab.until(f"{text('#troubles')}.includes({dead!r})")
        await tab.until(f"{text('#serving')} === 'Services degraded' && {text('#state')} === 'In sync'")
        await tab.until(f"{text('#said')}.includes('3 services have problems')")

        points = "document.querySelector('#all-spark polyline').getAttribute('points').split(' ').length"
        async with flowing(world):
            await tab.until(f"{points} > 5 && parseFloat({text('#n-rate')}) > 0")
            await tab.picture("wide-light")
        await tab.prefers("dark")
        ground = "getComputedStyle(document.body).backgroundColor"
        await tab.until(f"{ground} === 'rgb(16, 21, 27)'")
        await tab.picture("wide-dark")

        await world.declare([s for s in mixed() if s.name != "mail/smtp"])
        await tab.until(f"!{NAMES}.includes('mail/smtp')")

    shown(tmp_path, story)


def test_flows_that_limits_refuse_are_seen(tmp_path: Path) -> None:
    async def story(world: Watched, tab: Browser) -> None:
        refused = world.refused["shop/checkout"] = {Limit.CONNECTIONS: 0, Limit.NEW_PER_CLIENT: 12_000}

        async def refuse() -> None:
            while True:
                refused[Limit.NEW_PER_CLIENT] += 5
                await asyncio.sleep(0.05)

        await tab.until(f"{row('shop/checkout')}.includes('5 of 5')")
        await tab.value(
            "[...document.querySelectorAll('.open')].find(o => /checkout/.test(o.textContent)).click()"
        )
        refusing = asyncio.create_task(refuse())
        await tab.until(f"/refuses [0-9]+.*[/]s/.test({row('shop/checkout')})")
        told = "[...document.querySelectorAll('.inner > .warn')].map(each => each.textContent).join()"
        await tab.until(f"/New flows refused: 12 k over new_per_client, now [0-9]+/.test({told})")
        await tab.picture("refusing")
        refusing.cancel()
        await tab.until(f"!/refuses/.test({row('shop/checkout')})")
        await tab.until(f"{told} === 'New flows refused: 12 k over new_per_client'")

    shown(tmp_path, story)


@pytest.mark.nightly
def test_a_thousand_services_and_a_phone(tmp_path: Path) -> None:
    async def story(world: Watched, tab: Browser) -> None:
        await tab.until("document.querySelectorAll('tr.row').length === 200")
        await tab.until(f"{text('#more')} === 'Show 200 more of 1,000'")
        await tab.key("/", "Slash")
        await tab.call("Input.insertText", text="team-3 10.96.0.18:")
        await tab.until(f"{text('#shown')} === '1 of 1,000 services shown'")
        await tab.until(f"{NAMES}.join() === 'team-3/web-0017'")
        await tab.key("Escape")
        await tab.until("document.querySelectorAll('tr.row').length === 200")
        world.judges.stand("team-1/web-0771", "10.244.3.22:8080", UNHEALTHY)
        await world.step()
        await tab.until(f"{NAMES}[0] === 'team-1/web-0771'")
        await tab.value("document.getElementById('troubled').click()")
        await tab.until(f"{NAMES}.join() === 'team-1/web-0771'")

        await tab.size(PHONE, 740, phone=True)
        await tab.value("document.querySelector('.open').click()")
        await tab.until("document.querySelector('.backends')")
        await tab.until("matchMedia('(max-width: 720px)').matches")
        await tab.until(f"{WIDER} <= 0")
        await tab.value("document.getElementById('all').click()")
        await tab.until(f"document.querySelectorAll('tr.row').length === 200 && {WIDER} <= 0")
        await tab.prefers("dark")
        await tab.picture("phone-dark")
        await tab.prefers("light")
        await tab.value("document.getElementById('h-services').scrollIntoView()")
        await tab.picture("phone-light")

    shown(tmp_path, story, *(web(number) for number in range(1000)))


def test_without_a_stream_it_asks_and_after_a_restart_it_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS", 0)

    async def story(world: Watched, tab: Browser) -> None:
        await tab.until(f"{text('#link')} === 'polling'")
        world.judges.stand("shop/search", "10.244.2.18:9200", UNHEALTHY)
        await world.step()
        await tab.until(f"{row('shop/search')}.includes('Degraded')")
        await until(lambda: any("503" in fault for fault in tab.faults))  # the stream was refused
        server.MAX_STREAMS = 32
        await tab.value("follow()")
        await tab.until(f"{text('#link')} === 'live'")
        # The page tries again by itself: it may have been refused more than once.
        tab.faults[:] = [fault for fault in tab.faults if "503" not in fault]
        world.board._epoch = "another"  # as after a restart of vipd
        await world.declare(mixed()[:2])
        await tab.until(f"{text('#n-services')} === '2'")
        await tab.until(f"{NAMES}.sort().join() === 'kube-system/kube-dns,shop/checkout'")

    shown(tmp_path, story)


def test_a_daemon_that_has_died_is_not_shown_as_in_sync(tmp_path: Path) -> None:
    async def story(world: Watched, tab: Browser) -> None:
        grey = "getComputedStyle(document.querySelector('main')).filter"
        await tab.until(f"{text('#state')} === 'In sync' && {text('#link')} === 'live'")
        assert await tab.value(grey) == "none"
        green = await tab.value("document.getElementById('state').className")
        await world.die()
        await tab.until(f"/^Not connected since .*\\d/.test({text('#state')})")
        assert await tab.value("document.getElementById('state').className") != green
        assert "grayscale" in await tab.value(grey)
        assert "as it was" in await tab.value(text("#said"))
        assert await tab.value("document.title.startsWith('not connected')")
        up = await tab.value(text("#up"))
        await asyncio.sleep(2.5)
        assert await tab.value(text("#up")) == up, "nobody knows how long it has been up"
        await world.live_again()
        await tab.until(f"{text('#state')} === 'In sync'")
        assert await tab.value(grey) == "none"
        await tab.until(f"{text('#link')} === 'live'")
        tab.faults.clear()  # the browser tells of each try to connect

    shown(tmp_path, story)


def test_a_daemon_that_stands_still_is_not_shown_as_in_sync(tmp_path: Path) -> None:
    async def story(world: Watched, tab: Browser) -> None:
        await tab.until(f"{text('#state')} === 'In sync' && {text('#link')} === 'live'")
        # As if nothing had come for longer than the stream is ever silent.
        await tab.value("stream.close(), lastContact -= SILENT + 1000")
        await tab.until(f"{text('#state')}.startsWith('Not connected since')")
        await tab.value("follow()")
        await tab.until(f"{text('#state')} === 'In sync'")

    shown(tmp_path, story)
