"""Every way to a VIP works: from a client behind the host, from the host itself, from a backend."""

from __future__ import annotations

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import ENOUGH, SERVED_PORT, Services, backend_text, origin

pytestmark = pytest.mark.root


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("start", ["client", "host", "backend"])
def test_all_backends_are_reached(
    lab: Lab, services: Services, start: str, family: int, protocol: str
) -> None:
    vip = services.add(lab.backends, family=family, protocol=protocol)
    result = origin(lab, start).send(*vip, count=ENOUGH).all_answered()
    assert set(result.backends) == {"b1", "b2", "b3"}


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_one_flow_stays_with_its_backend(lab: Lab, services: Services, protocol: str) -> None:
    vip = services.add(lab.backends, protocol=protocol)
    with lab.client.open(*vip) as flow:
        assert len({flow.ask() for _ in range(30)}) == 1


def test_a_removed_service_answers_no_more(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    lab.client.send(*vip).all_answered()
    daemon.vipctl("remove", str(vip))
    lab.client.send(*vip, timeout=0.5).all_failed("timeout")


def test_a_declared_file_with_both_families(lab: Lab, daemon: Daemon) -> None:
    daemon.declare(
        f"""
  - name: both
    address: [10.96.1.1, "fd00:96:1::1"]
    ports: [{{name: a, port: 80, protocol: tcp, target: {SERVED_PORT}}},
            {{name: b, port: 80, protocol: udp, target: {SERVED_PORT}}}]
    backends: [{lab.backends[0].ipv4}, "{lab.backends[1].ipv6}"]
"""
    )
    for protocol in ("tcp", "udp"):
        assert set(lab.client.send("10.96.1.1", 80, protocol, count=5).backends) == {"b1"}
        assert set(lab.client.send("fd00:96:1::1", 80, protocol, count=5).backends) == {"b2"}


@pytest.mark.nightly(each_time="nftables")
def test_a_changed_file_is_served_without_being_asked(lab: Lab, daemon: Daemon) -> None:
    for backend in lab.backends[:2]:
        daemon.write(
            f"  - {{address: 10.96.1.2, ports: [80/tcp], backends: ['{backend_text(backend)}']}}", "own.yaml"
        )
        daemon.wait_until(lambda: daemon.endpoints("10.96.1.2:80/tcp"), [backend_text(backend)])
        daemon.wait_in_sync()
        assert set(lab.client.send("10.96.1.2", 80, count=5).all_answered().backends) == {backend.name}
