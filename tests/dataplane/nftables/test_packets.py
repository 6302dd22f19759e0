"""Real flows through the table: who serves them, and what they meet."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.dataplane.nftables.serving import (
    CLIENTS,
    SERVED,
    VIPS,
    built_lab,
    many_clients,
    other,
    synced_in,
    web,
)
from tests.lab.inside import Synced
from tests.lab.topology import CLIENT_SOURCES, CLIENT_SOURCES_IPV6, Lab
from vipd.model.service import (
    Affinity,
    Backend,
    Balance,
    ExternalAddress,
    Protocol,
    Service,
    ServicePort,
    TrafficPolicy,
)

pytestmark = pytest.mark.root


@pytest.mark.parametrize("family", [4, 6])
def test_checksums_are_right_without_offloading(lab: Lab, serving: Synced, family: int) -> None:
    """Between namespaces checksums are left to nobody; without offloading they are made and looked at."""
    serving.become(
        web(lab), other(web(lab), name="pinned", addresses=("10.96.0.2", "fd00:96::2"), affinity=Affinity(60))
    )
    on_host = [(lab.host, device) for device in ("clients", "cluster", *(b.name for b in lab.backends))]
    for node, device in ((lab.client, "eth0"), *on_host, *((b, "eth0") for b in lab.backends)):
        node.run(sys.executable, "-I", CLIENTS, "checksums", device)
    for node in (lab.client, lab.host):
        for vip in (VIPS[family], VIPS[family][:-1] + "2"):
            for protocol in ("tcp", "udp"):
                node.send(vip, 80, protocol, count=20).all_answered()


def test_source_hash_is_the_same_on_every_host(lab: Lab, serving: Synced, tmp_path: Path) -> None:
    """Two hosts that know the backends in another order: each client meets the same one by both."""
    hashed = other(web(lab, 3, 2, 1), balance=Balance.SOURCE_HASH)
    serving.become(hashed)
    first = many_clients(lab, VIPS[4], 100)
    with built_lab() as second:
        elsewhere = synced_in(second, tmp_path / "second")
        elsewhere.become(other(hashed, name="elsewhere", backends=hashed.backends[::-1]))
        assert many_clients(second, VIPS[4], 100) == first
        ipv6 = [node.send(VIPS[6], 80).all_answered().backends for node in (lab.client, second.client)]
        assert ipv6[0] == ipv6[1]
    assert set(first.values()) == {"b1", "b2", "b3"}


KEEPING: dict[str, tuple[dict[str, object], float]] = {
    "hashed": ({"balance": Balance.SOURCE_HASH}, 0.03),
    "pinned": ({"affinity": Affinity(600)}, 0.0),
}
"""How clients keep their backends, and the share of those that may move when another backend leaves."""


@pytest.mark.parametrize("way", KEEPING)
def test_many_clients_keep_their_backends(lab: Lab, serving: Synced, way: str) -> None:
    changes, may_move = KEEPING[way]
    service = other(web(lab), **changes)
    serving.become(service)
    first = many_clients(lab, VIPS[4], 200)
    assert set(first.values()) == {"b1", "b2", "b3"}
    assert many_clients(lab, VIPS[4], 200) == first
    # Whoever had the backend that leaves gets another; and who was moved stays, if he is pinned.
    left = tuple(b for b in service.backends if b.address != lab.backends[1].ipv4)
    serving.become(other(service, backends=left))
    second = many_clients(lab, VIPS[4], 200)
    assert "b2" not in second.values()
    moved = [source for source in first if first[source] != "b2" and second[source] != first[source]]
    assert len(moved) <= may_move * len(first)
    serving.restart()
    serving.become(service)
    assert many_clients(lab, VIPS[4], 200) == (second if way == "pinned" else first)


@pytest.mark.parametrize("family", [4, 6])
def test_a_pin_to_another_host_gives_way_to_the_local_policy(lab: Lab, serving: Synced, family: int) -> None:
    """Then the client has a backend that serves it by every way, and keeps that one."""
    outside = {4: "203.0.113.5", 6: "2001:db8:9::5"}[family]
    nearest = lab.backends[0]
    serving.host_changed(nearest.address(family))
    service = Service(
        "web",
        (VIPS[family],),
        (ServicePort(80, Protocol.TCP, "tcp", SERVED, node_port=30080),),
        tuple(Backend(backend.address(family)) for backend in lab.backends),
        affinity=Affinity(600),
        external_addresses=(ExternalAddress(outside, True),),
        external_policy=TrafficPolicy.LOCAL,
    )
    serving.become(service)
    sources = CLIENT_SOURCES if family == 4 else CLIENT_SOURCES_IPV6
    ways = ((VIPS[family], 80), (outside, 80), (lab.host.address(family), 30080))

    def served(vip: str, port: int) -> set[str]:
        answers = [lab.client.send(vip, port, source=source).all_answered() for source in sources]
        return {backend for answer in answers for backend in answer.backends}

    served(*ways[0])
    assert [served(*way) for way in (*ways[1:], ways[0])] == [{nearest.name}] * 3
    assert pins(lab, family) == len(sources)


@pytest.mark.parametrize("family", [4, 6])
def test_counts_of_backends_that_are_gone_leave_the_kernel_with_their_last_flows(
    lab: Lab, serving: Synced, family: int
) -> None:
    service, vip = web(lab, backends=lab.backends[:2]), VIPS[family]
    serving.become(service)
    lab.client.send(vip, 80, count=20).all_answered()
    total = serving.flows().total()
    lab.client.send(vip, 80, count=10).all_answered()  # after the reading, before the deletion
    serving.become(web(lab, backends=lab.backends[:1]))
    family_name = "ip" if family == 4 else "ip6"

    def listed() -> str:
        return lab.host.run("nft", "list", "set", family_name, "vipd", "flows").stdout

    gone = lab.backends[1].address(family)
    assert gone in listed()
    total += serving.flows(garbage=True).total()
    assert gone not in listed()
    assert serving.pending() == "", "the table is as it should be"
    lab.client.send(vip, 80, count=5).all_answered()
    serving.become(service)
    lab.client.send(vip, 80, count=20).all_answered()
    assert total + serving.flows().total() == 55
    assert gone in listed()


def pins(lab: Lab, family: int) -> int:
    table = ("ip" if family == 4 else "ip6", "vipd", "pins")
    return lab.host.run("nft", "list", "map", *table).stdout.count("expires")
