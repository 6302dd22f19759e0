"""Real flows through the table: who serves them, what they meet, and that no change loses one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.chi_square import chi_square_p
from tests.lab.node import Node
from tests.lab.topology import CLIENT_SOURCES, CLUSTER_CIDRS, HOST_TOWARDS_BACKENDS, Lab
from tests.nftables.programmed import Inside, Programmed
from vipd.dataplane.nftables.plan import elements_text
from vipd.model import (
    Affinity,
    Backend,
    Balance,
    Endpoint,
    ExternalAddress,
    Family,
    ForwardingKey,
    Masquerade,
    Policy,
    Protocol,
    Service,
    ServicePort,
)
from vipd.selection import Host

pytestmark = pytest.mark.root

SERVED = 8080
PORTS = (ServicePort(80, Protocol.TCP, "tcp", SERVED), ServicePort(80, Protocol.UDP, "udp", SERVED))
VIPS = {4: "10.96.0.1", 6: "fd00:96::1"}
SILENCE = 0.4
CLIENTS = str(Path(__file__).parent / "clients.py")
MANY, MANY_NETWORK = "10.20.0.0", "10.20.0.0/16"
CHANGES = 120
"""Transactions while flows are made."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as built:
        built.serve_everywhere(SERVED)
        built.host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        built.client.run("ip", "route", "add", "local", MANY_NETWORK, "dev", "lo")
        built.host.run("ip", "route", "add", MANY_NETWORK, "via", built.client.ipv4)
        yield built


@pytest.fixture
def programmed(lab: Lab, tmp_path: Path) -> Iterator[Programmed]:
    own = frozenset({*HOST_TOWARDS_BACKENDS.values(), lab.host.ipv4, lab.host.ipv6})
    made = Programmed(Inside(lab.host.namespace), tmp_path, host=Host(own), cluster_cidrs=list(CLUSTER_CIDRS))
    yield made
    made.become()


def web(lab: Lab, *weights: int, backends: tuple[Node, ...] | None = None) -> Service:
    """A service of both families over the lab's backends."""
    nodes = lab.backends if backends is None else backends
    given = weights or (1,) * len(nodes)
    pairs = list(zip(nodes, given, strict=True))
    return Service(
        "web",
        tuple(VIPS.values()),
        PORTS,
        tuple(Backend(node.address(family), None, weight) for family in (4, 6) for node, weight in pairs),
    )


