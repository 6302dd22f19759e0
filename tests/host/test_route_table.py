from __future__ import annotations

import asyncio
import ipaddress
import struct
import sys

import pytest

from tests.dataplane.iptables.watch.inside import inside
from tests.dataplane.namespace import Namespace
from vipd.host import netlink, network, route_table, rtnetlink
from vipd.host.requirements import HostRequirements
from vipd.host.route_table import (
    LINK_SCOPE,
    METRIC,
    PROTOCOL,
    Device,
    Route,
    RouteTable,
    device_of,
    route_content,
    route_of,
    table_for_all,
)
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import ExternalAddress, Masquerade, Protocol, family_of


def routes(*given: str) -> RouteTable:
    """A table of `NETWORK[ METRIC][ refuses]`."""
    made = []
    for text in given:
        network, *words = text.split()
        parsed = ipaddress.ip_network(network)
        metric = next((int(word) for word in words if word.isdigit()), 0)
        made.append(
            Route(
                parsed.version,
                int(parsed.network_address),
                parsed.prefixlen,
                metric,
                deliverable="refuses" not in words,
            )
        )
    return RouteTable(made)


def rule(limits: dict[int, bytes] | None = None, table: int = 254, **head: int) -> rtnetlink.Message:
    """A policy rule as the kernel sends it; `limits`: further attributes."""
    fields = {"dst_len": 0, "src_len": 0, "tos": 0, "action": 1, "flags": 0} | head
    lengths = fields["dst_len"], fields["src_len"], fields["tos"]
    body = struct.pack("=BBBBBBBBI", 2, *lengths, min(table, 252), 0, 0, fields["action"], fields["flags"])
    return rtnetlink.Message(body, {15: struct.pack("=I", table)} | (limits or {}))


def route(
    destination: str = "",
    priority: int = 0,
    table: int = 0,
    *,
    flags: int = 0,
    kind: int = 1,
    length: int = 0,
) -> rtnetlink.Message:
    """A route message as the kernel sends it; the table of 8 bits is 254."""
    given = {1: ipaddress.ip_address(destination).packed if destination else b""}
    given |= {number: struct.pack("=I", value) for number, value in ((6, priority), (15, table)) if value}
    body = struct.pack("=BBBBBBBBI", 2, length, 0, 0, 254, 3, 0, kind, flags)
    return rtnetlink.Message(body, {number: value for number, value in given.items() if value})


@pytest.mark.parametrize(
    ("given", "address", "covered"),
    [
        ([], "10.96.0.1", False),
        (["0.0.0.0/0"], "10.96.0.1", True),
        (["0.0.0.0/0"], "fd00:96::1", False),
        (["::/0"], "fd00:96::1", True),
        (["10.96.0.0/12"], "10.111.255.255", True),
        (["10.96.0.0/12"], "10.112.0.0", False),
        (["0.0.0.0/0", "10.96.0.0/16 refuses"], "10.96.0.1", False),
        (["10.96.0.0/16 refuses", "10.96.0.1/32"], "10.96.0.1", True),
        (["::/0 4294967295 refuses"], "fd00:96::1", False),
        (["::/0 4294967295 refuses", "::/0 1024"], "fd00:96::1", True),
        (["::/0 1024", "::/0 4294967295 refuses"], "fd00:96::1", True),
    ],
)
def test_the_longest_prefix_and_then_the_lowest_metric_decide(
    given: list[str], address: str, covered: bool
) -> None:
    assert routes(*given).covers(address) is covered


def test_only_rules_for_every_packet_name_tables() -> None:
    assert table_for_all(rule({6: struct.pack("=I", 5), 21: b"\2"}, table=1000)) == 1000
    assert table_for_all(rule({14: struct.pack("=I", 0xFFFFFFFF)})) == 254
    assert table_for_all(rule()._replace(attributes={})) == 252, "that of 8 bits"
    limited = [
        rule({10: struct.pack("=I", 1)}),  # FRA_FWMARK
        rule({3: b"eth0\0"}),  # FRA_IIFNAME
        rule({14: bytes(4)}),  # FRA_SUPPRESS_PREFIXLEN
        rule(src_len=32),
        rule(flags=2),
        rule(action=6),
    ]
    assert [table_for_all(each) for each in limited] == [None] * len(limited)


def test_an_address_that_is_none_is_a_fault_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    garbled = rtnetlink.Message(b"\2" + bytes(7), {1: b"\x0a\x00\x00"})
    monkeypatch.setattr(network, "listing", lambda *_, **__: [garbled])
    with pytest.raises(OSError, match="answer is not understood"):
        network.read_addresses()


def test_dead_and_throw_routes_are_none() -> None:
    assert route_of(route()) == Route(4, 0, 0)
    assert route_of(route(flags=1)) is None
    assert route_of(route(kind=9)) is None
    refusing = route_of(route("10.0.0.0", 7, 9, kind=6, length=8))
    assert refusing == Route(4, 10 << 24, 8, 7, deliverable=False, table=9)


