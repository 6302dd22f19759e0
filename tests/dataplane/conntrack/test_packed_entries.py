"""The quick reading of entries finds in every message what the thorough one finds; and what both count."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import made, new_request
from tests.lab.examples import examples
from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.entries import (
    DESTINATION_TRANSLATED,
    SOURCE_TRANSLATED,
    TCP_CLOSE,
    TCP_ESTABLISHED,
    TCP_TIME_WAIT,
    Entry,
    parse,
)
from vipd.dataplane.conntrack.live import live_flows
from vipd.dataplane.conntrack.live_counts import live_counts
from vipd.dataplane.conntrack.messages import NEW
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.conntrack.packed_entries import PackedEntry, PackedReader
from vipd.host.netlink import (
    ATTRIBUTES,
    FAMILY_NUMBERS,
    NESTED,
    MalformedMessageError,
    attribute,
    attributes,
    message,
    nested,
    nfgenmsg,
    split,
    u32,
    walk,
)
from vipd.model.service import Protocol

UDP, ICMP = 17, 1
CONTAINERS = (entries.CTA_TUPLE_ORIG, entries.CTA_TUPLE_REPLY, entries.CTA_PROTOINFO)
OTHERS = (10, 11, 22, 24, 30)
"""Attributes that nobody here needs, as of labels and a SYN proxy."""


def parts_of(text: bytes) -> dict[int, bytes]:
    """The attributes of an entry's message, whole, by their types."""
    return {
        kind: attribute(kind | NESTED if kind in CONTAINERS else kind, value)
        for kind, value in walk(text, ATTRIBUTES)
    }


def random_message(chosen: random.Random) -> bytes:
    """An entry of any family and protocol as a kernel may send it: with other attributes, in other orders."""
    flow = random_flow(chosen)._replace(status=chosen.getrandbits(6), mark=chosen.getrandbits(32))
    text = new_request(flow, 1, zone=7 if chosen.random() < 0.1 else 0)
    if chosen.random() < 0.2:
        udp, icmp = (attribute(entries.CTA_PROTO_NUM, bytes([number])) for number in (UDP, ICMP))
        text = text.replace(udp, icmp)
    parts = parts_of(text)
    if chosen.random() < 0.2:  # an offloaded flow has none
        parts.pop(entries.CTA_PROTOINFO, None)
    ends = [parts.pop(kind) for kind in CONTAINERS[:2]]
    rest = [*parts.values(), u32(entries.CTA_ID, chosen.getrandbits(32))]
    for kind in OTHERS:
        if chosen.random() < 0.3:
            rest.append(attribute(kind, chosen.randbytes(chosen.choice([1, 4, 6, 8]))))
    if chosen.random() < 0.3:
        chosen.shuffle(rest)
    return message(NEW, 2, 1, nfgenmsg(FAMILY_NUMBERS[flow.family]) + b"".join([*ends, *rest]))


def packed(entry: Entry, text: bytes) -> PackedEntry:
    """What a quick reading should have found."""

    def address(end: tuple[str, int]) -> bytes:
        return ipaddress.ip_address(end[0]).packed

    def port(end: tuple[str, int]) -> bytes:
        return end[1].to_bytes(2, "big")

    ends = ((entry.source, entry.destination), (entry.reply_source, entry.reply_destination))
    values = attributes(text, ATTRIBUTES)
    state = (
        bytes([entry.tcp_state])
        if entries.CTA_PROTOINFO in values and entry.protocol is Protocol.TCP
        else b""
    )
    return (
        bytes([entries.PROTOCOL_NUMBERS[entry.protocol]]),
        *(read(end) for way in ends for read in (address, port) for end in way),
        entry.status.to_bytes(4, "big"),
        values[entries.CTA_ID],
        state,
    )


def answers(datagram: bytes) -> Sequence[tuple[int, int, int]]:
    return [(kind, start, end) for kind, _, _, _, start, end in split(datagram)]


@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("seed", range(2))
def test_both_readings_find_the_same_in_random_messages(protocol: Protocol, seed: int) -> None:
    chosen, reader = random.Random(seed), PackedReader(protocol)
    for _ in range(examples(40)):
        texts = [random_message(chosen) for _ in range(20)]
        datagram = b"".join(texts)
        found = reader.read(datagram, answers(datagram))
        thorough = [(parse(text), text) for text in texts]
        assert found == [packed(e, text) for e, text in thorough if e is not None and e.protocol is protocol]


@pytest.mark.parametrize("lacking", ["reply", "ports", "status", "a header"])
def test_an_entry_that_is_cut_or_lacks_a_part_is_malformed(lacking: str) -> None:
    parts = parts_of(new_request(made(("10.0.0.1", 1), ("10.96.0.1", 80), protocol=Protocol.TCP), 1))
    if lacking == "ports":
        addresses = nested(entries.CTA_TUPLE_IP, attribute(1, bytes(4)), attribute(2, bytes(4)))
        number = attribute(entries.CTA_PROTO_NUM, bytes([6]))
        end = nested(entries.CTA_TUPLE_ORIG, addresses, nested(entries.CTA_TUPLE_PROTO, number))
        parts[entries.CTA_TUPLE_ORIG] = end
    parts.pop({"reply": entries.CTA_TUPLE_REPLY, "status": entries.CTA_STATUS}.get(lacking, 0), None)
    body = b"".join(parts.values())
    body = body[:-1] if lacking == "a header" else body
    datagram = message(NEW, 2, 1, nfgenmsg(2) + body)
    with pytest.raises(MalformedMessageError):
        PackedReader(Protocol.TCP).read(datagram, [(NEW, 0, len(datagram))])


