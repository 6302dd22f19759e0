"""What vipctl stores is there after a crash, whatever a service says, and a full disk loses none of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from tests.declaration.strategies import PATIENT, services
from tests.lab.examples import examples
from tests.lab.inside import Vipd, declare, running, written
from tests.lab.node import Node
from tests.lab.stored import stored
from tests.sources.host import Host
from vipd.model.service import Service

pytestmark = pytest.mark.root

A = {"name": "a", "address": "10.96.0.10", "ports": ["53/udp"], "backends": ["10.244.0.5"]}
A2 = {**A, "backends": ["10.244.0.7"]}
B = {"name": "b", "address": "10.96.0.11", "ports": ["53/udp"], "backends": ["10.244.0.6"]}


def store(host: Host, *specs: dict[str, Any], confirm: int = 0) -> None:
    """Have the store hold these services and no others."""
    query = f"?confirm={confirm}" if confirm else ""
    status, answer = host.ask("POST", f"apply{query}", {"services": list(specs), "prune": True})
    assert (status, answer["applied"]) == (200, True), answer


def history(host: Host) -> list[dict[str, Any]]:
    """The changes of the store, the oldest first."""
    return list(reversed(host.get("history")["entries"]))


LACKING = ("exec", "/etc/ssl/own.pem", "l2")
"""What the host of the tests has no program, no file and no etcd for."""


def declared_services() -> list[Service]:
    """Services of the language that such a host takes."""
    declared: list[Service] = []

    @settings(PATIENT, max_examples=examples(150))
    @given(services())
    def collect(service: Service) -> None:
        if not any(word in written([service]) for word in LACKING):
            declared.append(service)

    collect()
    return declared


def test_every_service_of_the_language_and_its_history_survive_a_restart() -> None:
    declared, stored = declared_services(), dict[int, Service]()

    async def store_all(vipd: Vipd) -> None:
        for service in declared:
            body = {"services": yaml.safe_load(written([service]))["services"], "prune": True}
            answer = await vipd.ask("POST", "/v1/apply", body)
            if answer.status == 200 and answer.body["changed"]:
                newest = (await vipd.ask("GET", "/v1/history")).body["entries"][0]
                stored[newest["revision"]] = service

    async def compare(vipd: Vipd) -> None:
        assert vipd.kernel.names() == {stored[max(stored)].name}
        differing = []
        for revision, service in stored.items():
            entry = (await vipd.ask("GET", f"/v1/history/{revision}")).body["entry"]
            (after,) = (change["after"] for change in entry["services"] if change["name"] == service.name)
            text = json.dumps({"apiVersion": "vipd/v1", "services": [after]})
            if [replace(each, origin=service.origin) for each in declare(text).services] != [service]:
                differing.append((after, service))
        assert differing == []

    allowing: dict[str, Any] = {
        "dataplane": "nftables",
        "announce_addresses": ["10.96.0.0/24", "fd00::/64"],
    }
    with TemporaryDirectory(prefix="vipd-") as directory:
        running(store_all, root=Path(directory), **allowing)
        assert len(stored) > len(declared) / 2 > 5
        running(compare, root=Path(directory), **allowing)


def test_each_change_is_an_entry_that_survives_a_crash(host: Host) -> None:
    store(host, A)
    store(host, A2, B)
    store(host, A2, B)  # changes nothing
    store(host, B)
    entries = [(e["revision"], [(s["name"], s["action"]) for s in e["services"]]) for e in history(host)]
    assert entries == [
        (1, [("a", "created")]),
        (2, [("a", "changed"), ("b", "created")]),
        (3, [("a", "removed")]),
    ]
    before = history(host)
    host.crash()
    assert history(host) == before
    assert host.names() == {"b"}
    a, b = host.get("history/2")["entry"]["services"]
    assert (a["before"]["backends"], a["after"]["backends"]) == (["10.244.0.5"], ["10.244.0.7"])
    assert (b["before"], b["after"]["backends"]) == (None, ["10.244.0.6"])
    store(host, A, confirm=600)
    assert host.ask("POST", "confirm")[0] == 200
    host.crash()
    assert host.get("history")["confirmation"] is None
    assert host.names() == {"a"}, "what was confirmed stays"
    store(host)
    host.crash()
    assert host.names() == set(), "an emptied store is a good one"
    assert host.problems("store") == []


def test_a_change_of_many_services_is_named_in_short(host: Host) -> None:
    many = [{**A, "name": f"s{n}", "address": f"10.96.1.{n}", "backends": []} for n in range(150)]
    store(host, *many)
    (entry,) = history(host)
    assert entry["actions"] == {"created": 150}
    assert len(entry["services"]) == 100
    assert "created s0, created s1, created s2 and 147 more services" in host.vipctl("history").stdout


AS_ANOTHER = """
import http.client, json, socket, sys
connection = http.client.HTTPConnection("vipd")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request("POST", "/v1/services", json.dumps({"service": json.loads(sys.argv[2])}))
sys.exit(connection.getresponse().status != 200)
"""


def test_many_changes_of_one_user_leave_those_of_others(node: Node) -> None:
    """A hundred changes are kept. Here the group `daemon`, 1, may change services."""
    with Host(node, socket_group="daemon", admin_group="daemon") as host:
        host.directory.chmod(0o755)
        person = ["setpriv", "--reuid", "1234", "--regid", "1", "--clear-groups", "/usr/bin/python3"]
        node.run(*person, "-c", AS_ANOTHER, str(host.socket), json.dumps(B))
        for number in range(105):
            store(host, B, {**A, "backends": [f"10.244.1.{number}"]})
        entries = history(host)
        assert [e["revision"] for e in entries] == [1, *range(8, 107)]
        assert "1234" in entries[0]["by"]
        (change,) = host.get("history/8")["entry"]["services"]
        assert change["before"] is None, "what became one leads back to what was before the first of it"
        host.crash()
        assert history(host) == entries
        host.ask("POST", "rollback", {"revision": 8})
        assert host.backends()["a"] == ["10.244.1.6"]
        host.ask("POST", "rollback", {"revision": 1})
        assert host.names() == {"b"}


def test_what_is_accepted_outlives_a_crash_at_any_moment(host: Host) -> None:
    """A change that was answered is there; of one that was not all is there, or nothing."""
    accepted: set[str] = set()
    for attempt in range(4):
        running = threading.Event()

        def add(attempt: int = attempt, running: threading.Event = running) -> None:
            with contextlib.suppress(OSError, HTTPException):
                for n in range(200):
                    name = f"s{attempt}-{n}"
                    spec = {**A, "name": name, "address": f"10.96.{attempt}.{n}"}
                    if host.ask("POST", "services", {"service": spec})[0] == 200:
                        accepted.add(name)
                    running.set()

        adding = threading.Thread(target=add)
        adding.start()
        assert running.wait(60)
        time.sleep(0.1 * attempt)
        host.kill()
        adding.join()
        host.start()
        told = {change["name"] for entry in history(host) for change in entry["services"]}
        assert accepted <= host.names() == told


def test_a_crash_around_the_end_of_the_time_to_confirm_neither_keeps_nor_loses_anything(host: Host) -> None:
    store(host, A)
    store(host, A2, B, confirm=1)
    end = time.monotonic() + 1
    host.kill()
    (host.directory / "log").write_text("")
    while time.monotonic() < end:
        time.sleep(0.05)
    host.start()
    assert "is taken back" in host.log
    assert "2 services in the kernel" not in host.log, "what is over never serves again"
    for moment in (-0.02, 0.0, 0.02):
        store(host, A)
        store(host, A2, B, confirm=1)
        end = time.monotonic() + 1 + moment
        while time.monotonic() < end:
            time.sleep(0.005)
        host.crash()
        for _ in range(2):
            host.wait_until(host.backends, {"a": ["10.244.0.5"]})
            host.wait_until(lambda: history(host)[-1]["reason"].endswith("not confirmed within 1s"), True)
            host.crash()
        store(host, B)
        host.crash()
        assert host.backends() == {"b": ["10.244.0.6"]}


def test_a_change_waits_on_after_a_crash_and_once_takes_it_back_too(host: Host) -> None:
    store(host, A)
    store(host, A2, confirm=3600)
    waits = host.get("status")["confirmation"]
    host.crash()
    again = host.get("status")["confirmation"]
    assert again["revision"] == waits["revision"]
    assert 0 < again["seconds_left"] <= waits["seconds_left"]
    assert host.backends() == {"a": ["10.244.0.7"]}
    assert host.ask("POST", "apply", {"services": [], "prune": True})[0] == 409
    host.vipctl("confirm")
    assert "confirmation" not in host.get("status")
    store(host, A, confirm=1)
    end = time.monotonic() + 1
    host.stop()
    while time.monotonic() < end:
        time.sleep(0.05)
    once = host.host.run(sys.executable, "-m", "vipd", "--config", str(host.config), "--once")
    assert "is taken back: not confirmed within" in once.stderr
    kept = stored(host.state_dir)
    assert ("10.244.0.7" in kept, "10.244.0.5" in kept) == (True, False)


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of 512 KiB in the place of a directory. Yields the file that fills it."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=755", "tmpfs", str(path)], check=True)
    try:
        yield path / "filler"
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(filler: Path) -> None:
    subprocess.run(["sh", "-c", 'cat /dev/zero > "$0" 2>/dev/null; true', str(filler)], check=True)


def test_a_full_disk_neither_keeps_nor_confirms_an_unconfirmed_change(node: Node, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with small_disk(state) as filler, Host(node, state_dir=str(state)) as host:
        store(host, A)
        store(host, A2, B, confirm=2)
        fill(filler)
        status, answer = host.ask("POST", "confirm")
        assert (status, "No space left" in str(answer)) == (500, True)
        host.wait_until(host.backends, {"a": ["10.244.0.5"]})
        assert "No space left" in str(host.status())
        host.kill()
        fill(filler)
        host.start()
        assert host.backends() == {"a": ["10.244.0.5"]}, "a restart takes it back again"
        assert host.ask("POST", "services", {"service": B})[0] == 500
        filler.unlink()
        host.wait_until(lambda: history(host)[-1]["reason"], "takes back 2: not confirmed within 2s")
        store(host, A, B)
        host.crash()
        assert host.names() == {"a", "b"}
        assert len(history(host)) == 4
