"""The page and the metrics of a real daemon that balances real traffic, seen from its own host."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.observe.asking import PATIENCE_SECONDS, scrape, value
from tests.observe.page.browser import PROGRAM, Browser, browser, name_of, row, text

pytestmark = pytest.mark.root

DECLARATION = """
  - name: shop/web
    address: 10.96.0.10
    ports: [80/tcp]
    backends: [10.244.0.11, 10.244.0.12]
    check: {type: tcp, interval: 2s, timeout: 2s, rise: 1, fall: 2}
  - {name: shop/limited, address: 10.96.0.20, ports: 80, backends: [10.244.0.12], limits: {new_per_client: 1}}
"""
WEB = {"service": "shop/web"}
GREY = "getComputedStyle(document.querySelector('main')).filter"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as made:
        made.serve_everywhere(80)
        made.host.sysctl("net.netfilter.nf_conntrack_acct", 1)
        yield made


@pytest.fixture(scope="module")
def vipd(lab: Lab) -> Iterator[Daemon]:
    with Daemon(lab.host, DECLARATION, metrics_address=9253, status_page=9254) as daemon:
        yield daemon


@contextlib.asynccontextmanager
async def sending(lab: Lab, to: str, *, answered: bool = True) -> AsyncIterator[None]:
    """Meanwhile connections are made all the time, 400 at least."""
    over = threading.Event()

    def send() -> None:
        for number in range(1000):
            result = lab.client.send(to, 80, count=100)
            assert not (answered and result.failures), result
            if over.is_set() and number > 3:
                return

    work = asyncio.create_task(asyncio.to_thread(send))
    try:
        yield
    finally:
        over.set()
        await work


def seen(lab: Lab, vipd: Daemon, *stories: Callable[[Browser, Lab, Daemon], Awaitable[None]]) -> None:
    """Open the page for each story in one browser."""

    async def watched() -> None:
        async with browser(prefix=tuple(lab.host.inside(()))) as tab:
            await tab.size(1360, 900)
            for story in stories:
                await tab.open("http://127.0.0.1:9254/")
                await tab.until(f"{row('shop/web')}.includes('2 of 2')")
                await tab.until(f"{text('#link')} === 'live'")
                await story(tab, lab, vipd)
                assert tab.faults == []

    asyncio.run(asyncio.wait_for(watched(), 240))


async def dies_and_refuses(tab: Browser, lab: Lab, vipd: Daemon) -> None:
    assert await tab.value(GREY) == "none"
    green = await tab.value("document.getElementById('state').className")
    await asyncio.to_thread(vipd.kill)
    await tab.until(f"/^Not connected since .*\\d/.test({text('#state')})")
    assert await tab.value("document.getElementById('state').className") != green
    assert "grayscale" in await tab.value(GREY)
    assert "as it was" in await tab.value(text("#said"))
    assert await tab.value("document.title.startsWith('not connected')")
    up = await tab.value(text("#up"))
    await tab.until(f"Date.now() > {await tab.value('Date.now()')} + 2500")
    assert await tab.value(text("#up")) == up, "nobody knows how long it has been up"
    await asyncio.to_thread(vipd.write, "  - {name: new, address: 10.96.0.30, ports: 80}\n", "new.yaml")
    await asyncio.to_thread(vipd.start)
    await tab.until(f"{text('#state')} === 'In sync' && {text('#link')} === 'live'")
    assert await tab.value(GREY) == "none"
    await tab.until(f"{row('new')} && {row('shop/web')}")
    tab.faults.clear()  # the browser tells of each try to connect

    async with sending(lab, "10.96.0.20", answered=False):
        await tab.until(f"/refuses [0-9]+.*[/]s/.test({row('shop/limited')})")
        await tab.value(f"{name_of('limited')}.click()")
        warn = "[...document.querySelectorAll('.inner > .warn')].map(each => each.textContent).join()"
        await tab.until(f"/New flows refused: [0-9.]+( k)? over new_per_client, now [0-9]+/.test({warn})")
    await tab.until(f"!/refuses/.test({row('shop/limited')})")
    await tab.until(f"/New flows refused: [0-9.]+( k)? over new_per_client$/.test({warn})")


async def drains_and_loses_a_backend(tab: Browser, lab: Lab, vipd: Daemon) -> None:
    async with sending(lab, "10.96.0.10"):
        await tab.until(f"parseFloat({text('#n-rate')}) > 0")
        await tab.until(f"parseFloat({text('#n-out')}) > 0")
    await asyncio.to_thread(vipd.vipctl, "drain", "shop/web/10.244.0.12", "--reason", "kernel update")
    await tab.until(f"{row('shop/web')}.includes('1 of 2')")
    await tab.value(f"{name_of('web')}.click()")
    await tab.until("document.querySelector('.backends').textContent.includes('kernel update')")
    await tab.until(f"{text('#events')}.includes('override given')")
    lab.backends[0].kill()
    await tab.until(f"/Degraded|No backends/.test({row('shop/web')})")
    await tab.picture("real-daemon")


@pytest.mark.skipif(PROGRAM is None, reason="no chromium here; hint: apt-get install chromium")
def test_a_daemon_that_has_died_refused_flows_traffic_a_drain_and_a_dead_backend_are_seen_live(
    lab: Lab, vipd: Daemon
) -> None:
    seen(lab, vipd, dies_and_refuses, drains_and_loses_a_backend)
    metrics = scrape(lab.host)
    first, second = ({**WEB, "backend": f"10.244.0.1{n}:80", "protocol": "tcp"} for n in (1, 2))
    assert value(metrics, "vipd_service_new_flows_total", **WEB) >= 400
    # A connection has five packets from the client at least, of 40 bytes at least.
    assert value(metrics, "vipd_service_received_packets_total", **WEB) >= 400 * 5
    assert value(metrics, "vipd_backend_received_bytes_total", **first) > 100 * 5 * 40
    assert value(metrics, "vipd_check_duration_seconds_count", type="tcp") > 0
    for name, number in {"admin_state": 1, "weight": 0, "up": 1}.items():
        assert value(metrics, f"vipd_backend_{name}", **second) == number
    assert value(metrics, "vipd_backend_up", **first) == 0
    assert value(metrics, "vipd_applies_total") >= 2
    lab.host.run("iptables", "-t", "nat", "-F", "VIPD-SERVICES")
    repairs = lambda: value(scrape(lab.host), "vipd_drift_repairs_total") >= 1  # noqa: E731
    vipd.wait_until(repairs, True, PATIENCE_SECONDS)


def test_what_metrics_say_of_traffic_is_what_the_api_says(lab: Lab, vipd: Daemon) -> None:
    lab.host.run("conntrack", "-F")
    vipd.wait_until(lambda: vipd.get("stats?service=shop/web")["services"][0]["flows"], 0, PATIENCE_SECONDS)
    metrics, service = scrape(lab.host), vipd.get("stats?service=shop/web")["services"][0]
    assert value(metrics, "vipd_service_flows", **WEB) == 0
    for name, key in (("received", "in"), ("sent", "out")):
        for unit in ("bytes", "packets"):
            assert value(metrics, f"vipd_service_{name}_{unit}_total", **WEB) == service[f"{unit}_{key}"]
        for backend in service["backends"]:
            labels = {**WEB, "backend": backend["endpoint"], "protocol": "tcp"}
            assert value(metrics, f"vipd_backend_{name}_bytes_total", **labels) == backend[f"bytes_{key}"]
    assert value(metrics, "vipd_traffic_lost_flows_total") == 0
    assert value(metrics, "vipd_conntrack_max") == vipd.get("stats")["conntrack"]["max"]
    lab.host.sysctl("net.netfilter.nf_conntrack_acct", 0)
    uncounted = {name for name, _ in scrape(lab.host)}
    assert "vipd_service_flows" in uncounted
    assert not {name for name in uncounted if name.startswith("vipd_") and "_bytes" in name}
