"""Reading entries: what was written is read, by either way of reading, and damage is an error of one kind."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.conntrack.kernel import made, new_request
from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.entries import Entry, parse
from vipd.dataplane.conntrack.messages import delete_request
from vipd.host.netlink import MalformedMessageError, attribute, nested
from vipd.model.service import Family, Protocol

PORTS = st.integers(0, 65535)


@st.composite
def any_entry(draw: st.DrawFn) -> Entry:
    addresses = st.ip_addresses(v=4) if draw(st.booleans()) else st.ip_addresses(v=6)
    ends = st.tuples(addresses.map(str), PORTS)
    protocol = draw(st.sampled_from(Protocol))
    return made(
        draw(ends),
        draw(ends),
        draw(ends),
        reply_destination=draw(ends),
        protocol=protocol,
        replied=draw(st.booleans()),
        tcp_state=draw(st.integers(0, 10)) if protocol is Protocol.TCP else 0,
    )._replace(mark=draw(st.integers(0, 0xFFFFFFFF)), timeout=draw(st.integers(0, 0xFFFFFFFF)))


@given(entry=any_entry(), number=st.integers(1, 0xFFFFFFFF), zone=st.integers(0, 65535))
def test_what_was_written_is_read(entry: Entry, number: int, zone: int) -> None:
    identifier = attribute(entries.CTA_ID, struct.pack(">I", number))
    read = parse(new_request(entry, 1, zone) + identifier)
    assert read is not None
    assert read._replace(identity=b"") == entry
    assert read.identity.endswith(identifier)
    assert (attribute(entries.CTA_ZONE, struct.pack(">H", zone)) in read.identity) or not zone


@given(entry=any_entry())
def test_an_unusual_order_of_attributes_reads_the_same(entry: Entry) -> None:
    """The slow way: ports before addresses, as no kernel writes them."""
    usual = new_request(entry, 1)
    size = len(usual[20 : 20 + (52 if entry.family is Family.IPV4 else 76)])
    ends, rest = usual[24 : 20 + size], usual[20 + size :]
    (address_size,) = struct.unpack_from("=H", ends)
    swapped = nested(entries.CTA_TUPLE_ORIG, ends[address_size:] + ends[:address_size])
    read, wanted = parse(usual[:20] + swapped + rest), parse(usual)
    assert read is not None
    assert wanted is not None
    assert read._replace(identity=b"") == wanted._replace(identity=b"")


@given(entry=any_entry(), cut=st.integers(20, 400))
def test_a_cut_message_is_malformed_or_lacks_only_its_end(entry: Entry, cut: int) -> None:
    whole = new_request(entry, 1)
    try:
        read = parse(whole[:cut])
    except MalformedMessageError:
        return
    assert read is not None
    assert read[:6] == entry[:6]


@given(junk=st.binary(max_size=300), family=st.sampled_from([2, 10]))
def test_junk_is_malformed_at_worst(junk: bytes, family: int) -> None:
    with contextlib.suppress(MalformedMessageError):
        parse(bytes(16) + bytes([family, 0, 0, 0]) + junk)


def test_other_protocols_and_families_are_no_entries() -> None:
    usual = new_request(made(("10.0.0.1", 1), ("10.0.0.2", 2)), 1)
    at = usual.index(attribute(entries.CTA_PROTO_NUM, b"\x11"))
    assert parse(usual[: at + 4] + b"\x01" + usual[at + 5 :]) is None
    assert parse(usual[:16] + b"\x07" + usual[17:]) is None
    assert parse(usual) is not None


@pytest.mark.parametrize("identity", [b"", attribute(entries.CTA_ID, b"1234"), nested(1, b"")])
def test_a_deletion_without_a_name_is_never_sent(identity: bytes) -> None:
    """The kernel would take it for: delete everything."""
    entry = made(("10.0.0.1", 1), ("10.0.0.2", 2))._replace(identity=identity)
    with pytest.raises(ValueError, match="must name"):
        delete_request(entry, 1)


def test_an_offloaded_tcp_flow_is_established_though_the_kernel_reports_no_state() -> None:
    """As Linux lists one in a flowtable: with IPS_OFFLOAD, and neither timeout nor protocol information."""
    entry = made(("10.0.0.1", 1), ("10.0.0.2", 2), protocol=Protocol.TCP, tcp_state=1)
    message = new_request(entry._replace(status=entry.status | entries.OFFLOADED), 1)
    protoinfo = nested(
        entries.CTA_PROTOINFO,
        nested(entries.CTA_PROTOINFO_TCP, attribute(entries.CTA_PROTOINFO_TCP_STATE, b"\x01")),
    )
    read = parse(message.replace(protoinfo, b""))
    assert read is not None
    assert entries.flow_state(read) == "ESTABLISHED"
    unmarked = parse(new_request(entry, 1).replace(protoinfo, b""))
    assert unmarked is not None
    assert entries.flow_state(unmarked) == "NONE"
