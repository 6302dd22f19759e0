"""Backends with zones and nodes: a host uses those of its zone, as long as every ready backend has a zone, or
those that run on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.outside import Declared
from tests.packets.services import ENOUGH, SERVED_PORT

pytestmark = pytest.mark.root

VIP = {4: "10.96.45.1", 6: "fd00:96:45::1"}


@pytest.fixture(scope="module")
def daemon(lab: Lab, dataplane: str) -> Iterator[Daemon]:
    """A daemon on the host n1 of the zone east."""
    with Daemon(lab.host, dataplane=dataplane, zone="east", node_name="n1") as running:
        yield running


@pytest.mark.parametrize("family", [4, 6])
def test_flows_stay_in_the_zone_while_they_can(lab: Lab, declared: Declared, family: int) -> None:
    def serving(*zones: str) -> set[str]:
        backends = [
            {"address": node.address(family), **({"zone": zone} if zone else {})}
            for node, zone in zip(lab.backends, zones, strict=True)
        ]
        ports = [{"port": 80, "target": SERVED_PORT}]
        declared.put("zoned", backends, family, address=VIP[family], ports=ports)
        return set(lab.client.send(VIP[family], 80, count=ENOUGH).all_answered().backends)

    assert serving("east", "west", "east") == {"b1", "b3"}
    assert serving("west", "west", "west") == {"b1", "b2", "b3"}, "none is for this zone"
    assert serving("east", "west", "") == {"b1", "b2", "b3"}, "one has no zone"
    declared.drop("zoned", family)


@pytest.mark.parametrize("family", [4, 6])
def test_flows_stay_on_the_node_while_they_can(lab: Lab, declared: Declared, family: int) -> None:
    def serving(*states: str) -> set[str]:
        nodes = zip(lab.backends, ("n1", "n2", "n3"), ("east", "east", "west"), states, strict=True)
        backends = [
            {"address": each.address(family), "node": node, "zone": zone, "state": state}
            for each, node, zone, state in nodes
        ]
        ports = [{"port": 80, "target": SERVED_PORT}]
        preference = {"traffic_distribution": "prefer-same-node"}
        declared.put("near", backends, family, address=VIP[family], ports=ports, **preference)
        return set(lab.client.send(VIP[family], 80, count=ENOUGH).all_answered().backends)

    assert serving("up", "up", "up") == {"b1"}
    assert serving("drain", "up", "up") == {"b2"}, "none on this host is ready"
    assert serving("drain", "down", "up") == {"b3"}
    declared.drop("near", family)
