"""The page in a real Chromium: what is seen, what moves, and on which screens. Pictures are artefacts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.lab.inside import Vipd, running
from tests.observe.page.browser import PROGRAM, Browser, browser, name_of, row, text
from tests.observe.page.declared import DEAD, declared, web
from tests.observe.watching import free_address, listening

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no chromium here; hint: apt-get install chromium (tests/run.sh does)"
)

NAMES = "[...document.querySelectorAll('.open')].map(name => name.textContent)"
PHONE = 360
WIDER = f"document.documentElement.scrollWidth - {PHONE}"  # a phone zooms out: innerWidth grows


def shown(story: Callable[[Vipd, Browser], Awaitable[None]], services: str) -> None:
    """Run a story with the page open in a browser, which must have nothing to complain of."""

    async def watched(vipd: Vipd) -> None:
        url = await listening(vipd, "status_page")
        async with browser() as tab:
            await tab.size(1360, 900)
            await tab.open(url)
            await tab.until("document.querySelector('tr.row')")
            await story(vipd, tab)
            assert tab.faults == []

    running(watched, lambda vipd: vipd.declare(services), status_page=free_address())


@contextlib.asynccontextmanager
async def flowing(vipd: Vipd) -> AsyncIterator[None]:
    """For a while new flows begin all the time."""
    flows = {("shop/checkout", f"10.244.{n}.17:8443"): n for n in (1, 3, 4)}

    async def flow() -> None:
        while True:
            vipd.kernel.new_flows = {**flows, ("shop/search", "10.244.1.18:9200"): 2}
            await asyncio.sleep(0.05)

    task = asyncio.create_task(flow())
    try:
        yield
    finally:
        task.cancel()


async def stand_still(tab: Browser) -> None:
    """As if nothing had come for longer than an answer ever takes."""
    await tab.value("window.answered = fetch, window.fetch = () => new Promise(() => {}), 0")
    await tab.until(
        f"(lastContact = Date.now() - SILENT - 1000) && {text('#state')}.startsWith('Not connected since')"
    )
    await tab.value("window.fetch = answered, poll(), 0")
    await tab.until(f"{text('#state')} === 'In sync'")


def test_what_is_seen_how_it_follows_and_that_a_daemon_that_stands_still_is_not_in_sync() -> None:
    async def story(vipd: Vipd, tab: Browser) -> None:
        vipd.declare("  - {name: odd, ports: '<b>bold</b>', address: 10.96.9.99}\n", name="broken.yaml")
        await vipd.reload()
        await tab.until(f"{text('#state')} === 'In sync'")
        await tab.until(f"{text('#host')} === 'host-a'")
        await tab.until(f"{text('#n-services')} === '13'")
        await tab.until(f"{NAMES}.slice(0, 2).join() === 'mail/smtp,shop/cache'")  # problems come first
        await tab.until(f"{row('shop/checkout')}.includes('5 of 5')")
        await tab.until(f"{text('#events')}.includes('<b>bold<')")
        assert await tab.value("document.querySelector('#events b')") is None, "names are text, never HTML"

        await tab.value(f"{name_of('checkout')}.focus()")
        await tab.key("Enter")
        await tab.until(
            "[...document.querySelectorAll('.backends')].some(t => t.textContent.includes('10.244.3.17'))"
        )
        await tab.until(f"{text('.backends')}.includes('33 %') && {text('.backends')}.includes('Unchecked')")

        order = {"service": "shop/checkout", "backend": "10.244.2.17:8443", "admin": "draining"}
        await vipd.ask("POST", "/v1/overrides", {**order, "reason": "kernel update"})
        vipd.backends[DEAD] = "connection refused"
        vipd.kernel.warnings = ("nf_conntrack is 91 % full; hint: raise net.netfilter.nf_conntrack_max",)
        await tab.until(f"{row('shop/checkout')}.includes('4 of 5')")
        await tab.until(f"{text('.backends')}.includes('kernel update')")
        await tab.until(f"{text('.backends')}.includes('40 %')")
        await tab.until(f"{row('shop/search')}.includes('Degraded')")
        await tab.until(f"{NAMES}.slice(0, 3).includes('shop/search')")
        await tab.until(f"{text('#troubles')}.includes('Hint: raise')")
        dead = "10.244.2.18 is unhealthy in 1 service (shop/search): connection refused, 1 of 1"
        await tab.until(f"{text('#troubles')}.includes({dead!r})")
        await tab.until(f"{text('#serving')} === 'Services degraded' && {text('#state')} === 'In sync'")
        await tab.until(f"{text('#said')}.includes('3 services have problems')")

        points = "document.querySelector('#all-spark polyline').getAttribute('points').split(' ').length"
        async with flowing(vipd):
            await tab.until(f"{points} > 2 && parseFloat({text('#n-rate')}) > 0")
            await tab.picture("wide-light")
        await tab.prefers("dark")
        await tab.until("getComputedStyle(document.body).backgroundColor === 'rgb(16, 21, 27)'")
        await tab.picture("wide-dark")

        vipd.declare(declared().replace("name: mail/smtp", "name: mail/imap"))
        await vipd.reload()
        await tab.until(f"!{NAMES}.includes('mail/smtp') && {NAMES}.includes('mail/imap')")
        await stand_still(tab)

    shown(story, declared())


@pytest.mark.nightly
def test_a_thousand_services_and_a_phone() -> None:
    async def story(vipd: Vipd, tab: Browser) -> None:
        await tab.until("document.querySelectorAll('tr.row').length === 200")
        await tab.until(f"{text('#more')} === 'Show 200 more of 1,000'")
        await tab.key("/", "Slash")
        await tab.call("Input.insertText", text="team-3 10.96.0.18:")
        await tab.until(f"{text('#shown')} === '1 of 1,000 services shown'")
        await tab.until(f"{NAMES}.join() === 'team-3/web-0017'")
        await tab.key("Escape")
        await tab.until("document.querySelectorAll('tr.row').length === 200")
        order = {"service": "team-1/web-0771", "admin": "disabled"}
        backends = [f"10.{244 + n}.3.22:8080" for n in range(3)]
        for backend in backends:
            await vipd.ask("POST", "/v1/overrides", {**order, "backend": backend})
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

    shown(story, "".join(map(web, range(1000))))
