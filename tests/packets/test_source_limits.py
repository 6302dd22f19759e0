"""`allow_from` says who may use the addresses for outside; all others meet silence."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import CLIENT_SOURCES, CLIENT_SOURCES_IPV6, CLUSTER_CIDRS, HOST_TOWARDS_BACKENDS, Lab
from tests.packets.outside import (
    SILENCE,
    Declared,
    backend_texts,
    forward_policies,
    inside_address,
    node_port,
    outside_address,
    outside_lab,
)
from tests.packets.services import ENOUGH, SERVED_PORT

pytestmark = pytest.mark.root

KINDS = ("external_addresses", "load_balancer_addresses")
SOURCES = {4: CLIENT_SOURCES, 6: CLIENT_SOURCES_IPV6}
BOTH = frozenset({"b1", "b2"})
PORTS = [f"{SERVED_PORT}/tcp", f"{SERVED_PORT}/udp"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with outside_lab() as built:
        yield built


def alone(address: str) -> str:
    """The network of this one address."""
    return str(ip_network(address))


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_allowed_sources_connect_and_others_meet_silence(
    lab: Lab, declared: Declared, kind: str, family: int
) -> None:
    first, second, third, _ = SOURCES[family]
    inside, outside = inside_address(family), outside_address(family)
    spec = {"address": inside, "ports": PORTS, kind: outside, "allow_from": [alone(second), alone(third)]}
    # Before, everybody is answered by the address's owner: silence can only be vipd's doing.
    lab.client.send(outside, SERVED_PORT, source=first).all_answered()
    declared.put("limited", backend_texts(lab.backends[:2], family), family, **spec)
    for policy in forward_policies(lab, family):
        for protocol in ("tcp", "udp"):
            result = lab.client.send(outside, SERVED_PORT, protocol, source=second, count=ENOUGH)
            assert set(result.all_answered().backends) == BOTH, f"FORWARD {policy}"
    assert (
        set(lab.client.send(outside, SERVED_PORT, source=third, count=ENOUGH).all_answered().backends) == BOTH
    )
    for protocol in ("tcp", "udp"):
        refused = lab.client.send(outside, SERVED_PORT, protocol, source=first, count=3, timeout=SILENCE)
        refused.all_failed("timeout")
    # The limit is for the addresses for outside alone.
    lab.client.send(inside, SERVED_PORT, source=first, count=5).all_answered()


@pytest.mark.parametrize("family", [4, 6])
def test_an_address_can_be_open_to_any(lab: Lab, declared: Declared, family: int) -> None:
    first, second = SOURCES[family][:2]
    closed, opened, own = (outside_address(family) for _ in range(3))
    spec = {
        "external_addresses": [
            closed,
            {"address": opened, "allow_from": "any"},
            {"address": own, "allow_from": alone(first)},
        ],
        "allow_from": alone(second),
    }
    declared.put("each", backend_texts(lab.backends[:2], family), family, **spec, ports=PORTS)
    answered = {(closed, second), (opened, first), (opened, second), (own, first)}
    for address in (closed, opened, own):
        for source in (first, second):
            if (address, source) in answered:
                result = lab.client.send(address, SERVED_PORT, source=source, count=4)
                assert set(result.all_answered().backends) <= BOTH
            else:
                result = lab.client.send(address, SERVED_PORT, source=source, count=4, timeout=SILENCE)
                result.all_failed("timeout")


@pytest.mark.parametrize("family", [4, 6])
def test_node_ports_are_not_limited(lab: Lab, declared: Declared, family: int) -> None:
    first, second = SOURCES[family][:2]
    outside, number = outside_address(family), node_port()
    spec = {"external_addresses": outside, "allow_from": alone(second)}
    ports = [{"port": SERVED_PORT, "protocol": "tcp", "node_port": number}]
    declared.put("open-port", backend_texts(lab.backends[:2], family), family, **spec, ports=ports)
    lab.client.send(outside, SERVED_PORT, source=first, timeout=SILENCE).all_failed("timeout")
    lab.client.send(lab.host.address(family), number, source=first, count=5).all_answered()


@pytest.mark.parametrize("family", [4, 6])
def test_the_host_is_held_to_it_as_well(lab: Lab, declared: Declared, family: int) -> None:
    second, outside = SOURCES[family][1], outside_address(family)
    spec = {"external_addresses": outside, "ports": PORTS}
    backends = backend_texts(lab.backends[:2], family)
    lab.host.send(outside, SERVED_PORT).all_answered()
    declared.put("host", backends, family, **spec, allow_from=alone(second))
    lab.host.send(outside, SERVED_PORT, count=2, timeout=SILENCE).all_failed("timeout")
    cluster = CLUSTER_CIDRS[0 if family == 4 else 1]
    declared.put("host", backends, family, **spec, allow_from=[alone(second), cluster])
    result = lab.host.send(outside, SERVED_PORT, count=ENOUGH).all_answered()
    assert set(result.backends) == BOTH
    assert result.sources == {HOST_TOWARDS_BACKENDS[family]}


@pytest.mark.parametrize("family", [4, 6])
def test_a_host_that_has_the_address_may_use_it(
    lab: Lab, daemon: Daemon, declared: Declared, family: int
) -> None:
    """Such a host talks to it with that address as its source, so its own being allowed must be enough."""
    outside = outside_address(family)
    spec = {
        "external_addresses": outside,
        "ports": PORTS,
        "allow_from": CLUSTER_CIDRS[0 if family == 4 else 1],
    }
    declared.put("owned", backend_texts(lab.backends[:2], family), family, **spec)
    lab.host.run("ip", "address", "add", alone(outside), "dev", "lo")
    try:
        assert set(lab.host.send(outside, SERVED_PORT, count=ENOUGH).all_answered().backends) == BOTH
        lab.client.send(outside, SERVED_PORT, count=2, timeout=SILENCE).all_failed("timeout")
    finally:
        lab.host.run("ip", "address", "delete", alone(outside), "dev", "lo")


def test_a_lifted_limit_lets_everybody_in(lab: Lab, declared: Declared) -> None:
    first, second = SOURCES[4][:2]
    outside = outside_address(4)
    spec = {"external_addresses": outside, "ports": PORTS}
    backends = backend_texts(lab.backends[:2], 4)
    declared.put("lifted", backends, 4, **spec, allow_from=alone(second))
    lab.client.send(outside, SERVED_PORT, source=first, timeout=SILENCE).all_failed("timeout")
    declared.put("lifted", backends, 4, **spec)
    assert (
        set(lab.client.send(outside, SERVED_PORT, source=first, count=ENOUGH).all_answered().backends) == BOTH
    )
