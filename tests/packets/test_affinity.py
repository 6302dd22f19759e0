"""A client address keeps its backend while it makes new flows often enough."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.dataplane.nftables.serving import many_clients
from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import CLIENT_SOURCES, CLIENT_SOURCES_IPV6, Lab
from tests.packets.outside import Declared, backend_texts, inside_address, node_port, outside_address
from tests.packets.services import Services, backend_text
from vipd.model.service import Frontend, Protocol

pytestmark = pytest.mark.root

SIMULTANEOUS = Path(__file__).with_name("simultaneous.py")
MANY_CLIENTS = "10.77.0.0/16"
SOURCES = {4: CLIENT_SOURCES, 6: CLIENT_SOURCES_IPV6}


LONGEST = 120.0
"""Seconds after which a test gives up: every pause was longer than the timeout under test."""


def each_backend(lab: Lab, vip: Frontend) -> dict[str, str]:
    """The backend of one flow of each client, all of one process."""
    found = many_clients(lab, vip.address, len(CLIENT_SOURCES), CLIENT_SOURCES[0], vip.port)
    assert set(found) == set(CLIENT_SOURCES)
    assert set(found.values()) <= {backend.name for backend in lab.backends}, found
    return found


def only_backend(node: Node, vip: Frontend, source: str = "", count: int = 1) -> str:
    """The backend of so many flows. The first goes alone: of flows that begin at the same moment on several
    processors each may choose, before any has a pin."""
    (backend,) = node.send(*vip, source=source).all_answered().backends
    if count > 1:
        assert set(node.send(*vip, source=source, count=count - 1).all_answered().backends) == {backend}
    return backend


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_holds_for_many_flows(lab: Lab, services: Services, family: int, protocol: str) -> None:
    vip = services.add(lab.backends, "--affinity", "10m", family=family, protocol=protocol)
    for source in SOURCES[family]:
        only_backend(lab.client, vip, source, 25)


def test_first_flows_at_the_same_moment_meet_one_backend(
    lab: Lab, services: Services, dataplane: str
) -> None:
    if dataplane == "iptables":
        pytest.skip(
            "xt_recent asks and remembers in two rules: flows of one moment may part, as with kube-proxy"
        )
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor: no two flows begin at the same moment")
    lab.client.run("ip", "route", "add", "local", MANY_CLIENTS, "dev", "lo")
    lab.host.run("ip", "route", "add", MANY_CLIENTS, "via", lab.client.ipv4)
    vip = services.add(lab.backends, "--affinity", "10m", protocol="udp")
    program = [sys.executable, "-I", str(SIMULTANEOUS), "300", vip.address, str(vip.port)]
    pairs = [line.split() for line in lab.client.run(*program, timeout=240).stdout.splitlines()]
    assert len(pairs) == 300
    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    assert len({backend for backend, _ in pairs}) == 3


def test_holds_for_the_host_itself(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, "--affinity", "10m")
    only_backend(lab.host, vip, count=25)


def test_expires(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, "--affinity", "2s")
    first = {source: only_backend(lab.client, vip, source) for source in CLIENT_SOURCES}
    # A client returns to the same backend by chance once in three times: four clients, six times, never all.
    for _ in range(6):
        time.sleep(2.5)
        if any(only_backend(lab.client, vip, source) != first[source] for source in CLIENT_SOURCES):
            return
    pytest.fail(f"every client still has its first backend long after the timeout: {first}")


@pytest.mark.nightly(each_time="nftables")
def test_new_flows_keep_it_alive(lab: Lab, services: Services) -> None:
    timeout = 5.0
    vip = services.add(lab.backends, "--affinity", f"{timeout:.0f}s")
    deadline, asked = time.monotonic() + LONGEST, time.monotonic()
    first, since = each_backend(lab, vip), time.monotonic()
    while asked - since < 1.2 * timeout:
        assert time.monotonic() < deadline, f"the machine is too slow: no pause was below {timeout} s"
        time.sleep(1.8)
        before, asked = asked, time.monotonic()
        found, answered = each_backend(lab, vip), time.monotonic()
        if answered - before < timeout:
            assert found == first, f"after {answered - since:.1f} s, and no pause as long as the timeout"
        else:  # Whoever has moved was free to.
            first, since = found, answered


def test_a_removed_backend_holds_nobody(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends, "--affinity", "10m")
    first = only_backend(lab.client, vip)
    (gone,) = [backend for backend in lab.backends if backend.name == first]
    daemon.vipctl("remove-backend", str(vip), backend_text(gone))
    second = only_backend(lab.client, vip, count=25)
    assert second != first


class ManyWays:
    """A service with affinity that has two addresses of its own, an external one and a node port."""

    def __init__(self, lab: Lab, daemon: Daemon, family: int, protocol: str) -> None:
        self._lab, self._declared, self._family, self._protocol = lab, Declared(daemon), family, protocol
        self._inside = [inside_address(family) for _ in range(2)]
        self._outside, self._node_port = outside_address(family), node_port()
        self._on_host = lab.host.address(family)

    def serve(self, nodes: Sequence[Node], addresses: int = 2) -> None:
        """These backends from now on, and so many of its own addresses."""
        ports = [{"port": 80, "protocol": self._protocol, "target": 8080, "node_port": self._node_port}]
        self._declared.put(
            "many-ways",
            backend_texts(tuple(nodes), self._family),
            self._family,
            address=self._inside[:addresses],
            ports=ports,
            external_addresses=[self._outside],
            affinity={"by": "client-ip", "timeout": "10m"},
        )

    def ways(self) -> list[Frontend]:
        protocol = Protocol(self._protocol)
        addressed = [Frontend(address, 80, protocol) for address in (*self._inside, self._outside)]
        return [*addressed, Frontend(self._on_host, self._node_port, protocol)]

    def served(self, way: Frontend) -> dict[str, str]:
        return {s: only_backend(self._lab.client, way, s, 3) for s in SOURCES[self._family]}


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_every_way_in_leads_to_the_same_backend(lab: Lab, daemon: Daemon, family: int, protocol: str) -> None:
    service = ManyWays(lab, daemon, family, protocol)
    service.serve(lab.backends, addresses=1)
    # Each client begins by another way, and an address that comes later is no other way.
    ways = service.ways()[::2]
    clients = SOURCES[family]
    first = {s: only_backend(lab.client, ways[n % 2], s) for n, s in enumerate(clients)}
    service.serve(lab.backends)
    assert {way: service.served(way) for way in service.ways()} == dict.fromkeys(service.ways(), first)
    daemon.kill()
    daemon.start()
    assert service.served(service.ways()[-1]) == first
    # Who loses its backend gets another one, the same by every way; nobody else moves.
    (gone,) = [backend for backend in lab.backends if backend.name == first[clients[0]]]
    service.serve([backend for backend in lab.backends if backend is not gone])
    after = service.served(service.ways()[-1])
    assert gone.name not in after.values()
    assert {s: b for s, b in after.items() if first[s] != gone.name} == {
        s: b for s, b in first.items() if b != gone.name
    }
    assert {way: service.served(way) for way in service.ways()} == dict.fromkeys(service.ways(), after)
