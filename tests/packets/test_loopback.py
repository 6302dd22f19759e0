"""Node ports on 127.0.0.0/8: a packet with such a source gets no answer, so it is masqueraded in every mode.

The operator lets such packets leave by route_localnet, which vipd never sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import CLUSTER_CIDRS, HOST_TOWARDS_BACKENDS, Lab
from tests.packets.outside import (
    Declared,
    backend_texts,
    inside_address,
    node_port,
    outside_lab,
)
from tests.packets.services import ENOUGH_OF_TWO

pytestmark = pytest.mark.root

BOTH = frozenset({"b1", "b2"})
LOOPBACK = ("127.0.0.1", "127.1.2.3")
MODES = ("always", "forwarded", "off-cluster", "hairpin")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with outside_lab() as built:
        built.host.run("sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")
        yield built


@pytest.fixture(scope="module", params=["none", "kube-proxy"])
def compat(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def daemon(lab: Lab, dataplane: str, compat: str) -> Iterator[Daemon]:
    cidrs = list(CLUSTER_CIDRS)
    with Daemon(
        lab.host, dataplane=dataplane, compat=compat, localhost_node_ports=True, cluster_cidrs=cidrs
    ) as running:
        yield running
    lab.host.run("conntrack", "-F", check=False)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("mode", MODES)
def test_answers_in_every_mode(
    lab: Lab, daemon: Daemon, declared: Declared, compat: str, mode: str, protocol: str
) -> None:
    number = node_port()
    ports = [{"port": 80, "protocol": protocol, "node_port": number}]
    spec = {"address": inside_address(4), "ports": ports, "masquerade": mode}
    declared.put("loopback", backend_texts(lab.backends[:2], 4), 4, **spec)
    for address in LOOPBACK:
        result = lab.host.send(address, number, protocol, count=ENOUGH_OF_TWO).all_answered()
        assert set(result.backends) == BOTH, address
        assert result.sources == {HOST_TOWARDS_BACKENDS[4]}, address
        asked = ("explain", f"{address}:{number}/{protocol}", "--from", "local", "-o", "json")
        explanation = json.loads(daemon.vipctl(*asked).stdout)["explanation"]
        assert [backend["masqueraded"] for backend in explanation["backends"]] == [True, True]
        assert any("route_localnet" in note for note in explanation["notes"])
    kept = mode == "hairpin" and compat == "none"
    seen = lab.client.send(lab.host.ipv4, number, protocol, count=5).all_answered().sources
    assert seen == {lab.client.ipv4 if kept else HOST_TOWARDS_BACKENDS[4]}


def test_the_local_policy_is_no_exception(lab: Lab, declared: Declared) -> None:
    number = node_port()
    spec = {"ports": [{"port": 80, "protocol": "tcp", "node_port": number}], "masquerade": "hairpin"}
    policy = {"traffic_policy": {"external": "local"}}
    declared.put("near", backend_texts(lab.backends[:2], 4), 4, address=inside_address(4), **spec, **policy)
    result = lab.host.send(LOOPBACK[0], number, count=ENOUGH_OF_TWO).all_answered()
    assert set(result.backends) == BOTH
    assert result.sources == {HOST_TOWARDS_BACKENDS[4]}


def test_vipd_leaves_route_localnet_off(dataplane: str) -> None:
    """With it, neighbours reach what listens on 127.0.0.1 (CVE-2020-8558)."""
    with Lab() as fresh, Daemon(fresh.host, dataplane=dataplane, localhost_node_ports=True) as daemon:
        place = {"ports": [{"port": 80, "node_port": node_port()}], "address": inside_address(4)}
        Declared(daemon).put("near", backend_texts(fresh.backends, 4), 4, **place)
        found = fresh.host.run(
            "sysctl", "-a", "-r", r"net\.ipv4\.conf\..*\.route_localnet"
        ).stdout.splitlines()
        assert any(".all." in line for line in found)
        assert [line for line in found if not line.endswith("= 0")] == []
