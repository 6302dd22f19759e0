"""An order for a backend counts for each port and family of its service, and its end outlives a restart."""

from __future__ import annotations

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import ENOUGH, SERVED_PORT

pytestmark = [pytest.mark.root, pytest.mark.nightly(each_time="nftables")]

VIPS = ("10.96.12.1", "fd00:96::12:1")


def test_an_order_counts_for_every_port_until_it_is_resumed_for_good(lab: Lab, daemon: Daemon) -> None:
    ports = ", ".join(f"{{name: p{port}, port: {port}, target: {SERVED_PORT}}}" for port in (80, 81))
    backends = ", ".join(f"'{node.ipv4}', '{node.ipv6}'" for node in lab.backends)
    service = f"- {{name: twice, address: [{', '.join(VIPS)}], ports: [{ports}], backends: [{backends}]}}"
    daemon.declare(service.replace("fd00:96::12:1", "'fd00:96::12:1'"))
    drained, *others = lab.backends

    def serving() -> set[frozenset[str]]:
        return {
            frozenset(lab.client.send(vip, port, count=ENOUGH).all_answered().backends)
            for vip in VIPS
            for port in (80, 81)
        }

    orders = [f"twice/{drained.address(family)}" for family in (4, 6)]
    for order in orders:
        daemon.vipctl("drain", order)
    assert serving() == {frozenset(node.name for node in others)}
    for order in orders:
        daemon.vipctl("resume", order)
    daemon.kill()
    daemon.start()
    assert serving() == {frozenset(node.name for node in lab.backends)}
    daemon.declare("")
