"""`allow_from` says who may use a service; all others meet silence."""

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
    # The same holds inside.
    lab.client.send(inside, SERVED_PORT, source=first, count=2, timeout=SILENCE).all_failed("timeout")
    assert {
        *lab.client.send(inside, SERVED_PORT, source=second, count=ENOUGH).all_answered().backends
    } == BOTH


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
@pytest.mark.parametrize("policy", ["cluster", "local"])
def test_an_address_inside_and_its_node_port_are_limited(
    lab: Lab, declared: Declared, family: int, policy: str
) -> None:
    first, second, third, _ = SOURCES[family]
    inside, number = inside_address(family), node_port()
    ports = [{"port": SERVED_PORT, "protocol": each, "node_port": number} for each in ("tcp", "udp")]
    servers = [node.address(family) for node in lab.backends[:2]]
    node = {"node": lab.host.run("hostname").stdout.strip()} if policy == "local" else {}
    backends = [{"address": address, "port": SERVED_PORT, **node} for address in servers]
    spec = {"address": inside, "ports": ports, "masquerade": "always", "traffic_policy": {"internal": policy}}
    allowed = [alone(second), str(ip_network(f"{third}/{31 if family == 4 else 127}", strict=False))]
    declared.put("own", backends, family, **spec, allow_from=allowed)
    for to, port in ((inside, SERVED_PORT), (lab.host.address(family), number)):
        for protocol in ("tcp", "udp"):
            for source in (second, third):
                assert {
                    *lab.client.send(to, port, protocol, source=source, count=ENOUGH).all_answered().backends
                }
            refused = lab.client.send(to, port, protocol, source=first, count=2, timeout=SILENCE)
            refused.all_failed("timeout")
            own = lab.host.send(to, port, protocol, count=2, timeout=SILENCE)
            own.all_failed("timeout" if protocol == "tcp" else "EPERM")  # a dropped send of this host itself
    declared.put("own", backends, family, **spec, allow_from=[alone(second), alone(lab.host.address(family))])
    lab.host.send(lab.host.address(family), number, count=3).all_answered()
    lab.host.send(inside, SERVED_PORT, source=lab.host.address(family), count=3).all_answered()
    at_once = ("nodad",) if family == 6 else ()  # else it is no source for a moment
    lab.host.run("ip", "address", "add", alone(inside), "dev", "lo", *at_once)
    try:  # a host that has an address uses it as the source
        lab.host.send(inside, SERVED_PORT, count=3).all_answered()
    finally:
        lab.host.run("ip", "address", "delete", alone(inside), "dev", "lo")
    lab.client.send(inside, SERVED_PORT, source=third, timeout=SILENCE).all_failed("timeout")
    declared.put("own", backends, family, **spec)
    lab.client.send(inside, SERVED_PORT, source=first, count=3).all_answered()


def test_a_node_port_of_a_load_balancer_is_open_as_for_kube_proxy(lab: Lab, declared: Declared) -> None:
    first, second = SOURCES[4][:2]
    outside, number = outside_address(4), node_port()
    spec = {"load_balancer_addresses": {"address": outside, "allow_from": alone(second)}}
    ports = [{"port": SERVED_PORT, "protocol": "tcp", "node_port": number}]
    declared.put("open-port", backend_texts(lab.backends[:2], 4), 4, **spec, ports=ports)
    lab.client.send(outside, SERVED_PORT, source=first, timeout=SILENCE).all_failed("timeout")
    lab.client.send(lab.host.address(4), number, source=first, count=5).all_answered()


def test_flows_of_a_client_that_may_no_longer_come_end(lab: Lab, daemon: Daemon, declared: Declared) -> None:
    """UDP flows, which would go on for ever; TCP flows where the service cuts those that it must not keep."""
    first, second = SOURCES[4][:2]
    inside = inside_address(4)

    def tracked(protocol: str, source: str) -> int:
        listed = lab.host.run("conntrack", "-L", "-p", protocol, "--orig-src", source, "--orig-dst", inside)
        return len(listed.stdout.splitlines())

    for on_remove in ("keep", "reset"):
        spec = {"address": inside, "ports": PORTS, "on_remove": on_remove}
        declared.put("ending", backend_texts(lab.backends[:2], 4), 4, **spec)
        for protocol in ("tcp", "udp"):
            for source in (first, second):
                lab.client.send(inside, SERVED_PORT, protocol, source=source).all_answered()
        kept = tracked("tcp", first)
        assert kept
        declared.put("ending", backend_texts(lab.backends[:2], 4), 4, **spec, allow_from=alone(second))
        daemon.wait_until(lambda: tracked("udp", first), 0)
        daemon.wait_until(lambda: tracked("tcp", first), 0 if on_remove == "reset" else kept)
        assert tracked("udp", second)
        assert tracked("tcp", second)


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
