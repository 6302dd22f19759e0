"""The client against a real table in a namespace of its own, with the conntrack tool as a witness."""

from __future__ import annotations

import asyncio
import os
import subprocess
import xml.etree.ElementTree as Xml
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import ESTABLISHED, connect_in, insert, made
from tests.dataplane.namespace import Namespace
from vipd.dataplane.conntrack.cleaner import clean
from vipd.dataplane.conntrack.entries import TCP_SYN_SENT, Entry
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack
from vipd.dataplane.conntrack.stale import Reason, flow_targets
from vipd.model.service import Family, Protocol

pytestmark = pytest.mark.root

VIP, VIP6, WEB = ("10.96.0.10", 53), ("fd00:96::a", 53), ("10.96.0.20", 80)
B1, B2 = ("10.244.0.1", 5353), ("10.244.0.2", 5353)
TCP_STATES = {"SYN_SENT": 1, "SYN_RECV": 2, "ESTABLISHED": 3, "FIN_WAIT": 4, "CLOSE_WAIT": 5, "CLOSE": 8}

MIXED = [
    made(("10.10.0.2", 40000), VIP, B1, replied=True),
    made(("10.10.0.2", 40001), VIP),
    made(("10.10.0.2", 40002), VIP, B2, reply_destination=("10.244.0.254", 61000)),
    made(("10.10.0.2", 40003), WEB, B1, protocol=Protocol.TCP, tcp_state=ESTABLISHED, replied=True),
    made(("10.10.0.2", 40004), WEB, protocol=Protocol.TCP, tcp_state=TCP_SYN_SENT),
    made(("10.10.0.2", 40005), WEB, B2, protocol=Protocol.TCP, tcp_state=5, replied=True)._replace(mark=77),
    made(("fd00:10::2", 40006), VIP6, ("fd00:244::1", 5353), replied=True),
    made(("fd00:10::2", 40007), VIP6),
    made(("10.10.0.2", 40008), ("10.96.0.40", 7), B1, protocol=Protocol.SCTP),
]


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with Namespace() as made_namespace:
        yield made_namespace


def read(namespace: Namespace, query: Query) -> list[Entry]:
    with Conntrack(connect_in(namespace.name)()) as table:
        return [entry for chunk in table.dump(query) for entry in chunk]


def read_all(namespace: Namespace) -> list[Entry]:
    return [entry for family in Family for entry in read(namespace, Query(family))]


def delete(namespace: Namespace, *found: Entry) -> int:
    with Conntrack(connect_in(namespace.name)()) as table:
        return table.delete(found)


def witnessed(namespace: Namespace) -> list[tuple[object, ...]]:
    """What the conntrack tool sees."""
    found: list[tuple[object, ...]] = []
    for family in Family:
        argv = ["conntrack", "-L", "-f", str(family), "-o", "xml,id"]
        done = subprocess.run(
            ["ip", "netns", "exec", namespace.name, *argv], capture_output=True, text=True, check=True
        )
        for flow in Xml.fromstring(done.stdout) if done.stdout.strip() else ():  # noqa: S314
            original, reply, rest = flow.findall("meta")
            state = rest.findtext("state") or ""
            found.append(
                (
                    original.find("layer4").get("protoname"),  # type: ignore[union-attr]
                    *_ends(original),
                    *_ends(reply),
                    rest.find("unreplied") is None,
                    TCP_STATES[state] if original.find("layer4[@protoname='tcp']") is not None else 0,
                    int(rest.findtext("mark") or 0),
                    int(rest.findtext("id") or 0),
                )
            )
    return sorted(found, key=str)


def _ends(meta: Xml.Element) -> tuple[tuple[str, int], tuple[str, int]]:
    def text(name: str) -> str:
        return meta.findtext(f".//{name}") or ""

    return (text("src"), int(text("sport"))), (text("dst"), int(text("dport")))


def test_the_conntrack_tool_sees_the_same(namespace: Namespace) -> None:
    insert(connect_in(namespace.name), MIXED)
    ours = [
        (
            str(e.protocol),
            e.source,
            e.destination,
            e.reply_source,
            e.reply_destination,
            e.replied,
            e.tcp_state,
            e.mark,
            int.from_bytes(e.identity[-4:], "big"),
        )
        for e in read_all(namespace)
    ]
    assert sorted(ours, key=str) == witnessed(namespace)
    assert len(ours) == len(MIXED)


