"""The real daemon in a network namespace of its own, asked as an outer load balancer and a probe would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.topology import delete_nodes, ip
from tests.observe.health_ports.asking import PATIENCE_SECONDS

pytestmark = pytest.mark.root

HEALTH, HEALTHZ = "http://10.1.2.3:32100/", "http://127.0.0.1:10256/healthz"
LOCAL, ELSEWHERE = "10.244.0.5", "10.244.9.9"


def declaration(backend: str) -> str:
    """A service with a health port."""
    return f"""
  - name: shop/web
    address: 10.96.0.10
    ports: [80]
    backends: [{backend}]
    traffic_policy: {{external: local}}
    health_port: 32100
"""


@pytest.fixture
def host() -> Iterator[Node]:
    """A host with a backend's address on its loopback device."""
    node = Node(f"{new_prefix()}-health", "host", "10.1.2.3", "fd00:1::3")
    ip("netns", "add", node.namespace)
    try:
        ip("-n", node.namespace, "link", "set", "lo", "up")
        for address in (f"{LOCAL}/32", f"{node.ipv4}/32"):
            ip("-n", node.namespace, "address", "add", address, "dev", "lo")
        ip("-n", node.namespace, "address", "add", f"{node.ipv6}/128", "dev", "lo", "nodad")
        yield node
    finally:
        delete_nodes(node)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file exists, iptables-restore fails."""
    real, flag, wrapper = shutil.which("iptables-restore"), tmp_path / "broken", tmp_path / "bin"
    assert real
    wrapper.mkdir()
    program = wrapper / "iptables-restore"
    program.write_text(
        f'#!/bin/sh\n[ -e {flag} ] && {{ echo "no rules today" >&2; exit 1; }}\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper}:/usr/sbin:/usr/bin:/sbin:/bin")
    return flag


def get(host: Node, url: str) -> tuple[int, dict[str, object]]:
    """Status (0: nobody listens) and body of an answer to curl in the host's namespace."""
    said = host.run("curl", "-sg", "-m", "15", "-w", "\n%{http_code}", url, check=False).stdout
    body, _, status = said.rpartition("\n")
    return int(status), json.loads(body or "{}")


def status(host: Node, url: str) -> int:
    return get(host, url)[0]


def test_the_health_port_follows_the_backends_and_the_applies(host: Node, broken: Path) -> None:
    with Daemon(host, declaration(LOCAL), health_address="127.0.0.1:10256") as vipd:
        vipd.wait_until(lambda: status(host, HEALTH), 200, PATIENCE_SECONDS)
        assert get(host, HEALTH)[1] == {
            "service": {"namespace": "shop", "name": "web"},
            "localEndpoints": 1,
            "serviceProxyHealthy": True,
        }
        assert status(host, "http://[fd00:1::3]:32100/any/path") == 200
        assert status(host, HEALTHZ) == 200
        assert status(host, "http://127.0.0.1:10256/v1/status") == 404

        vipd.declare(declaration(ELSEWHERE))
        body: dict[str, object] = {
            "service": {"namespace": "shop", "name": "web"},
            "localEndpoints": 0,
            "serviceProxyHealthy": True,
        }
        vipd.wait_until(lambda: get(host, HEALTH), (503, body), PATIENCE_SECONDS)
        vipd.declare(declaration(LOCAL))
        vipd.wait_until(lambda: status(host, HEALTH), 200, PATIENCE_SECONDS)

        broken.touch()
        vipd.write(declaration(f"{LOCAL}, {ELSEWHERE}"))
        vipd.wait_until(lambda: status(host, HEALTHZ), 503, PATIENCE_SECONDS)
        assert "no rules today" in str(get(host, HEALTHZ)[1]["message"])
        code, body = get(host, HEALTH)
        assert (code, body["localEndpoints"], body["serviceProxyHealthy"]) == (503, 1, False)

        broken.unlink()
        vipd.wait_until(lambda: (status(host, HEALTHZ), status(host, HEALTH)), (200, 200), PATIENCE_SECONDS)

        vipd.write("  - {address: 10.96.0.10, ports: [80], backends: [10.244.0.5]}\n")
        vipd.wait_until(lambda: status(host, HEALTH), 0, PATIENCE_SECONDS)
        vipd.stop()
        assert status(host, HEALTHZ) == 0


def test_busy_ports_are_warnings_and_had_later(host: Node) -> None:
    rival = host.serve(tcp=(32100, 10256))
    with Daemon(host, declaration(LOCAL), health_address="127.0.0.1:10256") as vipd:
        vipd.wait_until(lambda: len(vipd.status()["warnings"]), 3, PATIENCE_SECONDS)
        warnings = "\n".join(vipd.status()["warnings"])
        assert (
            "the health port of shop/web cannot listen on 0.0.0.0:32100: Address already in use" in warnings
        )
        assert "the health port of shop/web cannot listen on [::]:32100" in warnings
        assert "health_address cannot listen on 127.0.0.1:10256" in warnings
        assert vipd.status()["state"] == "in-sync"
        rival.kill()
        rival.wait(PATIENCE_SECONDS)
        vipd.wait_until(lambda: (status(host, HEALTH), status(host, HEALTHZ)), (200, 200), PATIENCE_SECONDS)
        vipd.wait_until(lambda: vipd.status()["warnings"], [], PATIENCE_SECONDS)
