"""What vipd can do, done by the service as it is installed: confined, and under a user of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sources.etcd import members
from tests.system.conftest import SERVED_PORT, Prepared, serve_web
from tests.system.machine import Machine

pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(1800)]

VIP = "10.96.41.1"
CHECKED = "/etc/vipd/services.d/checked.yaml"
DROP_INS = "/etc/systemd/system/vipd.service.d"
EXEC_DROP_IN = "/usr/lib/vipd/drop-ins/exec-checks.conf"
QUICK = "interval: 200ms, timeout: 200ms, rise: 1, fall: 1"
"""Where no answer is awaited, or one that is wrong."""
CALM = "interval: 2s, timeout: 2s, rise: 1, fall: 1"
"""Where a good answer counts: on a busy machine it may take its time."""


@pytest.fixture(autouse=True, scope="module")
def installed(machine: Machine, prepared: Prepared) -> None:
    serve_web(machine, prepared.package, VIP)


def status(machine: Machine, name: str) -> dict[str, Any]:
    listed: dict[str, Any] = json.loads(machine.said("vipctl", "list", name, "--json"))
    state: dict[str, Any] = listed["services"][0]["status"]
    return state


def declare(machine: Machine, check: str) -> None:
    backend = machine.lab.backends[0].ipv4
    ports = f"[{{port: 80, target: {SERVED_PORT}}}]"
    service = f"{{name: checked, address: 10.96.41.2, ports: {ports}, backends: [{backend}], check: {check}}}"
    machine.write(CHECKED, f"apiVersion: vipd/v1\nservices: [{service}]\n")
    machine.run("systemctl", "reload", "vipd")


@pytest.mark.parametrize(
    ("check", "ready"),
    [
        # Each turns the verdict of the one before it. The backends answer whatever they are sent with their
        # names, in the language of none of these.
        ("type: http", 0),
        ("type: tcp", 1),
        ("type: https, verify: false", 0),
        (f"type: udp, port: {SERVED_PORT}, send: hello, expect: b1", 1),
        (f"type: dns, port: {SERVED_PORT}, query: example.test", 0),
    ],
)
def test_checks_decide(machine: Machine, check: str, ready: int) -> None:
    declare(machine, f"{{{check}, {CALM if ready else QUICK}}}")
    machine.wait_until(lambda: status(machine, "checked")["ready"] == ready, f"{ready} backends ready")
    assert machine.property("ActiveState") == "active"


def test_exec_checks_need_their_drop_in(machine: Machine) -> None:
    program = machine.disk / "usr/local/bin/is-well"
    program.write_text(
        "#!/bin/sh\n[ ! -e /srv/ill ] && [ $(id -gn) = vipd-check ] && [ $(id -u) -gt 65535 ]\n"
    )
    program.chmod(0o755)
    exec_check = f"{{type: exec, command: [/usr/local/bin/is-well], {CALM}}}"
    with pytest.raises(AssertionError, match="systemctl reload vipd: exit 1"):
        declare(machine, exec_check)
    machine.wait_until(lambda: "exec-checks.conf" in machine.journal("-n", "40"), "the hint in the journal")
    (machine.disk / DROP_INS.lstrip("/")).mkdir()
    machine.run("cp", EXEC_DROP_IN, DROP_INS)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "vipd")
    machine.wait_until(lambda: status(machine, "checked")["ready"] == 1, "the program says that all is well")
    machine.write("/srv/ill", "")
    machine.wait_until(lambda: status(machine, "checked")["ready"] == 0, "the program says that it is not")
    shutil.rmtree(machine.disk / DROP_INS.lstrip("/"))
    (machine.disk / CHECKED.lstrip("/")).unlink()
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "vipd")


def test_a_drain_waits_for_flows(machine: Machine) -> None:
    leaving = f"web/{machine.lab.backends[0].ipv4}:{SERVED_PORT}"
    machine.run("vipctl", "drain", f"web/{machine.lab.backends[1].ipv4}:{SERVED_PORT}")
    with machine.lab.client.open(VIP, 80) as flow:
        flow.ask()
        machine.run("vipctl", "resume", "--all")
        assert (
            machine.run("vipctl", "drain", leaving, "--wait", "--timeout", "2s", check=False).returncode == 5
        )
        flow.ask()
    assert machine.run("vipctl", "drain", leaving, "--wait", "--timeout", "60s").returncode == 0
    assert set(machine.lab.client.send(VIP, 80, count=20).all_answered().backends) == {"b2"}
    machine.run("vipctl", "resume", "--all")


def test_counters_and_events_are_shown(machine: Machine) -> None:
    machine.lab.client.send(VIP, 80, count=25).all_answered()
    machine.wait_until(
        lambda: (
            json.loads(machine.said("vipctl", "stats", "web", "--json"))["services"][0]["new_flows"] >= 25
        ),
        "numbers of web",
    )
    assert "web" in machine.said("vipctl", "stats")
    with machine.lab.client.open(VIP, 80) as flow:  # one that lasts until it is looked for
        flow.ask()
        assert machine.lab.client.ipv4 in machine.said("vipctl", "flows", "web")
    assert "web" in machine.said("vipctl", "events", "--service", "web")
    explained = machine.said("vipctl", "explain", "--from", machine.lab.client.ipv4, "web")
    assert "balanced over 2 backends" in explained
    doctor = machine.run("vipctl", "doctor", check=False)
    assert doctor.returncode == 0, doctor.stdout


def test_metrics_and_the_status_page(machine: Machine) -> None:
    settings = (machine.disk / "etc/vipd/vipd.yaml").read_text()
    machine.write("/etc/vipd/vipd.yaml", f"{settings}status_page: 9254\n")
    machine.run("systemctl", "restart", "vipd")
    machine.apt("install", "--no-install-recommends", "curl")
    assert "<title>" in machine.said("curl", "--silent", "--max-time", "30", "http://127.0.0.1:9254/")
    socket = ("--unix-socket", "/run/vipd/vipd.sock", "http://vipd/metrics")
    assert "vipd_services 1.0" in machine.said("curl", "--silent", "--max-time", "30", *socket)
    machine.write("/etc/vipd/vipd.yaml", settings)
    machine.run("systemctl", "restart", "vipd")


@pytest.fixture
def etcd(machine: Machine, tmp_path: Path) -> Iterator[members.Cluster]:
    members.install()
    cluster = members.Cluster([members.Member(tmp_path, "m0", (2379, 2380))])
    with machine.lab.host.entered():
        cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def test_services_and_backends_from_etcd(machine: Machine, etcd: members.Cluster) -> None:
    settings = (machine.disk / "etc/vipd/vipd.yaml").read_text()
    machine.write("/etc/vipd/vipd.yaml", f"{settings}etcd: {{endpoints: [{etcd.urls[0]}]}}\n")
    machine.run("systemctl", "restart", "vipd")
    first, second = (f"{backend.ipv4}:{SERVED_PORT}" for backend in machine.lab.backends)
    machine.run("vipctl", "--store", "etcd", "add", "10.96.41.3:80/tcp", first, "--name", "shared")
    machine.wait_until(lambda: answering(machine, 10) == {"b1"}, "an answer of the only backend")
    _serve_as_a_unit(machine, "shared", second)
    machine.wait_until(lambda: status(machine, "shared")["backends"] == 2, "a backend that registers itself")
    machine.wait_until(lambda: answering(machine, 40) == {"b1", "b2"}, "answers of both backends")
    machine.run("systemctl", "stop", "server")
    machine.wait_until(lambda: status(machine, "shared")["backends"] == 1, "gone with its server")
    machine.run("vipctl", "--store", "etcd", "remove", "shared")
    machine.write("/etc/vipd/vipd.yaml", settings)


def answering(machine: Machine, count: int) -> set[str]:
    """Who answers connections to the service in etcd, one who fails being `failed`."""
    result = machine.lab.client.send("10.96.41.3", 80, count=count)
    return {*result.backends, *(["failed"] if result.failures else [])}


def _serve_as_a_unit(machine: Machine, service: str, backend: str) -> None:
    """Start a unit that stands for the backend's server, and the example unit that registers it."""
    units = "/etc/systemd/system"
    machine.write(f"{units}/server.service", "[Service]\nExecStart=/usr/bin/sleep infinity\n")
    machine.run("cp", "/usr/share/doc/vipd/examples/vipd-register@.service", units)
    machine.write("/etc/vipd/register-server.env", f"SERVICE={service}\nADDRESS={backend}\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "server", "vipd-register@server")
