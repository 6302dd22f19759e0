"""A node port answers on the host's own addresses, for clients from outside and for the host itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import HOST_TOWARDS_BACKENDS, Lab
from tests.packets.outside import (
    Declared,
    backend_texts,
    forward_policies,
    host_addresses,
    inside_address,
    node_port,
    outside_lab,
)
from tests.packets.services import ENOUGH_OF_TWO

pytestmark = pytest.mark.root

BOTH = frozenset({"b1", "b2"})
WRONG_PORT = 29999


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with outside_lab() as built:
        yield built


def port_spec(port: int, protocol: str, number: int) -> list[dict[str, object]]:
    return [{"port": port, "protocol": protocol, "node_port": number}]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_answers_on_every_address_until_removed(
    lab: Lab, declared: Declared, family: int, protocol: str
) -> None:
    number = node_port()
    backends = backend_texts(lab.backends[:2], family)
    spec = {"address": inside_address(family), "ports": port_spec(80, protocol, number)}
    declared.put("everywhere", backends, family, **spec)
    for policy in forward_policies(lab, family):
        for address in host_addresses(family):
            for node in (lab.client, lab.host):
                result = node.send(address, number, protocol, count=ENOUGH_OF_TWO).all_answered()
                assert set(result.backends) == BOTH, f"{node.name} to {address}, FORWARD {policy}"
                assert result.sources == {HOST_TOWARDS_BACKENDS[family]}
    declared.drop("everywhere", family)
    for address in host_addresses(family):
        for node in (lab.client, lab.host):
            node.send(address, number, protocol).all_failed("refused")


@pytest.mark.parametrize("family", [4, 6])
def test_only_its_own_port_and_protocol(lab: Lab, declared: Declared, family: int) -> None:
    number = node_port()
    spec = {"address": inside_address(family), "ports": port_spec(80, "tcp", number)}
    declared.put("exact", backend_texts(lab.backends[:2], family), family, **spec)
    here = lab.host.address(family)
    lab.client.send(here, number, count=3).all_answered()
    lab.client.send(here, WRONG_PORT).all_failed("refused")
    lab.client.send(here, number, "udp").all_failed("refused")


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_empty_service_refuses(lab: Lab, declared: Declared, family: int, protocol: str) -> None:
    number = node_port()
    spec = {"address": inside_address(family), "ports": port_spec(80, protocol, number)}
    # Something of the host's own listens there: only vipd's rule can be what refuses.
    with_server = lab.host.serve(**{protocol: (number,)}, name="host")
    try:
        lab.client.send(lab.host.address(family), number, protocol).all_answered()
        declared.put("empty", (), family, **spec)
        lab.client.send(lab.host.address(family), number, protocol).all_failed("refused")
        how = "refused" if protocol == "tcp" else "EPERM"
        lab.host.send(lab.host.address(family), number, protocol).all_failed(how)
        declared.drop("empty", family)
        lab.client.send(lab.host.address(family), number, protocol).all_answered()
    finally:
        with_server.kill()


def test_loopback_is_left_alone(lab: Lab, declared: Declared) -> None:
    number = node_port()
    spec = {"address": inside_address(4), "ports": port_spec(80, "tcp", number)}
    declared.put("loopback", backend_texts(lab.backends[:2], 4), 4, **spec)
    lab.host.send(lab.host.ipv4, number, count=3).all_answered()
    lab.host.send("127.0.0.1", number).all_failed("refused")
    lab.host.send("::1", number).all_failed("refused")


def test_open_flow_survives_the_end_of_its_node_port(lab: Lab, declared: Declared) -> None:
    number = node_port()
    spec = {"address": inside_address(4), "ports": port_spec(80, "tcp", number)}
    declared.put("flowing", backend_texts(lab.backends[:2], 4), 4, **spec)
    with lab.client.open(lab.host.ipv4, number) as flow:
        before = flow.ask()
        declared.put("flowing", backend_texts(lab.backends[:2], 4), 4, **{**spec, "ports": ["80/tcp"]})
        assert flow.ask() == before
    lab.client.send(lab.host.ipv4, number).all_failed("refused")


@pytest.mark.parametrize("family", [4, 6])
def test_named_networks_limit_which_addresses_answer(
    lab: Lab, daemon: Daemon, dataplane: str, family: int
) -> None:
    towards_client, towards_backends, towards_world = host_addresses(family)
    prefix = 24 if family == 4 else 64
    number = node_port()
    named = [f"{towards_client}/{32 if family == 4 else 128}", _network(towards_world, prefix)]
    daemon.stop()
    try:
        with Daemon(lab.host, dataplane=dataplane, node_port_addresses=named) as limited:
            spec = {"address": inside_address(family), "ports": port_spec(80, "tcp", number)}
            Declared(limited).put("limited", backend_texts(lab.backends[:2], family), family, **spec)
            for node in (lab.client, lab.host):
                node.send(towards_client, number, count=5).all_answered()
                node.send(towards_world, number, count=5).all_answered()
                node.send(towards_backends, number).all_failed("refused")
    finally:
        daemon.start()


def _network(address: str, prefix: int) -> str:
    head = address.rpartition("." if prefix == 24 else "::")[0]
    return f"{head}.0/{prefix}" if prefix == 24 else f"{head}::/{prefix}"
