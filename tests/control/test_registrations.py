"""Backends that register themselves in etcd, added to what is declared."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.lab.inside import Vipd, running

ETCD = {"endpoints": ["http://etcd:2379"]}
Json = dict[str, Any]
WEB: Json = {"name": "web", "address": "10.96.0.10", "ports": [80], "backends": ["10.244.0.5"]}
OWNERS = ("file", "cli", "etcd")


def lived(registered: Json, source: str, keys: Json, **settings: Any) -> tuple[set[str], str]:
    """Who gets flows of a service from a source, and what is told of registrations that do not take part."""

    def prepare(vipd: Vipd) -> None:
        spec = {**WEB, **keys}
        if source == "file":
            text = json.dumps({"apiVersion": "vipd/v1", "services": [spec]})
            (vipd.services_dir / "web.yaml").write_text(text)
        elif source == "etcd":
            del spec["name"]
            vipd.etcd.put("/vipd/v1/services/web", json.dumps(spec))
        for address, value in registered.items():
            vipd.etcd.put(f"/vipd/v1/backends/web/{address}:80", json.dumps(value))

    async def story(vipd: Vipd) -> tuple[set[str], str]:
        if source == "cli":
            assert (await vipd.add({**WEB, **keys})).status == 200
        await asyncio.sleep(5)
        (serving,) = vipd.kernel.serving().values()
        view = (await vipd.service("web"))["status"]["ignored"]
        (*_, refusing) = (await vipd.status())["sources"]
        assert {unit["serves"] for unit in refusing["refused"]} <= {"nothing of the key serves"}
        assert len(refusing["refused"]) == len(view)
        return {place.rpartition(":")[0] for place in serving}, "\n".join(view)

    return running(story, prepare, simulated=True, etcd=ETCD, **settings)


def test_they_join_a_service_of_a_hosts_administrators_only_if_it_says_so() -> None:
    hints = {"file": "write registrations: true", "cli": "vipctl set web --registrations true"}
    hints["etcd"] = "write registrations: true"
    for source in OWNERS:
        for said in (None, True, False):
            keys = {} if said is None else {"registrations": said}
            serving, told = lived({"10.244.0.6": {}}, source, keys)
            joins = source == "etcd" if said is None else said
            assert serving == {"10.244.0.5", *(["10.244.0.6"] if joins else [])}, (source, said)
            assert bool(told) is not joins
            assert joins or hints[source] in told
            assert joins or f"web: it takes no registered backends, and is declared by {source}" in told


LIMITS: tuple[tuple[Json, str, bool], ...] = (
    ({"allowed_backends": ["10.244.0.0/16"]}, "10.244.0.6", True),
    ({"allowed_backends": {"etcd": ["10.244.0.0/16"]}}, "10.245.0.6", False),
    ({"allowed_backends": {"file": ["10.244.0.0/16"]}}, "10.245.0.6", True),
    ({}, "169.254.169.254", False),
    ({"allowed_backends": ["0.0.0.0/0"]}, "169.254.169.254", False),
    ({"allowed_backends": {"file": ["10.244.0.0/16", "169.254.0.0/16"]}}, "169.254.169.254", False),
    ({"allowed_backends": ["10.0.0.0/8", "169.254.169.0/24"]}, "169.254.169.254", True),
    ({}, "10.96.0.10", False),
)


def test_what_may_not_be_a_backend_is_a_problem_of_that_registration_alone() -> None:
    for settings, address, joins in LIMITS:
        serving, told = lived({"10.244.0.7": {}, address: {}}, "file", {"registrations": True}, **settings)
        assert serving == {"10.244.0.5", "10.244.0.7", *([address] if joins else [])}, (settings, address)
        assert told.count("\n") == 0
        assert bool(told) is not joins
        assert joins or f"backend {address} " in told


def test_a_registered_check_changes_nothing_anywhere() -> None:
    checks = {"GET": True, "HEAD": True, "POST": False, "DELETE": False}
    for method, joins in checks.items():
        value = {"check": {"type": "http", "method": method}}
        serving, told = lived({"10.244.0.6": value}, "etcd", {})
        assert ("10.244.0.6" in serving) is joins, method
        assert bool(told) is not joins
    program = {"check": {"type": "exec", "command": ["/bin/true"]}}
    assert "10.244.0.6" not in lived({"10.244.0.6": program}, "etcd", {})[0]


def test_they_come_and_go_and_are_no_part_of_the_declaration() -> None:
    async def story(vipd: Vipd) -> None:
        key = "/vipd/v1/backends/web/10.244.0.6:80"
        vipd.etcd.put(key, "{}")
        vipd.etcd.put("/vipd/v1/backends/web/10.244.0.5:80", "{}")
        vipd.etcd.put("/vipd/v1/backends/none/10.244.0.9:80", "{}")
        await asyncio.sleep(5)
        view = await vipd.service("web")
        endpoints = {e["endpoint"] for e in view["forwardings"][0]["endpoints"]}
        assert endpoints == {"10.244.0.5:80", "10.244.0.6:80"}, "what is declared already counts once"
        assert view["spec"]["backends"] == ["10.244.0.5"]
        vipd.etcd.put("/vipd/v1/backends/web/169.254.1.1:80", "{}")
        await asyncio.sleep(5)
        described = " ".join((await vipd.vipctl("describe", "web")).stdout.split())
        assert "Ignored etcd:/vipd/v1/backends/web/169.254.1.1:80: web: backend 169.254.1.1 is" in described
        vipd.etcd.delete("/vipd/v1/backends/web/169.254.1.1:80")
        await asyncio.sleep(5)
        writes = len(vipd.kernel.writes)
        vipd.etcd.put("/vipd/v1/backends/none/10.244.0.8:80", "{}")
        await asyncio.sleep(5)
        assert len(vipd.kernel.writes) == writes
        vipd.etcd.delete(key)
        await asyncio.sleep(5)
        assert vipd.kernel.serving() == {"web 10.96.0.10:80/tcp": {"10.244.0.5:80": 1}}

    def prepare(vipd: Vipd) -> None:
        spec = {**WEB, "registrations": True}
        text = json.dumps({"apiVersion": "vipd/v1", "services": [spec]})
        (vipd.services_dir / "web.yaml").write_text(text)

    running(story, prepare, simulated=True, etcd=ETCD)