QUERIES = [
    (Query(Family.IPV4, Protocol.UDP), {40000, 40001, 40002}),
    (Query(Family.IPV4, Protocol.UDP, unreplied=True), {40001, 40002}),
    (Query(Family.IPV4, Protocol.TCP, unreplied=True), {40004}),
    (Query(Family.IPV4, Protocol.SCTP), {40008}),
    (Query(Family.IPV6, Protocol.UDP), {40006, 40007}),
    (Query(Family.IPV6, Protocol.TCP), set()),
    (Query(Family.IPV4, Protocol.UDP, backend=B1[0]), {40000}),
    (Query(Family.IPV4, Protocol.TCP, backend=B2[0]), {40005}),
]


def test_queries(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel leaves out what is not asked for: else a host with a million established connections would
    have them all read. Linux before 5.15 cannot leave out answered ones."""
    insert(connect_in(namespace.name), MIXED)
    for query, ports in QUERIES:
        assert {entry.source[1] for entry in read(namespace, query)} == ports, query
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 15):
        monkeypatch.setattr(Query, "fits", lambda self, entry: True)
        for query, ports in QUERIES:
            assert {entry.source[1] for entry in read(namespace, query)} == ports, query


def test_exactly_the_named_entries_are_deleted(namespace: Namespace) -> None:
    insert(connect_in(namespace.name), MIXED)
    for entry in read_all(namespace):
        before = set(read_identities(namespace))
        assert delete(namespace, entry) == 1
        assert before - set(read_identities(namespace)) == {entry.identity}
    assert witnessed(namespace) == []


def read_identities(namespace: Namespace) -> list[bytes]:
    return [entry.identity for entry in read_all(namespace)]


def test_a_younger_entry_between_the_same_ends_is_left_alone(namespace: Namespace) -> None:
    """Between reading and deleting, a flow may end and its client begin again, rightly translated."""
    connect = connect_in(namespace.name)
    insert(connect, MIXED[:1])
    (old,) = read_all(namespace)
    assert delete(namespace, old) == 1
    # The kernel makes the id of the entry's place in memory among others, which may be used again: then that
    # is given to others, too.
    for attempt in range(20):
        others = [made((f"10.10.9.{attempt}", port), VIP, B1) for port in range(1, 200)]
        insert(connect, [*others, MIXED[0]._replace(reply_source=B2)])
        young = [entry for entry in read_all(namespace) if entry.source == old.source]
        assert len(young) == 1
        if young[0].identity != old.identity:
            break
        delete(namespace, young[0])
    assert young[0].identity != old.identity
    assert delete(namespace, old) == 0
    assert young[0].identity in read_identities(namespace)


def test_zones_are_apart(namespace: Namespace) -> None:
    connect = connect_in(namespace.name)
    insert(connect, MIXED[:1])
    insert(connect, MIXED[:1], zone=5)
    first, second = read_all(namespace)
    assert first.identity != second.identity
    zoned = max(first, second, key=lambda entry: len(entry.identity))
    assert delete(namespace, zoned) == 1
    assert zoned.identity not in read_identities(namespace)
    assert len(read_all(namespace)) == 1


@pytest.mark.nightly
def test_of_a_hundred_thousand_entries_the_kernel_leaves_out_the_answered_ones(namespace: Namespace) -> None:
    connect, count = connect_in(namespace.name), 100_000

    def flows(to: tuple[str, int], protocol: Protocol, state: int) -> Iterator[Entry]:
        for n in range(count // 2):
            source = (f"10.9.{n >> 8 & 255}.{n & 255}", 1024 + (n >> 16))
            yield made(source, to, B2 if n % 10 else B1, protocol=protocol, replied=True, tcp_state=state)

    insert(connect, flows(VIP, Protocol.UDP, 0))
    insert(connect, flows(WEB, Protocol.TCP, ESTABLISHED))
    for ends_tcp, examined in ((False, count // 2), (True, count - count // 20)):
        services = [
            forwarding(*VIP, B2),
            replace(forwarding(*WEB, B2, protocol=Protocol.TCP), ends_flows=ends_tcp),
        ]
        result = asyncio.run(clean(flow_targets(services, []), connect))
        assert (result.examined, result.deleted) == (examined, {Reason.BACKEND_GONE: count // 20})
