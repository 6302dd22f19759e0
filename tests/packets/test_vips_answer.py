"""A VIP answers ping while it serves, and refuses at once what is for none of its ports."""

from __future__ import annotations

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.packets.outside import SILENCE
from tests.packets.services import SERVED_PORT, Services, backend_text, origin

pytestmark = pytest.mark.root

UNUSED_PORT = 81


def answers(node: Node, address: str, timeout: int = 10) -> bool:
    """Whether one of two pings is answered within so many seconds."""
    asking = ("ping", "-n", "-c", "2", "-W", str(timeout), "-i", "0.2", address)
    return node.run(*asking, check=False).returncode == 0


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("start", ["client", "host", "backend"])
def test_a_vip_answers_ping_while_it_has_a_backend(
    lab: Lab, daemon: Daemon, services: Services, start: str, family: int
) -> None:
    vip = services.add(lab.backends[:1], family=family)
    assert answers(origin(lab, start), vip.address)
    daemon.vipctl("remove-backend", str(vip), backend_text(lab.backends[0], family))
    assert not answers(origin(lab, start), vip.address, 1)


def test_a_service_may_keep_silent(lab: Lab, daemon: Daemon) -> None:
    """Beside one that differs in that alone, and answers."""
    alike = f"ports: [{{port: 80, target: {SERVED_PORT}}}], backends: {lab.backends[0].ipv4}"
    silent = f"{{name: silent, address: 10.96.50.1, {alike}, respond_to_ping: false}}"
    usual = f"{{name: usual, address: 10.96.50.2, {alike}}}"
    daemon.declare(f"  - {silent}\n  - {usual}\n", "silent.yaml")
    for address in ("10.96.50.1", "10.96.50.2"):
        lab.client.send(address, 80).all_answered()
    assert answers(lab.client, "10.96.50.2")
    assert not answers(lab.client, "10.96.50.1", 1)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("start", ["client", "backend"])
def test_an_unused_port_is_refused_at_once(
    lab: Lab, services: Services, start: str, family: int, protocol: str
) -> None:
    vip = services.add(lab.backends, family=family, protocol=protocol)
    unused = (vip.address, UNUSED_PORT, protocol)
    origin(lab, start).send(*unused, count=3).all_failed("refused").at_once()
    origin(lab, start).send(vip.address, vip.port, protocol, count=3).all_answered()


def test_another_protocol_of_a_used_port_is_refused(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, protocol="tcp")
    lab.client.send(vip.address, vip.port, "udp", count=2).all_failed("refused")


def test_unused_ports_can_be_left_to_the_network(dataplane: str) -> None:
    with Lab() as lab, Daemon(lab.host, dataplane=dataplane, reject_unused_ports=False) as daemon:
        lab.serve_everywhere(SERVED_PORT)
        vip = Services(daemon).add(lab.backends)
        lab.client.send(*vip).all_answered()
        lab.client.send(vip.address, UNUSED_PORT, timeout=SILENCE).all_failed("timeout")