HOST, NODE_PORT = "192.0.2.1", 30080
B1, B2 = ("10.244.0.1", 5353), ("10.244.0.2", 5353)
FRONTENDS = {
    ("10.96.0.1", 80): Protocol.TCP,
    ("10.96.0.1", 443): Protocol.TCP,
    ("fd00:96::1", 80): Protocol.TCP,
    ("10.96.0.1", 53): Protocol.UDP,
    ("10.96.0.2", 9): Protocol.SCTP,
}
SERVICES = [
    forwarding(*to, protocol=protocol, node_port=NODE_PORT if to == ("10.96.0.1", 80) else None)
    for to, protocol in FRONTENDS.items()
]


def expected(flows: Sequence[Entry]) -> Counter[tuple[str, str, int]]:
    """The live flows of each backend, by the service."""
    counts = Counter[tuple[str, str, int]]()
    for flow in flows:
        entry = flow.from_client
        to = ("10.96.0.1", 80) if entry.destination == (HOST, NODE_PORT) else entry.destination
        closed = entry.tcp_state in (TCP_TIME_WAIT, TCP_CLOSE)
        if FRONTENDS.get(to) is entry.protocol and entry.translated and not closed:
            counts[f"{to[0]}-{to[1]}", *entry.reply_source] += 1
    return counts


def random_flow(chosen: random.Random) -> Entry:
    protocol = chosen.choice([Protocol.TCP, Protocol.TCP, Protocol.UDP, Protocol.SCTP])
    v6 = chosen.random() < 0.3
    to = chosen.choice(
        ["fd00:96::1", "2001:db8::1"] if v6 else ["10.96.0.1", "10.96.0.2", HOST, "198.51.100.1"]
    )
    destination = (to, chosen.choice([80, 443, 53, 9, NODE_PORT]))
    backend = (f"{'fd00::' if v6 else '10.244.0.'}{chosen.randrange(1, 4)}", chosen.choice([80, 8080]))
    client = (f"{'fd01::' if v6 else '10.10.0.'}{chosen.randrange(1, 9)}", chosen.randrange(1024, 9999))
    state = chosen.choice([TCP_ESTABLISHED, 1, TCP_TIME_WAIT, TCP_CLOSE]) if protocol is Protocol.TCP else 0
    answered = destination if chosen.random() < 0.2 else backend
    flow = made(client, destination, answered, protocol=protocol, tcp_state=state)
    if chosen.random() < 0.2:  # this host saw a reply first
        flow = flow._replace(
            source=flow.reply_source,
            destination=flow.reply_destination,
            reply_source=flow.source,
            reply_destination=flow.destination,
        )
        return flow._replace(status=flow.status | SOURCE_TRANSLATED)
    return flow._replace(status=flow.status | chosen.choice([0, DESTINATION_TRANSLATED, 0x30]))


@pytest.mark.parametrize("seed", range(2))
def test_live_flows_are_counted_by_backend(seed: int) -> None:
    chosen = random.Random(seed)
    flows = list(
        {
            (f.protocol, f.source, f.destination): f for f in (random_flow(chosen) for _ in range(1500))
        }.values()
    )
    table = FakeTable(flows)
    table.faults = [Fault.INTERRUPTED] if seed % 2 else []  # the reading starts again: no flow counts twice
    counts = asyncio.run(live_counts(SERVICES, [HOST], table.connect)).flows
    found = {(place.key.service, place.address, place.port): number for place, number in counts.items()}
    assert found == expected(flows)
    assert sum(found.values()) > 20
    for backends in ({("10.244.0.1", 80)}, {("10.244.0.2", 8080), ("10.244.0.3", 80)}):
        number = asyncio.run(live_flows(SERVICES, backends, [HOST], FakeTable(flows).connect))
        assert number == sum(n for (_, *backend), n in found.items() if tuple(backend) in backends)


def test_an_answer_that_is_not_understood_is_an_error_and_no_zero() -> None:
    for fault in (Fault.MALFORMED, Fault.REFUSED):
        table = FakeTable([made(("10.0.0.9", 1), ("10.96.0.1", 80), B1, protocol=Protocol.TCP, tcp_state=3)])
        for count in (
            lambda table=table: live_counts(SERVICES, [HOST], table.connect),
            lambda table=table: live_flows(SERVICES, {B1}, [HOST], table.connect),
        ):
            table.faults = [fault] * 100
            with pytest.raises(ConntrackError):
                asyncio.run(count())
