"""One service of thousands of backends: each gets its share of new flows, the last of the chain too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.outside import Declared
from tests.packets.services import SERVED_PORT, fits

pytestmark = pytest.mark.root

NETWORK = IPv4Network("10.245.0.0/16")
"""Addresses that one server answers for; the flow's entry in connection tracking says which one it was."""
FLOWS = 2_000
GROUPS = 20


@pytest.fixture(scope="module")
def lab(dataplane: str) -> Iterator[Lab]:
    """A lab whose first backend has every address of the network."""
    with Lab() as built:
        owner = built.backends[0]
        owner.run("ip", "route", "add", "local", str(NETWORK), "dev", "lo")
        owner.serve(tcp=[SERVED_PORT])
        built.host.run("ip", "route", "add", str(NETWORK), "via", owner.ipv4)
        yield built


@pytest.mark.nightly(each_time="1000")
@pytest.mark.parametrize("count", [1_000, 5_000])
def test_each_gets_its_share(lab: Lab, daemon: Daemon, declared: Declared, count: int) -> None:
    addresses = [NETWORK[number] for number in range(1, count + 1)]
    vip = f"10.96.44.{count // 1_000}"
    ports = [{"port": 80, "target": SERVED_PORT}]
    declared.put("many", [f"{address}:{SERVED_PORT}" for address in addresses], 4, address=vip, ports=ports)
    lab.client.send(vip, 80, count=FLOWS).all_answered()
    tracked = daemon.host.run("conntrack", "-L", "-p", "tcp", "--orig-dst", vip).stdout
    chosen = [IPv4Address(address) for address in re.findall(r"src=(10\.245\.[.0-9]+) ", tracked)]
    assert len(chosen) == FLOWS
    groups = dict.fromkeys(map(str, range(GROUPS)), 0)
    for address in chosen:
        groups[str(addresses.index(address) * GROUPS // count)] += 1
    assert fits(groups, dict.fromkeys(groups, 1)), groups
    unused = 1 - len(set(chosen)) / count
    assert abs(unused - (1 - 1 / count) ** FLOWS) < 0.05, "as many backends are unused as chance leaves"