def link(name: str, index: int, kind: str = "", master: int = 0, flags: int = 1) -> rtnetlink.Message:
    """A device as the kernel sends it."""
    found = {3: name.encode() + b"\0"}
    found |= {18: netlink.attribute(1, kind.encode() + b"\0")} if kind else {}
    found |= {10: struct.pack("=I", master)} if master else {}
    return rtnetlink.Message(struct.pack("=BxHiII", 0, 1, index, flags, 0), found)


def test_a_device_swallows_only_with_nothing_attached() -> None:
    links = [
        link("vipd0", 2, "bridge"),
        link("eth0", 3),
        link("br0", 4, "bridge"),
        link("p", 5, "veth", master=4),
    ]
    assert device_of(links, "vipd0") == Device(2, "bridge", up=True)
    assert device_of(links, "none") is None
    usable = {
        each: (device_of(links, each) or Device(0, "", False)).usable
        for each in ("vipd0", "eth0", "br0", "p")
    }
    assert usable == {"vipd0": True, "eth0": False, "br0": False, "p": False}
    assert not Device(2, "dummy", up=True, member=True).usable


def test_every_address_is_wanted_with_a_backend_if_any_port_has_one() -> None:
    def on(port: int, *backends: str) -> Forwarding:
        key = ForwardingKey("web", str(port), Protocol.TCP, family_of("10.96.0.1"))
        return Forwarding(
            key,
            ("10.96.0.1",),
            port,
            tuple(Endpoint(b, port) for b in backends),
            Masquerade.FORWARDED,
            external_addresses=(ExternalAddress("198.51.100.1"),),
        )

    expected = {"10.96.0.1": "10.244.0.5", "198.51.100.1": "10.244.0.5"}
    assert HostRequirements([on(1), on(2, "10.244.0.5"), on(3, "10.244.0.6")]).vips == expected
    assert HostRequirements([on(1)]).vips == {"10.96.0.1": "", "198.51.100.1": ""}


@pytest.mark.root
def test_many_routes_are_written_at_once_and_each_that_is_refused_is_told() -> None:
    vips = [f"10.96.{n // 250}.{n % 250 + 1}" for n in range(350)]
    refused = {3, 99, 100, 349}
    contents = [route_content(vip, 77 if n in refused else 1, "127.0.0.1") for n, vip in enumerate(vips)]
    contents.append(route_content("fd00::1", 1, ""))
    with Namespace() as namespace:
        asyncio.run(namespace.run(["ip", "link", "set", "lo", "up"], ""))
        errors = inside(namespace.name, lambda: rtnetlink.write_routes(contents))
        again = inside(namespace.name, lambda: rtnetlink.write_routes(contents[:1]))
        found = inside(namespace.name, lambda: list(rtnetlink.listing(rtnetlink.NEW_ROUTE, 0, 10_000)))
    assert {number for number, error in enumerate(errors) if error} == refused
    assert again == [0], "there is one already"
    ours = [message for message in found if route_table.is_own(message)]
    assert len(ours) == 350 - len(refused) + 1
    one = next(m for m in ours if m.attributes[1] == ipaddress.ip_address(vips[0]).packed)
    assert one.attributes[7] == ipaddress.ip_address("127.0.0.1").packed
    assert one.body[5:7] == bytes((PROTOCOL, LINK_SCOPE))
    assert int.from_bytes(one.attributes[6], sys.byteorder) == METRIC


@pytest.mark.root
def test_addresses_and_rules_are_read_of_the_kernel() -> None:
    commands = (
        "ip link set lo up",
        "ip link add vipd0 type bridge",
        "ip link set vipd0 up",
        "ip address add 192.0.2.1 peer 192.0.2.2 dev vipd0",
        "ip address add 2001:db8::1/64 dev vipd0 nodad",
        "ip route add 10.96.0.0/16 dev vipd0 table 1000",
        "ip route add 10.97.0.0/16 dev vipd0 table 1001",
        "ip rule add table 1000",
        "ip rule add from 192.0.2.9 table 1001",
    )
    with Namespace() as namespace:
        for command in commands:
            asyncio.run(namespace.run(command.split(), ""))
        addresses = inside(namespace.name, network.read_addresses)
        routing = inside(namespace.name, lambda: route_table._read_routing("vipd0", rtnetlink.listing))
    own = {address for address in addresses if not address.startswith("fe80:")}
    assert own == {"127.0.0.1", "::1", "192.0.2.1", "2001:db8::1"}, "not the other end"
    assert routing.device is not None
    assert (routing.device.kind, routing.device.up, routing.device.usable) == ("bridge", True, True)
    assert routing.table.covers("10.96.0.1"), "by a rule for all packets"
    assert not routing.table.covers("10.97.0.1"), "by a rule for some"
