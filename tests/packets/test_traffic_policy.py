"""Under the policy `local` traffic goes to backends on this host alone; which traffic, the policy says.

One backend is a server of the host's own, on the address that the host has towards the client: the one from
which the kernel lets a UDP server answer that has not bound to any.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import CLUSTER_CIDRS, HOST_TOWARDS_BACKENDS, Lab
from tests.lab.traffic import Result
from tests.packets.outside import (
    SILENCE,
    Declared,
    backend_texts,
    forward_policies,
    host_addresses,
    inside_address,
    node_port,
    outside_address,
    outside_lab,
)
from tests.packets.services import ENOUGH_OF_TWO, SERVED_PORT

pytestmark = pytest.mark.root

ALL = frozenset({"host", "b1"})
LOCAL_OUTSIDE = {"external": "local"}
LOCAL_INSIDE = {"internal": "local"}
ASK = """
import http.client, sys, time
connection, end = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=20), time.monotonic() + 20
while True:
    try:
        connection.connect()
        break
    except ConnectionRefusedError:  # the port is opened a moment after the rules are there
        if time.monotonic() > end:
            raise
        time.sleep(0.05)
connection.request("GET", "/healthz")
answer = connection.getresponse()
print(answer.status, answer.getheader("X-Load-Balancing-Endpoint-Weight"), answer.read().decode())
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with outside_lab() as built:
        built.host.serve(tcp=[SERVED_PORT], udp=[SERVED_PORT])
        yield built


def mixed(lab: Lab, family: int) -> tuple[str, ...]:
    return backend_texts((lab.host, lab.backends[0]), family)


def spread(node: Node, address: str, port: int = SERVED_PORT, protocol: str = "tcp") -> set[str]:
    return set(node.send(address, port, protocol, count=ENOUGH_OF_TWO).all_answered().backends)


def reached(node: Node, address: str, port: int, protocol: str, backend: str) -> Result:
    """The outcome in which this backend answered, where not every flow need be answered."""
    for _ in range(20):
        result = node.send(address, port, protocol, count=ENOUGH_OF_TWO, timeout=SILENCE)
        assert set(result.backends) <= ALL, address
        if backend in result.backends:
            return result
    pytest.fail(f"{backend} never answered at {address}: {result}")


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_external_local(lab: Lab, declared: Declared, family: int, protocol: str) -> None:
    inside, outside, number = inside_address(family), outside_address(family), node_port()
    ports = [{"port": SERVED_PORT, "protocol": protocol, "node_port": number}]
    spec = {"address": inside, "ports": ports, "load_balancer_addresses": outside}
    declared.put("outward", mixed(lab, family), family, **spec, traffic_policy=LOCAL_OUTSIDE)
    for _ in forward_policies(lab, family):
        for address, port in ((outside, SERVED_PORT), *((a, number) for a in host_addresses(family))):
            result = lab.client.send(address, port, protocol, count=24).all_answered()
            assert set(result.backends) == {"host"}, address
            assert result.sources == {lab.client.address(family)}, address
            # A process on the host stands for traffic that would have gone out and come back: to all.
            if protocol == "tcp":
                assert spread(lab.host, address, port) == ALL, address
            else:
                # A UDP server that is bound to no address may answer its own host from the wrong one.
                reached(lab.host, address, port, protocol, "b1")
        # The service's own address is not held to it.
        assert spread(lab.client, inside, SERVED_PORT, protocol) == ALL


