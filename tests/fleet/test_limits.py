"""What etcd's authors and registrars try on a host that gave them nothing: each is a problem of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from tests.fleet.network import FleetLab, HostDaemon
from tests.fleet.test_two_hosts import endpoints

pytestmark = pytest.mark.root

SERVICE = "address: 10.96.0.{0}\nports: {{port: 80, node_port: {1}}}\nbackends: [{2}]\n"
OF_A_FILE = "- {name: own, address: 10.96.5.5, ports: [80], backends: [10.244.0.5], node_port: 8080}\n"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetLab]:
    with FleetLab(tmp_path_factory.mktemp("limits"), 1) as made:
        yield made


@pytest.fixture(scope="module")
def daemon(lab: FleetLab) -> Iterator[HostDaemon]:
    made = lab.daemon(lab.hosts[0])
    made.write(OF_A_FILE)
    with made as running:
        yield running


def problems(daemon: HostDaemon) -> str:
    return "\n".join(p for source in daemon.status()["sources"] for p in source["problems"])


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            SERVICE.format(1, 22, "10.244.0.1"),
            "node port 22/tcp lies outside node_port_range (30000-32767 for",
        ),
        (SERVICE.format(2, 8443, "10.244.0.1"), "node port 8443/tcp lies outside node_port_range"),
        (
            SERVICE.format(3, 30003, "10.244.0.1") + "health_port: 10250\n",
            "health port 10250/tcp lies outside node_port_range",
        ),
        (SERVICE.format(4, 30004, "169.254.169.254"), "backend 169.254.169.254 is link-local"),
        (
            SERVICE.format(5, 30005, "10.244.0.1") + "fallback: {backends: [169.254.1.1]}\n",
            "backend 169.254.1.1 is link-local",
        ),
        (
            SERVICE.format(6, 30006, "10.244.0.1") + "check: {type: http, method: PUT, path: /stop}\n",
            "a check of etcd's may use GET and HEAD, not PUT",
        ),
    ],
)
def test_a_service_in_etcd(lab: FleetLab, daemon: HostDaemon, value: str, problem: str) -> None:
    lab.put("services/greedy", value)
    daemon.wait_until(lambda: f"greedy: {problem}" in problems(daemon), True)
    assert "service" not in daemon.get("services/greedy")
    lab.put("services/good", SERVICE.format(100, 30100, "10.244.0.1"))
    daemon.wait_until(lambda: endpoints(daemon, "good"), {"10.244.0.1:80"})
    lab.delete("services/*")


def test_a_registered_backend(lab: FleetLab, daemon: HostDaemon) -> None:
    daemon.vipctl("add", "10.96.5.6:80/tcp", "10.244.0.6", "--name", "kept")
    lab.put("services/web", "address: 10.96.0.80\nports: 80\nbackends: [10.244.0.1]\n")
    for name in ("own", "kept", "web"):
        lab.put(f"backends/{name}/10.244.0.20:80", "{weight: 60000}")
    lab.put("backends/web/169.254.169.254:80", "")
    lab.put("backends/web/10.244.0.21:80", "{check: {type: http, method: POST}}")
    lab.put("backends/web/10.244.0.22:80", "{check: {type: udp, send: x, port: 53}}")
    daemon.wait_until(lambda: endpoints(daemon, "web"), {"10.244.0.1:80", "10.244.0.20:80"})
    daemon.wait_until(lambda: "10.244.0.22:80" in problems(daemon), True)  # the key that was put last
    found = problems(daemon)
    start = "etcd:/vipd/v1/backends"
    for line in (
        f"{start}/own/10.244.0.20:80: own: it takes no registered backends, and is declared by file:",
        f"{start}/kept/10.244.0.20:80: kept: it takes no registered backends, and is declared by cli",
        f"{start}/web/169.254.169.254:80: web: backend 169.254.169.254 is link-local",
        f"{start}/web/10.244.0.21:80: web: a check of etcd's may use GET and HEAD, not POST",
        f"{start}/web/10.244.0.22:80:1: check.send: a registered backend's check sends no datagrams",
    ):
        assert line in found
    (etcd,) = (s for s in daemon.status()["sources"] if s["name"] == "etcd")
    assert {each["serves"] for each in etcd["refused"]} == {"nothing of the key serves"}
    assert len(etcd["refused"]) == 5
    assert endpoints(daemon, "own") == {"10.244.0.5:80"}
    assert endpoints(daemon, "kept") == {"10.244.0.6:80"}
    described = " ".join(daemon.vipctl("describe", "own").stdout.split())
    assert "Ignored etcd:/vipd/v1/backends/own/10.244.0.20:80: own: it takes no registered" in described
    assert "write registrations: true in its declaration" in described
    assert "vipctl set kept --registrations true" in daemon.vipctl("status", "-o", "json").stdout


def test_who_asks_for_registered_backends_gets_them(lab: FleetLab, daemon: HostDaemon) -> None:
    daemon.vipctl("set", "kept", "--registrations", "true")
    daemon.write(OF_A_FILE.replace("node_port", "registrations: true, node_port"))
    for name in ("own", "kept"):
        daemon.wait_until(lambda name=name: "10.244.0.20:80" in endpoints(daemon, name), True)  # type: ignore[misc]
        view = json.loads(daemon.vipctl("describe", name, "-o", "json").stdout)["service"]
        assert view["status"]["ignored"] == []
        assert view["spec"]["registrations"] is True
    lab.put("services/web", "address: 10.96.0.80\nports: 80\nbackends: [10.244.0.1]\nregistrations: false\n")
    daemon.wait_until(lambda: endpoints(daemon, "web"), {"10.244.0.1:80"})


def test_narrower_settings_take_effect_with_a_restart_and_leave_the_rest(
    lab: FleetLab, daemon: HostDaemon
) -> None:
    lab.put("services/web", "address: 10.96.0.80\nports: 80\nbackends: [10.244.0.1]\n")
    daemon.wait_until(lambda: endpoints(daemon, "web"), {"10.244.0.1:80", "10.244.0.20:80"})
    daemon.stop()
    settings = yaml.safe_load(daemon.config.read_text())
    daemon.config.write_text(yaml.safe_dump({**settings, "allowed_backends": {"etcd": ["10.244.0.0/28"]}}))
    daemon.start()
    daemon.wait_until(lambda: endpoints(daemon, "web"), {"10.244.0.1:80"})
    assert endpoints(daemon, "own") == {"10.244.0.5:80"}
    assert "web: backend 10.244.0.20 is outside allowed_backends" in problems(daemon)
    assert "allowed_backends" in daemon.vipctl("describe", "web").stdout
