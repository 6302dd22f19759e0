"""The source address that a backend sees, by masquerade mode and by where the flow starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import CLUSTER_CIDRS, HOST_TOWARDS_BACKENDS, UPLINK, Lab, Wiring
from tests.packets.services import SERVED_PORT, Services

pytestmark = pytest.mark.root

SEEN = {
    # mode: the flow's starts whose own address the backend sees; from all others it sees the host.
    "always": set(),
    "forwarded": {"host"},
    "off-cluster": {"peer"},
    "hairpin": {"client", "host", "peer"},
}


@pytest.fixture(scope="module")
def lab(dataplane: str) -> Iterator[Lab]:
    with Lab(Wiring(backends=2, backends_apart=True)) as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.fixture(scope="module")
def daemon(lab: Lab, dataplane: str) -> Iterator[Daemon]:
    with Daemon(lab.host, dataplane=dataplane, cluster_cidrs=list(CLUSTER_CIDRS)) as running:
        yield running


def start_of(lab: Lab, name: str, family: int) -> tuple[Node, str]:
    own, peer = lab.backends
    node = {"client": lab.client, "host": lab.host, "peer": peer, "own": own}[name]
    return node, UPLINK[family] if name == "host" else node.address(family)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("mode", list(SEEN))
def test_source_seen(lab: Lab, services: Services, mode: str, family: int, protocol: str) -> None:
    own = lab.backends[0]
    vip = services.add([own], "--masquerade", mode, family=family, protocol=protocol)
    seen, expected = {}, {}
    for start in ("client", "host", "peer", "own"):
        node, address = start_of(lab, start, family)
        seen[start] = node.send(*vip, count=5).all_answered().sources
        expected[start] = {address if start in SEEN[mode] else HOST_TOWARDS_BACKENDS[family]}
    assert seen == expected


def test_auto_with_cluster_networks_is_off_cluster(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends[:1])
    peer = lab.backends[1]
    assert peer.send(*vip).all_answered().sources == {peer.ipv4}
    assert lab.client.send(*vip).all_answered().sources == {HOST_TOWARDS_BACKENDS[4]}


def test_a_changed_mode_counts_from_then_on(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends[:1], "--masquerade", "hairpin")
    assert lab.client.send(*vip).all_answered().sources == {lab.client.ipv4}
    daemon.vipctl("set", str(vip), "--masquerade", "always")
    assert lab.client.send(*vip).all_answered().sources == {HOST_TOWARDS_BACKENDS[4]}


@pytest.mark.parametrize("family", [4, 6])
def test_backends_without_a_way_back_need_masquerade(dataplane: str, family: int) -> None:
    with Lab(Wiring(backends=1, backend_routes=False)) as lab:
        lab.serve_everywhere(SERVED_PORT)
        with Daemon(lab.host, dataplane=dataplane) as daemon:
            services = Services(daemon)
            kept = services.add(lab.backends, "--masquerade", "hairpin", family=family)
            lab.client.send(*kept, timeout=0.5).all_failed("timeout")
            usual = services.add(lab.backends, family=family)
            lab.client.send(*usual, count=20).all_answered()
            always = services.add(lab.backends, "--masquerade", "always", family=family)
            for node in (lab.client, lab.host):
                node.send(*always, count=20).all_answered()