@pytest.mark.parametrize("kind", ["external_addresses", "load_balancer_addresses", "node_port"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_a_backend_reaches_itself_from_outside(
    lab: Lab, declared: Declared, family: int, protocol: str, kind: str
) -> None:
    own, outside, number = lab.backends[0], outside_address(family), node_port()
    ports = [{"port": SERVED_PORT, "protocol": protocol, "node_port": number}]
    spec = {"address": inside_address(family), "ports": ports, "traffic_policy": LOCAL_OUTSIDE}
    here = {"address": own.address(family), "node": socket.gethostname()}
    spec |= {} if kind == "node_port" else {kind: [outside]}
    declared.put("itself", (here,), family, **spec)
    to = (lab.host.address(family), number) if kind == "node_port" else (outside, SERVED_PORT)
    # What comes from elsewhere keeps its source, so it is not everything that is masqueraded.
    assert lab.client.send(*to, protocol, count=3).all_answered().sources == {lab.client.address(family)}
    result = own.send(*to, protocol, count=10).all_answered()
    assert set(result.backends) == {own.name}
    assert result.sources == {HOST_TOWARDS_BACKENDS[family]}


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_external_local_without_a_local_backend_is_dropped(
    lab: Lab, declared: Declared, family: int, protocol: str
) -> None:
    inside, outside, number = inside_address(family), outside_address(family), node_port()
    ports = [{"port": SERVED_PORT, "protocol": protocol, "node_port": number}]
    spec = {"address": inside, "ports": ports, "external_addresses": outside}
    remote = backend_texts(lab.backends[:1], family)
    declared.put("elsewhere", remote, family, **spec, traffic_policy=LOCAL_OUTSIDE)
    lab.client.send(outside, SERVED_PORT, protocol, count=2, timeout=SILENCE).all_failed("timeout")
    lab.client.send(lab.host.address(family), number, protocol, count=2, timeout=SILENCE).all_failed(
        "timeout"
    )
    assert spread(lab.client, inside, SERVED_PORT, protocol) == {"b1"}
    for address, port in ((outside, SERVED_PORT), (lab.host.address(family), number)):
        assert spread(lab.host, address, port, protocol) == {"b1"}


@pytest.mark.parametrize("family", [4, 6])
def test_internal_local(lab: Lab, declared: Declared, family: int) -> None:
    inside, outside, number = inside_address(family), outside_address(family), node_port()
    ports = [{"port": SERVED_PORT, "protocol": "tcp", "node_port": number}]
    spec = {"address": inside, "ports": ports, "external_addresses": outside}
    declared.put("inward", mixed(lab, family), family, **spec, traffic_policy=LOCAL_INSIDE)
    for _ in forward_policies(lab, family):
        for node in (lab.client, lab.host):
            assert spread(node, inside) == {"host"}
            assert spread(node, outside) == ALL
            assert spread(node, lab.host.address(family), number) == ALL


@pytest.mark.parametrize("family", [4, 6])
def test_internal_local_without_a_local_backend_is_dropped(lab: Lab, declared: Declared, family: int) -> None:
    inside, outside = inside_address(family), outside_address(family)
    spec = {"address": inside, "ports": [f"{SERVED_PORT}/tcp"], "external_addresses": outside}
    # Before, the rival answers for this address: silence can only be vipd's doing.
    lab.client.send(inside, SERVED_PORT).all_answered()
    remote = backend_texts(lab.backends[:1], family)
    declared.put("inward-elsewhere", remote, family, **spec, traffic_policy=LOCAL_INSIDE)
    for node in (lab.client, lab.host):
        node.send(inside, SERVED_PORT, count=2, timeout=SILENCE).all_failed("timeout")
        assert spread(node, outside) == {"b1"}


@pytest.mark.parametrize("family", [4, 6])
def test_without_any_backend_all_is_refused(lab: Lab, declared: Declared, family: int) -> None:
    inside, outside, number = inside_address(family), outside_address(family), node_port()
    ports = [{"port": SERVED_PORT, "protocol": "tcp", "node_port": number}]
    spec = {"address": inside, "ports": ports, "load_balancer_addresses": outside}
    both = {**LOCAL_INSIDE, **LOCAL_OUTSIDE}
    declared.put("nowhere", (), family, **spec, traffic_policy=both)
    for address, port in ((inside, SERVED_PORT), (outside, SERVED_PORT), (lab.host.address(family), number)):
        for node in (lab.client, lab.host):
            node.send(address, port).all_failed("refused")


@pytest.mark.parametrize("family", [4, 6])
def test_backends_come_and_go_on_the_host(lab: Lab, declared: Declared, family: int) -> None:
    outside = outside_address(family)
    spec = {"ports": [f"{SERVED_PORT}/tcp"], "external_addresses": outside, "traffic_policy": LOCAL_OUTSIDE}
    remote = backend_texts(lab.backends[:1], family)
    for _ in range(2):
        declared.put("moving", remote, family, **spec)
        lab.client.send(outside, SERVED_PORT, timeout=SILENCE).all_failed("timeout")
        declared.put("moving", mixed(lab, family), family, **spec)
        assert spread(lab.client, outside) == {"host"}
    declared.put("moving", (), family, **spec)
    lab.client.send(outside, SERVED_PORT).all_failed("refused")


@pytest.mark.parametrize("family", [4, 6])
def test_cluster_networks_are_not_held_to_the_external_policy(
    lab: Lab, daemon: Daemon, dataplane: str, family: int
) -> None:
    outside = outside_address(family)
    spec = {"ports": [f"{SERVED_PORT}/tcp"], "external_addresses": outside, "traffic_policy": LOCAL_OUTSIDE}
    daemon.stop()
    try:
        with Daemon(lab.host, dataplane=dataplane, cluster_cidrs=list(CLUSTER_CIDRS)) as clustered:
            Declared(clustered).put("pods", mixed(lab, family), family, **spec)
            assert spread(lab.client, outside) == {"host"}
            neighbour = lab.backends[1]
            own = {"host": neighbour.address(family)}
            result = reached(neighbour, outside, SERVED_PORT, "tcp", "host")
            assert {a.backend: a.source for a in result.answers}.items() >= own.items()
            # What went to the other backend is answered past the host, over the bridge, and so lost here:
            # that flows did go there is what counts.
            assert result.failures
    finally:
        daemon.start()


def ask_health(node: Node, address: str, port: int) -> tuple[int, int, dict[str, object]]:
    said = node.run(sys.executable, "-I", "-c", ASK, address, str(port)).stdout
    status, weight, body = said.split(maxsplit=2)
    return int(status), int(weight), json.loads(body)


@pytest.mark.parametrize("family", [4, 6])
def test_the_health_port_tells_of_local_backends(
    lab: Lab, daemon: Daemon, declared: Declared, family: int
) -> None:
    outside, number = outside_address(family), node_port()
    spec = {
        "ports": [f"{SERVED_PORT}/tcp"],
        "load_balancer_addresses": outside,
        "traffic_policy": LOCAL_OUTSIDE,
        "health_port": number,
    }
    declared.put("healthy", mixed(lab, family), family, **spec)
    for node in (lab.client, lab.host):
        status, weight, body = ask_health(node, lab.host.address(family), number)
        assert (status, weight, body["localEndpoints"]) == (200, 1, 1)
    declared.put("healthy", backend_texts(lab.backends[:1], family), family, **spec)
    status, weight, body = ask_health(lab.client, lab.host.address(family), number)
    assert (status, weight, body["localEndpoints"]) == (503, 0, 0)
    declared.drop("healthy", family)
    daemon.wait_until(
        lambda: sorted(lab.client.send(lab.host.address(family), number, timeout=2).failures), ["refused"]
    )


def test_the_health_port_passes_an_input_policy_of_drop(lab: Lab, declared: Declared, dataplane: str) -> None:
    if dataplane == "nftables":
        pytest.skip("a table of our own cannot accept what another drops; the warning shows the rule")
    outside, number = outside_address(4), node_port()
    spec = {"load_balancer_addresses": outside, "traffic_policy": LOCAL_OUTSIDE, "health_port": number}
    declared.put("guarded", mixed(lab, 4), 4, **spec, ports=[f"{SERVED_PORT}/tcp"])
    lab.host.run("iptables", "-P", "INPUT", "DROP")
    try:
        assert ask_health(lab.client, lab.host.ipv4, number)[0] == 200
        lab.client.send(lab.host.ipv4, SERVED_PORT, timeout=SILENCE).all_failed("timeout")
    finally:
        lab.host.run("iptables", "-P", "INPUT", "ACCEPT")