def other(service: Service, **changes: object) -> Service:
    return replace(service, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_weights(lab: Lab, programmed: Programmed, family: int, protocol: str) -> None:
    programmed.become(web(lab, 5, 2, 1))
    for node in (lab.client, lab.host):
        result = node.send(VIPS[family], 80, protocol, count=400).all_answered()
        assert chi_square_p(result.backends, {"b1": 5, "b2": 2, "b3": 1}) > 0.0001, result.backends


@pytest.mark.parametrize("family", [4, 6])
def test_checksums_are_right_without_offloading(lab: Lab, programmed: Programmed, family: int) -> None:
    """Between namespaces checksums are left to nobody; without offloading they are made and looked at."""
    programmed.become(
        web(lab), other(web(lab), name="pinned", addresses=("10.96.0.2", "fd00:96::2"), affinity=Affinity(60))
    )
    on_host = [(lab.host, device) for device in ("clients", "cluster", *(b.name for b in lab.backends))]
    for node, device in ((lab.client, "eth0"), *on_host, *((b, "eth0") for b in lab.backends)):
        node.run(sys.executable, "-I", CLIENTS, "checksums", "--to", device)
    for node in (lab.client, lab.host):
        for vip in (VIPS[family], VIPS[family][:-1] + "2"):
            for protocol in ("tcp", "udp"):
                node.send(vip, 80, protocol, count=60).all_answered()


@pytest.mark.parametrize("family", [4, 6])
def test_round_robin_takes_turns(lab: Lab, programmed: Programmed, family: int) -> None:
    programmed.become(other(web(lab, 2, 1, 1), balance=Balance.ROUND_ROBIN))
    result = lab.client.send(VIPS[family], 80, count=40).all_answered()
    assert result.backends == {"b1": 20, "b2": 10, "b3": 10}


@pytest.mark.parametrize("family", [4, 6])
def test_source_hash_keeps_clients_when_another_backend_leaves(
    lab: Lab, programmed: Programmed, family: int
) -> None:
    hashed = other(web(lab), balance=Balance.SOURCE_HASH)
    programmed.become(hashed)
    if family == 6:
        assert len(lab.client.send(VIPS[6], 80, count=20).all_answered().backends) == 1
        return
    before = many_clients(lab, VIPS[4], 300)
    assert many_clients(lab, VIPS[4], 300) == before
    assert set(before.values()) == {"b1", "b2", "b3"}
    programmed.become(
        other(hashed, backends=tuple(b for b in hashed.backends if b.address != lab.backends[2].ipv4))
    )
    after = many_clients(lab, VIPS[4], 300)
    moved = [source for source in before if before[source] != "b3" and after[source] != before[source]]
    assert len(moved) <= 0.03 * len(before)
    assert "b3" not in after.values()


def test_a_thousand_clients_keep_their_backends(lab: Lab, programmed: Programmed) -> None:
    pinned = other(web(lab), affinity=Affinity(600))
    programmed.become(pinned)
    first = many_clients(lab, VIPS[4], 1000)
    assert set(first.values()) == {"b1", "b2", "b3"}
    assert many_clients(lab, VIPS[4], 1000) == first
    # Whoever had the backend that leaves gets another; nobody else moves; and who was moved stays.
    left = tuple(b for b in pinned.backends if b.address != lab.backends[1].ipv4)
    programmed.become(other(pinned, backends=left))
    second = many_clients(lab, VIPS[4], 1000)
    assert "b2" not in second.values()
    assert {s: b for s, b in second.items() if first[s] != "b2"} == {
        s: b for s, b in first.items() if b != "b2"
    }
    programmed.restart()
    programmed.become(pinned)
    assert many_clients(lab, VIPS[4], 1000) == second


def test_affinity_is_refreshed_by_new_flows_and_ends(lab: Lab, programmed: Programmed) -> None:
    programmed.become(other(web(lab), affinity=Affinity(5)))
    first = {f: lab.client.send(vip, 80, count=20).all_answered().backends for f, vip in VIPS.items()}
    assert [len(backends) for backends in first.values()] == [1, 1]
    for _ in range(2):
        time.sleep(2.7)
        for family, vip in VIPS.items():
            assert set(lab.client.send(vip, 80).all_answered().backends) == set(first[family])
    assert [pins(programmed, family) for family in VIPS] == [1, 1]
    time.sleep(5.3)
    assert [pins(programmed, family) for family in VIPS] == [0, 0]


def test_counters_last_over_changes_and_restarts(lab: Lab, programmed: Programmed) -> None:
    service = web(lab)
    programmed.become(service)
    lab.client.send(VIPS[4], 80, count=30).all_answered()
    lab.host.send(VIPS[4], 80, "udp", count=12).all_answered()
    programmed.become(web(lab, 1, 1, 5))
    programmed.restart()
    programmed.become(service)
    lab.client.send(VIPS[6], 80, count=9).all_answered()
    counted = {key: sum(flows.values()) for key, flows in counters(programmed).items()}
    assert {(k.protocol, k.family): flows for k, flows in counted.items()} == {
        (Protocol.TCP, 4): 30,
        (Protocol.UDP, 4): 12,
        (Protocol.TCP, 6): 9,
    }


@pytest.mark.parametrize("family", [4, 6])
def test_refusals_and_ping(lab: Lab, programmed: Programmed, family: int) -> None:
    vip = VIPS[family]
    programmed.become(web(lab))
    for node in (lab.client, lab.backends[0]):
        node.send(vip, 81, count=2, timeout=0.9).all_failed("refused")
        node.send(vip, 81, "udp", count=2, timeout=0.9).all_failed("refused")
        assert node.run("ping", "-n", "-c", "1", "-W", "1", vip, check=False).returncode == 0
    programmed.become(other(web(lab), backends=()))
    for node, protocol in ((lab.client, "tcp"), (lab.client, "udp"), (lab.host, "tcp")):
        node.send(vip, 80, protocol, count=2, timeout=0.9).all_failed("refused")
    assert lab.client.run("ping", "-n", "-c", "1", "-W", "0.3", vip, check=False).returncode != 0


@pytest.mark.parametrize("mode", list(Masquerade))
def test_sources_seen(lab: Lab, programmed: Programmed, mode: Masquerade) -> None:
    programmed.become(other(web(lab), masquerade=mode))
    for family in (4, 6):
        seen = lab.client.send(VIPS[family], 80, count=6).all_answered().sources
        kept = mode is Masquerade.HAIRPIN
        assert seen == {lab.client.address(family) if kept else HOST_TOWARDS_BACKENDS[family]}
    programmed.become(other(web(lab, backends=lab.backends[:1]), masquerade=mode))
    hairpin = lab.backends[0].send(VIPS[4], 80, count=3).all_answered()
    assert hairpin.sources == {HOST_TOWARDS_BACKENDS[4]}


@pytest.mark.parametrize("family", [4, 6])
def test_traffic_from_outside(lab: Lab, programmed: Programmed, family: int) -> None:
    """Limited sources, a node port, and the local policy: a remote backend serves the host itself alone."""
    outside = {4: "203.0.113.5", 6: "2001:db8:9::5"}[family]
    allowed = f"{lab.client.address(family)}/{32 if family == 4 else 128}"
    service = Service(
        "web",
        (VIPS[family],),
        (ServicePort(80, Protocol.TCP, "tcp", SERVED, node_port=30080),),
        (Backend(lab.backends[0].address(family)),),
        external_addresses=(ExternalAddress(outside, True, (allowed,)),),
    )
    programmed.become(service)
    lab.client.send(outside, 80, count=3).all_answered()
    second = CLIENT_SOURCES[1] if family == 4 else "fd00:10::3"
    lab.client.send(outside, 80, source=second, timeout=SILENCE).all_failed("timeout")
    for node in (lab.client, lab.host):
        node.send(lab.host.address(family), 30080, count=3).all_answered()
    programmed.become(other(service, external_policy=Policy.LOCAL))
    lab.client.send(outside, 80, timeout=SILENCE).all_failed("timeout")
    lab.client.send(lab.host.address(family), 30080, timeout=SILENCE).all_failed("timeout")
    lab.host.send(lab.host.address(family), 30080, count=3).all_answered()
    lab.client.send(VIPS[family], 80, count=3).all_answered()


@pytest.mark.parametrize("affinity", [None, Affinity(1)])
def test_no_change_loses_a_flow(
    lab: Lab, programmed: Programmed, tmp_path: Path, affinity: Affinity | None
) -> None:
    b1, b2, b3 = lab.backends
    states = [
        other(web(lab, *weights, backends=nodes), affinity=affinity)
        for nodes, weights in (((b1, b2, b3), (1, 1, 1)), ((b1,), (1,)), ((b2, b3), (5, 2)), ((b3,), (1,)))
    ]
    texts = changes(programmed, states)
    client = lab.client.start(sys.executable, "-I", CLIENTS, "steady", "--to", VIPS[4], "--port", "80")
    with (tmp_path / "nft").open("w") as errors:
        nft = lab.host.start("nft", "-i", stderr=errors)
    assert nft.stdin is not None
    assert nft.stdout is not None
    for number in range(CHANGES):
        nft.stdin.write(texts[number % len(texts)])
    nft.communicate("", timeout=100)
    assert (tmp_path / "nft").read_text() == ""
    outcomes, _ = client.communicate("", timeout=30)
    served = json.loads(outcomes)
    assert set(served) <= {"b1", "b2", "b3"}, served
    assert sum(served.values()) > 100


def changes(programmed: Programmed, states: list[Service]) -> list[str]:
    """One line for each transaction that leads from a state to the next, and from the last to the first."""
    for state in states:
        programmed.declare([state])
        programmed.write()
    lines = []
    for state in states:
        programmed.declare([state])
        part = programmed.plan().plans[Family.IPV4]
        steps = (part.early, *part.steps, part.late)
        text = elements_text("ip vipd", steps)
        lines.append(text.strip().replace("\n", "; ") + "\n")
        programmed.write()
    return lines


def many_clients(lab: Lab, vip: str, count: int) -> dict[str, str]:
    """Which backend answers each of many addresses."""
    asked = ("many", "--to", vip, "--port", "80", "--from", MANY, "--count", str(count))
    found: dict[str, str] = json.loads(
        lab.client.run(sys.executable, "-I", CLIENTS, *asked, timeout=60).stdout
    )
    return found


def counters(programmed: Programmed) -> dict[ForwardingKey, dict[Endpoint, int]]:
    return asyncio.run(programmed.dataplane.counters())


def pins(programmed: Programmed, family: int) -> int:
    table = "ip" if family == 4 else "ip6"
    return programmed.inside.nft("list", "map", table, "vipd", "pins").count("expires")
