"""The page and the metrics of a real daemon that balances real traffic, seen from its own host."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.observe.page.browser import PROGRAM, browser

pytestmark = pytest.mark.root

DECLARATION = """
  - name: shop/web
    address: 10.96.0.10
    ports: [80/tcp]
    backends: [10.244.0.11, 10.244.0.12]
    check: {type: tcp, interval: 2s, timeout: 2s, rise: 1, fall: 2}
"""
ROW = "document.querySelector('tr.row')?.textContent"


def sample(metrics: str, name: str) -> float:
    """The value of a series; AssertionError when it is not there."""
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
    return float(value)


def scrape(lab: Lab) -> str:
    """What Prometheus would get."""
    return lab.host.run("curl", "-sf", "--compressed", "http://127.0.0.1:9253/metrics").stdout


@contextlib.asynccontextmanager
async def sending(lab: Lab) -> AsyncIterator[None]:
    """Meanwhile connections are made all the time, 400 at least, and each is answered."""
    over = threading.Event()

    def send() -> None:
        lab.client.send("10.96.0.10", 80, count=400).all_answered()
        while not over.is_set():
            lab.client.send("10.96.0.10", 80, count=100).all_answered()

    work = asyncio.create_task(asyncio.to_thread(send))
    try:
        yield
    finally:
        over.set()
        await work


@pytest.mark.skipif(PROGRAM is None, reason="no chromium here; hint: apt-get install chromium")
def test_traffic_a_drain_and_a_dead_backend_are_seen_live() -> None:
    async def story(lab: Lab, vipd: Daemon) -> None:
        async with browser(prefix=tuple(lab.host.inside(()))) as tab:
            await tab.size(1360, 900)
            await tab.open("http://127.0.0.1:9254/")
            await tab.until(f"({ROW} || '').includes('2 of 2')")
            await tab.until("document.getElementById('link').textContent === 'live'")
            async with sending(lab):
                await tab.until("parseFloat(document.getElementById('n-rate').textContent) > 0")
                await tab.until("parseFloat(document.getElementById('n-out').textContent) > 0")

            await asyncio.to_thread(vipd.vipctl, "drain", "shop/web/10.244.0.12", "--reason", "kernel update")
            await tab.until(f"{ROW}.includes('1 of 2')")
            await tab.value("document.querySelector('.open').click()")
            await tab.until("document.querySelector('.backends').textContent.includes('kernel update')")
            await tab.until("document.getElementById('events').textContent.includes('override given')")
            lab.backends[0].kill()
            await tab.until(f"{ROW}.includes('Degraded') || {ROW}.includes('No backends')")
            await tab.picture("real-daemon")
            assert tab.faults == []

    with Lab() as lab:
        lab.serve_everywhere(80)
        lab.host.sysctl("net.netfilter.nf_conntrack_acct", 1)
        with Daemon(lab.host, DECLARATION, metrics_address=9253, status_page=9254) as vipd:
            asyncio.run(asyncio.wait_for(story(lab, vipd), 240))
            metrics = scrape(lab)
            first, second = (f'service="shop/web",backend="10.244.0.1{n}:80",protocol="tcp"' for n in (1, 2))
            assert sample(metrics, 'vipd_service_new_flows_total{service="shop/web"}') >= 400
            # A connection has five packets from the client at least, of 40 bytes at least.
            assert sample(metrics, 'vipd_service_received_packets_total{service="shop/web"}') >= 400 * 5
            assert sample(metrics, f"vipd_backend_received_bytes_total{{{first}}}") > 100 * 5 * 40
            assert sample(metrics, 'vipd_check_duration_seconds_count{type="tcp"}') > 0
            assert sample(metrics, f"vipd_backend_admin_state{{{second}}}") == 1
            assert sample(metrics, f"vipd_backend_weight{{{second}}}") == 0
            assert sample(metrics, f"vipd_backend_up{{{first}}}") == 0
            assert sample(metrics, f"vipd_backend_up{{{second}}}") == 1
            assert sample(metrics, "vipd_applies_total") >= 2
            lab.host.run("iptables", "-t", "nat", "-F", "VIPD-SERVICES")
            vipd.wait_until(lambda: sample(scrape(lab), "vipd_drift_repairs_total") >= 1, True, 60.0)
