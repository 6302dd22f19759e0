"""Whom the status page and the metrics answer over TCP, and what they are asked: to read, no more."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab.daemon import Daemon
from tests.lab.inside import Vipd, running
from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.topology import delete_nodes, ip
from tests.observe.watching import block, free_address, get, listening

SCRAPER = {"User_Agent": "Prometheus/2.42.0", "X_Prometheus_Scrape_Timeout_Seconds": "10"}
BROWSERS: tuple[Mapping[str, str], ...] = (
    {"Accept_Language": "en", "User_Agent": "x"},
    {"Accept_Language": "", "User_Agent": "x"},  # as a script may set it, which cannot leave it out
    {"User_Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:109.0) Gecko/20100101 Firefox/115.0"},
    {"Origin": "http://rebound.example", "User_Agent": "x"},
)
OWN = ("127.0.0.1:9253", "127.9.9.9", "localhost:9253", "LOCALHOST", "HOST-A:9253", "host-a", "[::1]:1")
OTHERS = (
    *("rebound.example:9253", "host-a.rebound.example", "127.0.0.1.rebound.example", "192.0.2.7"),
    *("localhost.rebound.example", "[fd00::1]", "", "[::1", "x" * 5000),
)
DOCUMENTS = {"metrics_address": ("metrics",), "status_page": ("", "state")}
SETTINGS = tuple(DOCUMENTS)


def addresses() -> dict[str, Any]:
    return {name: free_address() for name in SETTINGS}


def test_any_program_may_use_any_name_and_a_web_page_none_but_this_hosts_own() -> None:
    async def story(vipd: Vipd) -> None:
        wrong = []
        for setting, paths in DOCUMENTS.items():
            url = await listening(vipd, setting)
            asked = [
                *((path, host, SCRAPER, 200) for path in paths for host in (*OWN, *OTHERS)),
                *((path, host, browser, 200) for path in paths[:1] for host in OWN for browser in BROWSERS),
                *((path, host, browser, 421) for path in paths for host in OTHERS for browser in BROWSERS),
            ]
            for path, host, headers, status in asked:
                reply = await get(url + path, **headers, Host=host)
                if reply.status != status or ("kept-secret" in reply.text and status == 421):
                    wrong.append((setting, path, host, headers, reply.status))
        assert wrong == []

    running(story, lambda vipd: vipd.declare(block("kept-secret", 1, "10.244.0.5")), **addresses())


def test_there_is_nothing_else_and_nothing_to_change() -> None:
    wanted = {
        "metrics_address": {("GET", ""): 404, ("GET", "state"): 404, ("POST", "metrics"): 405},
        "status_page": {
            ("GET", "metrics"): 404,
            **{(method, "state"): 405 for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")},
        },
    }

    async def story(vipd: Vipd) -> None:
        for setting, requests in wanted.items():
            url = await listening(vipd, setting)
            replies = {(method, path): await get(url + path, method) for method, path in requests}
            assert {request: reply.status for request, reply in replies.items()} == requests
            allowed = {reply.headers.get("Allow") for reply in replies.values() if reply.status == 405}
            assert allowed == {"GET, HEAD"}
            head = await get(url + DOCUMENTS[setting][0], "HEAD")
            assert (head.status, head.text) == (200, "")

    running(story, **addresses())


def test_scrapes_are_compressed_where_that_is_taken_and_several_at_once_are_answered() -> None:
    async def story(vipd: Vipd) -> None:
        url = f"{await listening(vipd, 'metrics_address')}metrics"
        replies = await asyncio.gather(*(get(url) for _ in range(8)))
        for reply in replies:
            assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert reply.headers["Content-Encoding"] == "gzip"
            assert "\nvipd_in_sync 1.0\n" in reply.text
            assert "\nprocess_resident_memory_bytes " in reply.text
        plain = await get(url, Accept_Encoding="identity")
        assert "Content-Encoding" not in plain.headers
        assert "\nvipd_in_sync 1.0\n" in plain.text

    running(story, **addresses())


def test_metrics_that_cannot_be_made_are_a_500_that_the_log_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(vipd: Vipd) -> None:
        url = f"{await listening(vipd, 'metrics_address')}metrics"
        with monkeypatch.context() as patch:
            patch.delattr("prometheus_client.ProcessCollector.collect")
            reply = await get(url)
        assert (reply.status, reply.text) == (500, "internal error; see vipd's log\n")
        assert any("internal error while answering" in record.getMessage() for record in vipd.journal)
        assert (await get(url)).status == 200

    running(story, **addresses())


PLACES = {"9254": "127.0.0.1:9254", "0.0.0.0:9254": "0.0.0.0:9254", "[::1]:9254": "[::1]:9254"}
NO_PLACES = ("", "lb1:9254", "127.0.0.1", "127.0.0.1:9254/tcp", "0", "70000", "-1")


@pytest.mark.root
def test_a_port_alone_is_on_loopback_and_what_is_no_place_is_refused(tmp_path: Path) -> None:
    node, config = Node(f"{new_prefix()}-places", "host", "", ""), tmp_path / "vipd.yaml"
    ip("netns", "add", node.namespace)
    try:
        ip("-n", node.namespace, "link", "set", "lo", "up")
        for address, listener in PLACES.items():
            with Daemon(node, status_page=address, metrics_address=address.replace("9254", "9253")) as daemon:
                wanted = {listener, listener.replace("9254", "9253")}
                daemon.wait_until(lambda: opened(node), wanted)
        with Daemon(node):
            assert opened(node) == set(), "both are off unless set"
        for address in NO_PLACES:
            config.write_text("".join(f'{setting}: "{address}"\n' for setting in SETTINGS))
            argv = (sys.executable, "-m", "vipd", "--check", "--config", str(config))
            done = node.run(*argv, check=False)
            assert done.returncode != 0, address
            assert [setting for setting in SETTINGS if setting in done.stderr] == list(SETTINGS), (
                address,
                done,
            )
    finally:
        delete_nodes(node)


def opened(node: Node) -> set[str]:
    """Where anybody listens."""
    return {line.split()[3] for line in node.run("ss", "-Hltn").stdout.splitlines()}
