"""What vipd and vipctl write to etcd reads back the same, and what anybody else writes breaks nobody."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.sources.etcd.following import PREFIX, Follower, follow, key, value
from tests.sources.etcd.members import Cluster
from tests.sources.etcd.register import BACKEND, registering

RICH: dict[str, Any] = {
    "name": "shop/web",
    "address": ["10.96.0.10", "fd00:96::10"],
    "ports": [{"name": "http", "port": 80, "protocol": "tcp", "target": 8080}, "443/tcp"],
    "backends": ["10.244.0.5", {"address": "10.244.2.21", "weight": 2}, "fd00:244::5"],
    "affinity": {"by": "client-ip", "timeout": "1h"},
    "check": {"type": "http", "path": "/healthz", "interval": "2s"},
    "fallback": {"backends": ["10.244.9.9"]},
}
ORDERS = f"{PREFIX}overrides/"


def order(backend: str = "10.244.0.5", service: str = "", **more: object) -> str:
    """An order of the fleet to drain a backend, as vipctl writes it."""
    subject = {"service": service} if service else {}
    about = {**subject, "backend": backend, "admin": "draining"}
    return json.dumps({**about, "by": "root on h1", "at": "2026-01-01T00:00:00+00:00", "reason": "x", **more})


async def overrides(host: Follower) -> list[dict[str, Any]]:
    return list((await host.vipd.ask("GET", "/v1/overrides")).body["overrides"])


def test_a_service_comes_back_as_it_was_written(etcd: Cluster, root: Path) -> None:
    async def write(host: Follower) -> dict[str, Any]:
        answer = await host.vipd.ask("POST", "/v1/services?store=etcd", {"service": RICH})
        assert answer.status == 200, answer
        for name in ("", "a/b/c"):
            nameless = {**RICH, "name": name, "address": "10.96.0.77"}
            refused = await host.vipd.ask("POST", "/v1/services?store=etcd", {"service": nameless})
            assert refused.status == 422, "a key could not have that name"
        return dict((await host.vipd.service("shop%2Fweb"))["spec"])

    async def read(host: Follower) -> dict[str, Any]:
        await host.until(lambda: host.names() == {"shop/web"})
        return dict((await host.vipd.service("shop%2Fweb"))["spec"])

    written = follow(etcd.urls, write)
    assert follow(etcd.urls, read) == written
    assert {k: written[k] for k in ("affinity", "fallback")} == {k: RICH[k] for k in ("affinity", "fallback")}
    stored = etcd.read(key("shop/web"))
    assert stored is not None
    assert "shop" not in stored.value
    assert etcd.read(key("a/b/c")) is None


REGISTERED = {
    "10.244.0.5": "10.244.0.5:80",
    "[fd00::5]:53@7": "[fd00::5]:53",
    "10.244.0.6:80@0": "",
}


def test_a_registration_serves_as_it_was_given(etcd: Cluster, tmp_path: Path) -> None:
    etcd.put(key("web"), "address: [10.96.0.1, 'fd00:96::1']\nports: 80\n")

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"web"})
        with ExitStack() as stack:
            for backend in REGISTERED:
                options = ("--endpoint", etcd.urls[0])
                stack.enter_context(registering(tmp_path, *options, backend=backend)).until_said("registered")
            await host.until(lambda: host.serving()["web"] == set(REGISTERED.values()) - {""}, "all")
            shares = {b: w for at in host.vipd.kernel.serving().values() for b, w in at.items()}
            assert shares["[fd00::5]:53"] == 7

    follow(etcd.urls, story)


def test_a_registration_tells_its_manager_and_goes_with_its_process(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd.put(key("web"), value(1))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"web"})
        with registering(tmp_path, "--endpoint", etcd.urls[0], "--ttl", "2s") as process:
            said = (await asyncio.to_thread(manager.recv, 4096)).decode()
            assert said.splitlines() == ["READY=1", f"STATUS={PREFIX}backends/web/{BACKEND}: registered"]
            await host.until(lambda: BACKEND in host.serving()["web"], "registered")
            process.kill()
            await host.until(lambda: BACKEND not in host.serving()["web"], "its lease has ended")

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        follow(etcd.urls, story)


NOT_REGISTERED = {
    "10.244.0.10:80": ("{check: {type: https, ca: /etc/shadow}}", "ca names a file of this host"),
    "10.244.0.11:80": (
        "{check: {type: tcp, interval: 100ms, timeout: 100ms}}",
        "check.interval: a registered backend's check asks every 0.1 s, from every host",
    ),
    "10.244.0.12:80": (
        "{check: {type: udp, send: ping}}",
        "check.send: a registered backend's check sends no datagrams of its own",
    ),
    "10.244.0.13:80": (
        "{check: {type: http, body: 'a+'}}",
        "check.body: a registered backend's check wants plain text",
    ),
    "10.244.0.14:80": ("{check: {type: exec, command: [/bin/true]}}", "checks that run programs"),
    **dict.fromkeys(
        (
            *("127.0.0.1:80", "[::1]:80", "224.0.0.1:80", "0.0.0.0:80", "[::]:80", "[fe80::1]:80"),
            *("[ff02::1]:80", "255.255.255.255:80", "[::ffff:169.254.169.254]:80", "0177.0.0.1:80"),
            *("2130706433", "nonsense"),
        ),
        ("", ""),
    ),
}
GOOD_CHECKS = (
    "{check: {type: dns, query: example.com}}",
    "{check: {type: http, method: HEAD}}",
    "{check: tcp}",
)


def test_a_registration_brings_no_work_for_the_host_and_no_address_that_is_none(etcd: Cluster) -> None:
    etcd.put(key("web"), "address: [10.96.0.1, 'fd00:96::1']\nports: 80\n")
    start = f"{PREFIX}backends/web/"
    etcd.put_all({f"{start}{address}": text for address, (text, _) in NOT_REGISTERED.items()})
    etcd.put_all({f"{start}10.244.1.{n}:80": text for n, text in enumerate(GOOD_CHECKS)})
    good = {f"10.244.1.{n}:80" for n in range(len(GOOD_CHECKS))}

    async def story(host: Follower) -> None:
        await host.until(lambda: host.serving().get("web") == good, "the good ones alone")
        problems = (await host.source())["problems"]
        for address, (_, words) in NOT_REGISTERED.items():
            assert any(f"{start}{address}" in p and words in p for p in problems), (address, problems)
        assert not any(f"{start}{address}" in p for address in good for p in problems)

    follow(etcd.urls, story)

    async def all_serve(host: Follower) -> None:
        await host.until(lambda: "10.244.0.14:80" in host.serving().get("web", ()), "a program is allowed")

    follow(etcd.urls, all_serve, settings={"exec_checks": "anywhere"})


def test_orders_are_read_by_their_value_wherever_they_stand(etcd: Cluster) -> None:
    etcd.put_all({key("web"): value(1), key("other"): value(2)})

    async def story(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 2)
        etcd.put(f"{ORDERS}by/hand", order(service="web"))
        await host.until(lambda: host.serving() == {"web": set(), "other": {"10.244.0.5:80"}}, "an order")
        etcd.put(f"{ORDERS}another/place", order(service="web"))
        assert (await host.vipd.vipctl("resume", "web/10.244.0.5", "--fleet")).code == 0
        await host.until(lambda: host.serving()["web"], "both are gone")
        assert etcd.read(f"{ORDERS}by/hand") is etcd.read(f"{ORDERS}another/place") is None
        done = await host.vipd.vipctl("drain", "--address", "10.244.0.5", "--fleet", "--reason", "kernel")
        assert done.code == 0, done
        await host.until(lambda: host.serving() == {"web": set(), "other": set()}, "of every service")
        (found,) = await overrides(host)
        assert (found["reason"], found["admin"]) == ("kernel", "draining")
        assert found["by"].endswith(" on host-a")
        for reason in ("x" * 1001, "\x1b[2J"):
            refused = await host.vipd.vipctl("drain", "web/10.244.0.5", "--fleet", "--reason", reason)
            assert refused.code != 0, "it would read back as another"

    follow(etcd.urls, story)


MALFORMED: Sequence[str] = (
    "{",
    "null",
    "[" * 50_000,
    '{"x": 1}',
    '{"backend": []}',
    '{"backend": "10.0.0.1", "at": "0001-01-01T00:00:00+23:59", "admin": {}}',
    order(reason="\ud800"),
)


def test_a_malformed_order_is_left_out_alone_and_its_texts_can_be_printed(etcd: Cluster) -> None:
    etcd.put(key("web"), value(1))
    etcd.put_all({f"{ORDERS}{n}": text for n, text in enumerate(MALFORMED)})
    etcd.put_bytes(f"{ORDERS}b".encode() + b"\xff", b"null")
    etcd.put(f"{ORDERS}evil", order(reason="\x1b[2J\n\u202e", by="x" * 5000))

    async def story(host: Follower) -> None:
        await host.until(lambda: host.serving() == {"web": set()}, "the good one")
        (found,) = await overrides(host)
        assert found["reason"] == r"\x1b[2J\n\u202e"
        assert len(found["by"]) == 1000

        async def faults() -> list[str]:
            status = await host.vipd.status()
            texts = [*status["warnings"], *(await host.source())["problems"]]
            return [text for text in texts if text.startswith("order ")]

        assert len(await faults()) == len(MALFORMED) + 1
        assert all(map(str.isprintable, await faults()))
        etcd.put_all({f"{ORDERS}many/{n}": "x" for n in range(1000)})

        async def counted() -> bool:
            warnings = (await host.vipd.status())["warnings"]
            return len(await faults()) <= 10 and any(" more" in text for text in warnings)

        await host.until(counted, "many are counted")

    follow(etcd.urls, story)
