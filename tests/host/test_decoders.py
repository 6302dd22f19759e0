"""Whatever comes over netlink, each decoder returns values or raises the one error that it documents.

Real messages are cut, prolonged, mixed and changed at random. No decoder may loop for ever: its place in a
message only grows, and a test that hung would show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataplane.conntrack.kernel import made, new_request
from tests.dataplane.iptables.watch.recorded import COMMANDS, datagrams
from tests.lab.examples import examples
from tests.observe import live_trace
from tests.observe.flow_stats.test_volume import end_message
from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.entries import Traffic, parse
from vipd.dataplane.conntrack.flow_end import parse_flow_end
from vipd.dataplane.iptables.counters.messages import RULE_ADDED, RULE_DELETED, RuleMessages
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.debouncer import Debouncer
from vipd.dataplane.iptables.watch.external_change import OwnershipFilter
from vipd.dataplane.iptables.watch.messages import (
    KINDS_WITH_SETS,
    Change,
    Generation,
    read_messages,
    rule_facts,
    sender_and_end,
)
from vipd.dataplane.nftables import codec
from vipd.dataplane.nftables.layout import FLOWS, fixed_sets
from vipd.dataplane.nftables.options import DEFAULT_AFFINITY_MAP_SIZE
from vipd.host import netlink, rtnetlink
from vipd.host.netlink import CONTENT, MalformedMessageError, attribute, attributes, error_number, split, text
from vipd.host.route_table import METRIC, PROTOCOL, Listing, read_routing
from vipd.model.service import Family
from vipd.observe.live_trace.events import trace_events
from vipd.observe.live_trace.packet_trace import QUIET_SECONDS, TraceAssembler
from vipd.observe.live_trace.packets import read_headers

NAMES = Names("VIPD")
MUTATIONS = examples(1200)
"""Of each kind of message."""


def recorded() -> list[bytes]:
    """Datagrams as they came while packets were traced: after the name of the table that marked the packet,
    a line each, `trace` and its bytes in hexadecimal."""
    files = Path(live_trace.__file__).parent.glob("recorded/*.txt")
    lines = [line for path in sorted(files) for line in path.read_text().splitlines()[1:]]
    return [bytes.fromhex(line.split()[1]) for line in lines]


def packets() -> list[bytes]:
    """Headers of TCP, those of IPv4 with options."""
    four = bytes([0x4A, *bytes(8), 6, *bytes(2), 10, 0, 0, 1, 10, 96, 0, 1, *bytes(20)])
    six = bytes([0x60, *bytes(5), 6, 64, *bytes(32)])
    return [version + struct.pack(">HH", 5, 80) for version in (four, six)]


def flows() -> list[bytes]:
    four = made(("10.0.0.1", 5), ("10.96.0.1", 80), ("10.244.0.1", 8080), replied=True)
    six = made(("fd00::1", 5), ("fd00:96::1", 80), ("fd00:244::1", 8080))
    number = attribute(entries.CTA_ID, struct.pack(">I", 7))
    return [new_request(four, 1) + number, new_request(six, 1, 3) + number]


def ends() -> list[bytes]:
    four = made(("10.0.0.1", 5), ("10.96.0.1", 80), ("10.244.0.1", 8080), replied=True)
    six = made(("fd00::1", 5), ("fd00:96::1", 80), ("fd00:244::1", 8080))
    return [end_message(e, 7, Traffic(1, 2, 3, 4), timeout=t) for e in (four, six) for t in (True, False)]


def counted_rule(kind: int, expression: bytes) -> bytes:
    """A message about a rule of 5 packets as the kernel lays it out."""
    numbers = attribute(1, struct.pack(">Q", 999)) + attribute(2, struct.pack(">Q", 5))
    counter = attribute(1, attribute(1, b"counter\0") + attribute(2, numbers))
    body = attribute(1, b"nat\0") + attribute(2, b"VIPD-SEP-AAAAAAAAAAAAAAAA\0")
    body += attribute(3, struct.pack(">Q", 77)) + attribute(4, counter + expression)
    return struct.pack("=IHHIIBBH", 20 + len(body), kind, 0, 0, 0, 2, 0, 0) + body


def rules() -> list[bytes]:
    jump = attribute(1, attribute(1, b"immediate\0") + attribute(2, attribute(2, b"VIPD-MARK-MASQ\0")))
    target = attribute(1, attribute(1, b"target\0"))
    ended = counted_rule(RULE_DELETED, target)
    return [counted_rule(RULE_DELETED, jump), ended + counted_rule(RULE_ADDED, target)]


def changes() -> list[bytes]:
    """What the kernel notifies of rules."""
    return [datagram for name in COMMANDS for datagram in datagrams(name)]


def watched(datagram: bytes) -> None:
    """All that a watch of rules does with a datagram."""
    sender_and_end(datagram)
    gathering = Debouncer(OwnershipFilter(NAMES, frozenset(Family)))
    for message in read_messages(datagram, KINDS_WITH_SETS):
        if isinstance(message, Generation):
            gathering.end(message, lambda pid, port: False, 0.0)
        else:
            assert isinstance(message, Change)
            rule_facts(message)
            gathering.change(message)


def traced(datagram: bytes) -> None:
    """All that a trace does with a datagram."""
    put_together = TraceAssembler("vipd-trace-1")
    for event in trace_events(datagram):
        put_together.take(event, 0.0)
    put_together.finished(QUIET_SECONDS)


def dumped(datagram: bytes) -> None:
    """All that readers of tables do with an answer, whatever it holds."""
    for kind, _, _, _, start, end in split(datagram):
        message = codec.answer(datagram, kind, start, end)
        found = attributes(message.attributes)
        codec.comment(found.get(6))
        codec.comment(found.get(13), 7)
        text(found.get(1))
        codec.number(found.get(5))
        for holder in (
            *fixed_sets(Family.IPV4, DEFAULT_AFFINITY_MAP_SIZE),
            *fixed_sets(Family.IPV6, DEFAULT_AFFINITY_MAP_SIZE),
        ):
            for family in Family:
                list(codec.elements(message.attributes, holder, family))
        for element in codec.element_attributes(message.attributes):
            codec.counted(element)
            codec.key_fields(codec.data_of(element, 1), FLOWS.key, Family.IPV4)


def acknowledged(datagram: bytes) -> None:
    for _, _, _, _, start, end in split(datagram):
        error_number(datagram, start, end)


def routes() -> list[bytes]:
    body = ROUTE.body + b"".join(attribute(kind, value) for kind, value in ROUTE.attributes.items())
    return [netlink.message(rtnetlink.NEW_ROUTE, 0, 1, body) * 2]


def routed(datagram: bytes) -> None:
    """All that is read of a listing of routes, whatever it holds."""
    for _, _, _, _, start, end in split(datagram):
        for kind in rtnetlink.BODIES:
            rtnetlink.message_of(kind, datagram[start + CONTENT : end])


def listed(datagram: bytes) -> None:
    """All that is read of a listing of rules."""
    for _, _, _, _, start, end in split(datagram):
        RuleMessages(NAMES).counted(datagram, start, end)


class Decoder(NamedTuple):
    """What reads messages, examples of them, and the error that it may raise."""

    read: Callable[[bytes], object]
    examples: Callable[[], list[bytes]]
    error: type[Exception] | tuple[type[Exception], ...] = ()


DECODERS: dict[str, Decoder] = {
    "changes of rules": Decoder(watched, changes, MalformedMessageError),
    "traces": Decoder(traced, recorded, MalformedMessageError),
    "acknowledgements": Decoder(acknowledged, recorded, MalformedMessageError),
    "listings of routes": Decoder(routed, routes, MalformedMessageError),
    "headers": Decoder(lambda data: read_headers(data[:40], data[40:]), packets),
    "flows": Decoder(parse, flows, MalformedMessageError),
    "ends of flows": Decoder(parse_flow_end, ends, MalformedMessageError),
    "ended counters": Decoder(
        lambda data: list(RuleMessages(NAMES).ended(data)), rules, MalformedMessageError
    ),
    "listed counters": Decoder(listed, rules, MalformedMessageError),
    "tables": Decoder(dumped, changes, MalformedMessageError),
}


@contextlib.contextmanager
def bearing(error: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """The documented error may come, but no child of it that says something else, and none without words."""
    try:
        yield
    except error as raised:
        if isinstance(raised, UnicodeError | struct.error) or not str(raised):
            raise AssertionError(repr(raised)) from raised


def decode(decoder: Decoder, data: bytes) -> None:
    with bearing(decoder.error):
        decoder.read(data)


def with_length(data: bytearray, place: int, draw: random.Random) -> None:
    """Another length of an attribute, or another type."""
    if len(data) >= place + 2:
        struct.pack_into("=H", data, place, draw.choice((0, 1, 3, 4, 5, 19, 20, 0x7FFF, 0xFFFF)))


def with_number(data: bytearray, place: int, draw: random.Random) -> None:
    """Another length of a message, or another value."""
    if len(data) >= (place & ~3) + 4:
        struct.pack_into("=I", data, place & ~3, draw.choice((0, 15, 16, 17, 20, 1 << 31)))


def with_other_bytes(data: bytearray, place: int, draw: random.Random) -> None:
    """Something else for some bytes, also longer or shorter."""
    data[place : place + draw.randint(0, 12)] = draw.randbytes(draw.randint(0, 12))


def cut_off(data: bytearray, place: int, draw: random.Random) -> None:
    del data[place:]


def prolonged(data: bytearray, place: int, draw: random.Random) -> None:
    data += draw.randbytes(draw.randint(1, 24))


DAMAGES = (with_length, with_number, with_other_bytes, cut_off, prolonged)


def mutations(examples: Sequence[bytes]) -> Iterator[bytes]:
    """Every way in which messages go wrong: cut, prolonged, with other lengths, types and bytes, mixed."""
    draw = random.Random(1)
    for _ in range(MUTATIONS):
        data = bytearray(draw.choice(examples))
        for _ in range(draw.randint(1, 4)):
            draw.choice(DAMAGES)(data, draw.randrange(len(data) + 1), draw)
        yield bytes(data) + (draw.choice(examples) if draw.random() < 0.2 else b"")


@pytest.mark.parametrize("name", DECODERS)
def test_every_cut_of_real_messages(name: str) -> None:
    decoder = DECODERS[name]
    for example in dict.fromkeys(decoder.examples()[:6]):
        for end in range(len(example) + 1):
            decode(decoder, example[:end])


@pytest.mark.parametrize("name", DECODERS)
def test_changed_messages(name: str) -> None:
    decoder = DECODERS[name]
    for data in mutations(decoder.examples()):
        decode(decoder, data)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=examples(60))
@given(data=st.binary(max_size=200))
def test_anything_else(name: str, data: bytes) -> None:
    decode(DECODERS[name], data)


@pytest.mark.parametrize("name", ["changes of rules", "traces", "tables", "ended counters"])
def test_what_is_cut_short_is_not_passed_over(name: str) -> None:
    """Some bytes that are left at the end are the beginning of a message that somebody would miss."""
    decoder = DECODERS[name]
    with pytest.raises(decoder.error):
        decoder.read(decoder.examples()[0] + bytes(9))


def link(name: str, index: int, kind: str) -> rtnetlink.Message:
    found = {3: name.encode() + b"\0"}
    found |= {18: netlink.attribute(1, kind.encode() + b"\0")}
    return rtnetlink.Message(struct.pack("=BxHiII", 0, 1, index, 1, 0), found)


def rule() -> rtnetlink.Message:
    return rtnetlink.Message(
        struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 252, 0, 0, 1, 0), {15: struct.pack("=I", 254)}
    )


LINK, RULE = link("vipd0", 3, "bridge"), rule()
ROUTE = rtnetlink.Message(
    struct.pack("=BBBBBBBBI", 2, 8, 0, 0, 254, 3, 0, 1, 0),
    {1: bytes([10, 0, 0, 0]), 4: struct.pack("=I", 3), 6: struct.pack("=I", 3), 15: struct.pack("=I", 254)},
)


def kernel(*further: rtnetlink.Message, kind: int) -> Listing:
    """Lists a device, a rule and a route, and `further` items of one kind."""
    known = {rtnetlink.NEW_LINK: [LINK], rtnetlink.NEW_RULE: [RULE], rtnetlink.NEW_ROUTE: [ROUTE]}
    known[kind] += further
    return lambda kind, *_: known[kind]


ATTRIBUTES = st.dictionaries(
    st.sampled_from((1, 3, 4, 6, 7, 10, 14, 15, 18, 99)),
    st.binary(max_size=17) | st.just(netlink.attribute(1, b"\xff" * 4)),
)


@given(
    kind=st.sampled_from((rtnetlink.NEW_LINK, rtnetlink.NEW_RULE, rtnetlink.NEW_ROUTE)),
    body=st.binary(max_size=16)
    | st.builds(lambda head: head + ROUTE.body[2:], st.binary(min_size=2, max_size=2))
    | st.just(LINK.body),
    attributes=ATTRIBUTES,
)
def test_links_rules_and_routes_that_are_garbled(
    kind: int, body: bytes, attributes: dict[int, bytes]
) -> None:
    own = struct.pack("=BBBBBBBBI", 2, 32, 0, 0, 254, PROTOCOL, 0, 1, 0)
    metric = {6: struct.pack("=I", METRIC)}
    garbled = [rtnetlink.Message(body, attributes), rtnetlink.Message(own, attributes | metric)]
    for message in garbled:
        with bearing(OSError):
            asyncio.run(read_routing("vipd0", kernel(message, kind=kind)))


def test_real_routes_are_read() -> None:
    read = asyncio.run(read_routing("vipd0", kernel(kind=rtnetlink.NEW_ROUTE)))
    assert read.table.covers("10.1.1.1")
    assert read.device is not None
