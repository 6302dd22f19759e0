"""The quick reading of entries finds in every message what the thorough one finds, and counts the same."""

from __future__ import annotations

import ipaddress
import random
import struct
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.kernel import made
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
from vipd.dataplane.conntrack.live_counts import _read
from vipd.dataplane.conntrack.messages import NEW
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.conntrack.packed_entries import MAX_LENGTHS, MAX_PATTERNS, PackedEntry, PackedReader
from vipd.dataplane.conntrack.stale import Destination
from vipd.dataplane.counting import BackendKey
from vipd.host.netlink import (
    ATTRIBUTES,
    FAMILY_NUMBERS,
    MalformedMessageError,
    attribute,
    attributes,
    message,
    nested,
    nfgenmsg,
    split,
    u32,
)
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family, Protocol, family_of

ICMP = 1
SECMARK, USE, LABELS, SYNPROXY = 11, 11, 22, 24
"""Attributes that nobody here needs."""


class Messages:
    """Messages of entries as a kernel may send them: with other attributes, in other orders."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._addresses = {family: [self._address(family) for _ in range(6)] for family in Family}

    def entry(self) -> bytes:
        """One message; of any family and protocol."""
        chosen = self._random
        family, number = chosen.choice(list(Family)), chosen.choice([6, 6, 17, 132, ICMP])
        zone = chosen.random() < 0.1
        ends = [self._ends(kind, family, number, zone) for kind in (1, 2)]
        rest = [
            u32(entries.CTA_STATUS, chosen.getrandbits(6)),
            u32(entries.CTA_ID, chosen.getrandbits(32)),
            u32(entries.CTA_TIMEOUT, chosen.getrandbits(20)),
            u32(entries.CTA_MARK, chosen.getrandbits(32)),
        ]
        if number == 6 and chosen.random() < 0.8:  # an offloaded flow has none
            more = [attribute(kind, bytes(2)) for kind in (2, 3, 4)]
            state = attribute(entries.CTA_PROTOINFO_TCP_STATE, bytes([chosen.randrange(10)]))
            rest.append(nested(entries.CTA_PROTOINFO, nested(entries.CTA_PROTOINFO_TCP, state, *more)))
        if number == 132:
            rest.append(nested(entries.CTA_PROTOINFO, nested(3, attribute(1, bytes([4])))))
        for kind in (LABELS, SYNPROXY, 30):
            if chosen.random() < 0.3:
                rest.append(attribute(kind, chosen.randbytes(chosen.choice([1, 4, 6, 8]))))
        if chosen.random() < 0.3:
            chosen.shuffle(rest)
        return message(NEW, 2, 1, nfgenmsg(FAMILY_NUMBERS[family]) + b"".join([*ends, *rest]))

    def _ends(self, kind: int, family: Family, number: int, zone: bool) -> bytes:
        chosen = self._random
        first = 1 if family is Family.IPV4 else 3
        source, destination = (chosen.choice(self._addresses[family]) for _ in range(2))
        addresses = [attribute(first, source), attribute(first + 1, destination)]
        parts = [attribute(entries.CTA_PROTO_NUM, bytes([number]))]
        kinds = (4, 5) if number == ICMP else (entries.CTA_PROTO_SRC_PORT, entries.CTA_PROTO_DST_PORT)
        parts += [attribute(each, struct.pack(">H", chosen.choice([80, 443, 40000]))) for each in kinds]
        more = [attribute(3, bytes([0, 7]))] if zone else []
        return nested(
            kind,
            nested(entries.CTA_TUPLE_IP, *addresses),
            nested(entries.CTA_TUPLE_PROTO, *parts),
            *more,
        )

    def _address(self, family: Family) -> bytes:
        return self._random.randbytes(family.bits // 8)


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
@pytest.mark.parametrize("seed", range(4))
def test_both_readings_find_the_same_in_random_messages(protocol: Protocol, seed: int) -> None:
    messages, reader = Messages(seed), PackedReader(protocol)
    for _ in range(examples(60)):
        texts = [messages.entry() for _ in range(20)]
        datagram = b"".join(texts)
        found = reader.read(datagram, answers(datagram))
        thorough = [(parse(text), text) for text in texts]
        assert found == [packed(e, text) for e, text in thorough if e is not None and e.protocol is protocol]
    assert len(reader._patterns) <= MAX_LENGTHS
    assert all(len(found) <= MAX_PATTERNS for found in reader._patterns.values())


def test_a_pattern_is_made_once_for_entries_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt = list[bytes]()
    learn = PackedReader._learn

    def noting(reader: PackedReader, text: bytes) -> object:
        learnt.append(text)
        return learn(reader, text)

    monkeypatch.setattr(PackedReader, "_learn", noting)
    table = FakeTable(
        made((f"10.0.0.{n}", 40000), ("10.96.0.1", 80), protocol=Protocol.TCP, tcp_state=3) for n in range(50)
    )
    counts = _read({KEYS[0].destination: KEYS[0].forwarding}, frozenset(), table.connect)
    assert (len(learnt), counts.flows) == (1, {})


@pytest.mark.parametrize("lacking", ["reply", "ports", "status", "a header"])
def test_an_entry_that_is_cut_or_lacks_a_part_is_malformed(lacking: str) -> None:
    ends = [Messages(1)._ends(kind, Family.IPV4, 6, zone=False) for kind in (1, 2)]
    if lacking == "ports":
        addresses = nested(entries.CTA_TUPLE_IP, attribute(1, bytes(4)), attribute(2, bytes(4)))
        number = attribute(entries.CTA_PROTO_NUM, bytes([6]))
        ends[0] = nested(1, addresses, nested(entries.CTA_TUPLE_PROTO, number))
    status = b"" if lacking == "status" else u32(entries.CTA_STATUS, 0)
    body = b"".join([*(ends[:1] if lacking == "reply" else ends), status])
    body = body[:-1] if lacking == "a header" else body
    datagram = message(NEW, 2, 1, nfgenmsg(2) + body)
    with pytest.raises(MalformedMessageError):
        PackedReader(Protocol.TCP).read(datagram, [(NEW, 0, len(datagram))])


class Key:
    """A frontend and its forwarding."""

    def __init__(self, address: str, port: int, protocol: Protocol = Protocol.TCP) -> None:
        family = family_of(address) if address else Family.IPV4
        self.destination = Destination(family, protocol, address, port)
        self.forwarding = ForwardingKey(f"{address or 'node'}:{port}", "", protocol, family)


KEYS = [
    Key("10.96.0.1", 80),
    Key("10.96.0.1", 443),
    Key("fd00:96::1", 80),
    Key("10.96.0.1", 53, Protocol.UDP),
    Key("", 30080),
]
OWN = frozenset({"192.0.2.1", "2001:db8::1"})


def thorough_count(found: Sequence[Entry]) -> Counter[BackendKey]:
    """The live flows of each backend, from whole entries."""
    keys = {key.destination: key.forwarding for key in KEYS}
    counts = Counter[BackendKey]()
    for each in found:
        entry = each.from_client
        address, port = entry.destination
        key = keys.get(Destination(entry.family, entry.protocol, address, port))
        if key is None and address in OWN:
            key = keys.get(Destination(entry.family, entry.protocol, "", port))
        closed = each.tcp_state in (TCP_TIME_WAIT, TCP_CLOSE)
        if key is not None and entry.translated and not closed:
            counts[BackendKey(key, *entry.reply_source)] += 1
    return counts


def random_flow(chosen: random.Random) -> Entry:
    protocol = chosen.choice([Protocol.TCP, Protocol.TCP, Protocol.UDP])
    v6 = chosen.random() < 0.3
    to = chosen.choice(["fd00:96::1", "2001:db8::1"] if v6 else ["10.96.0.1", "192.0.2.1", "198.51.100.1"])
    destination = (to, chosen.choice([80, 443, 53, 30080]))
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


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_a_thorough_reading(seed: int) -> None:
    chosen = random.Random(seed)
    flows = list(
        {(f.protocol, f.source, f.destination): f for f in (random_flow(chosen) for _ in range(400))}.values()
    )
    keys = {key.destination: key.forwarding for key in KEYS}
    table = FakeTable(flows)
    table.faults = [Fault.INTERRUPTED] if seed % 2 else []  # the reading starts again: no flow counts twice
    counts = _read(keys, OWN, table.connect)
    assert counts.flows == thorough_count(flows)
    assert sum(counts.flows.values()) > 20


def test_a_malformed_answer_is_an_error_and_no_zero() -> None:
    table = FakeTable([made(("10.0.0.9", 40000), ("10.96.0.1", 80), protocol=Protocol.TCP, tcp_state=3)])
    table.faults = [Fault.MALFORMED] * 100
    with pytest.raises(ConntrackError):
        _read({KEYS[0].destination: KEYS[0].forwarding}, OWN, table.connect)
