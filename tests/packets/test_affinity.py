"""A client address keeps its backend while it makes new flows often enough."""

from __future__ import annotations

import time

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import CLIENT_SOURCES, CLIENT_SOURCES_IPV6, Lab
from tests.packets.services import Services, backend_text
from vipd.model import Frontend

pytestmark = pytest.mark.root


def only_backend(node: Node, vip: Frontend, source: str = "", count: int = 1) -> str:
    (backend,) = node.send(*vip, source=source, count=count).all_answered().backends
    return backend


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_holds_for_fifty_flows(lab: Lab, services: Services, family: int, protocol: str) -> None:
    vip = services.add(lab.backends, "--affinity", "10m", family=family, protocol=protocol)
    for source in CLIENT_SOURCES if family == 4 else CLIENT_SOURCES_IPV6:
        assert len(lab.client.send(*vip, source=source, count=50).all_answered().backends) == 1


def test_holds_for_the_host_itself(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, "--affinity", "10m")
    assert len(lab.host.send(*vip, count=50).all_answered().backends) == 1


def test_expires(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, "--affinity", "2s")
    first = {source: only_backend(lab.client, vip, source, 10) for source in CLIENT_SOURCES}
    # A client returns to the same backend by chance once in three times: four clients, six times, never all.
    for _ in range(6):
        time.sleep(2.5)
        if any(only_backend(lab.client, vip, source) != first[source] for source in CLIENT_SOURCES):
            return
    pytest.fail(f"every client still has its first backend long after the timeout: {first}")


def test_new_flows_keep_it_alive(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, "--affinity", "5s")
    first = {source: only_backend(lab.client, vip, source) for source in CLIENT_SOURCES}
    for _ in range(4):
        time.sleep(1.8)
        assert {source: only_backend(lab.client, vip, source) for source in CLIENT_SOURCES} == first


def test_a_removed_backend_holds_nobody(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends, "--affinity", "10m")
    first = only_backend(lab.client, vip)
    (gone,) = [backend for backend in lab.backends if backend.name == first]
    daemon.vipctl("remove-backend", str(vip), backend_text(gone))
    second = only_backend(lab.client, vip, count=50)
    assert second != first


def test_without_affinity_flows_spread(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends)
    assert len(lab.client.send(*vip, count=50).all_answered().backends) == 3
