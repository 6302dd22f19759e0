"""UDP and DNS probes against real servers."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.health.servers import ask_once, closed_port, good_and_reason, run, target, udp_server
from vipd.health.probes.dns import probe_dns
from vipd.health.probes.dns_message import TYPES, MalformedError, encode_query, read_reply, same_record
from vipd.health.probes.udp import probe_udp
from vipd.health.result import ProbeResult
from vipd.model.check import DnsProbe, UdpProbe

PING = UdpProbe(send=b"ping", expect=b"pong")


def udp(check: UdpProbe, *replies: bytes, timeout: float = 60.0) -> ProbeResult:
    async def ask() -> ProbeResult:
        async with udp_server(lambda data: list(replies) if data == check.send else []) as port:
            return await ask_once(probe_udp, target(port, check, timeout))

    return run(ask())


def test_the_wanted_answer_is_good() -> None:
    assert udp(PING, b"pong and more").good
    assert udp(UdpProbe(send=b"ping", expect=b""), b"anything").good


def test_another_answer_is_bad() -> None:
    assert good_and_reason(udp(PING, b"gnop\x00\x1b")) == (False, "the answer begins with b'gnop\\x00\\x1b'")


def test_silence_is_bad_where_an_answer_is_wanted() -> None:
    assert good_and_reason(udp(PING, timeout=0.2)) == (
        False,
        "timeout after 0.2 s while waiting for the answer",
    )


def test_silence_is_good_where_none_is() -> None:
    assert good_and_reason(udp(UdpProbe(send=b"ping"), timeout=0.5)) == (True, "not refused within 0.5 s")
    assert udp(UdpProbe(send=b"ping"), b"surprise").good


@pytest.mark.parametrize("check", [PING, UdpProbe(send=b"x"), DnsProbe()])
def test_a_refusal_is_bad(check: UdpProbe | DnsProbe) -> None:
    with closed_port(socket.SOCK_DGRAM) as port:
        ask = probe_dns if isinstance(check, DnsProbe) else probe_udp
        assert good_and_reason(run(ask_once(ask, target(port, check)))) == (False, "connection refused")


NAME = "www.example.com"
A = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + bytes([192, 0, 2, 7])
TRUNCATED = 0x0200


def reply(query: bytes, *records: bytes, flags: int = 0x8180, number: int | None = None) -> bytes:
    """A message that answers the query."""
    own = struct.unpack_from("!H", query)[0]
    header = struct.pack("!6H", own if number is None else number, flags, 1, len(records), 0, 0)
    return header + query[12:] + b"".join(records)


def dns(check: DnsProbe, *, timeout: float = 60.0, **how: bytes | int) -> ProbeResult:
    """What is found where a server gives an A record, in some way."""
    flags = how.get("flags", 0x8180)
    records = () if how.get("empty") else (A,)
    shift = how.get("shift", 0)
    raw = how.get("raw")

    def server(query: bytes) -> list[bytes]:
        if isinstance(raw, bytes):
            return [query[:2] + raw]
        own = struct.unpack_from("!H", query)[0]
        assert isinstance(shift, int)
        assert isinstance(flags, int)
        return [reply(query, *records, flags=flags, number=(own + shift) % 65536)]

    async def ask() -> ProbeResult:
        async with udp_server(server) as port:
            return await ask_once(probe_dns, target(port, check, timeout))

    return run(ask())


def test_a_wanted_code_is_good() -> None:
    assert dns(DnsProbe(query=NAME)).good
    assert dns(DnsProbe(query=NAME), empty=1).good
    assert dns(DnsProbe(query=NAME, rcode="NXDOMAIN"), flags=0x8183, empty=1).good


@pytest.mark.parametrize(
    ("rcode", "name"), [(2, "SERVFAIL"), (3, "NXDOMAIN"), (5, "REFUSED"), (9, "rcode 9")]
)
def test_another_code_is_bad(rcode: int, name: str) -> None:
    assert good_and_reason(dns(DnsProbe(query=NAME), flags=0x8180 | rcode, empty=1)) == (False, name)


def test_a_refusal_without_the_question_is_understood() -> None:
    raw = struct.pack("!5H", 0x8185, 0, 0, 0, 0)
    assert good_and_reason(dns(DnsProbe(query=NAME), raw=raw)) == (False, "REFUSED")


def test_the_wanted_record_must_be_there() -> None:
    assert dns(DnsProbe(query=NAME, answer="192.0.2.7")).good
    assert good_and_reason(dns(DnsProbe(query=NAME, answer="192.0.2.8"))) == (
        False,
        "the answer is 192.0.2.7",
    )
    assert good_and_reason(dns(DnsProbe(query=NAME, answer="192.0.2.8"), empty=1)) == (
        False,
        "the answer is no record",
    )


def test_a_truncated_answer_counts_as_far_as_it_goes() -> None:
    flags = 0x8180 | TRUNCATED
    assert dns(DnsProbe(query=NAME), flags=flags, empty=1).good
    missing = dns(DnsProbe(query=NAME, answer="192.0.2.7"), flags=flags, empty=1)
    assert good_and_reason(missing) == (False, "the wanted record is not in the answer, which is truncated")


def test_answers_to_other_queries_do_not_count() -> None:
    result = dns(DnsProbe(query=NAME), shift=1, timeout=1.0)
    assert good_and_reason(result) == (False, "timeout after 1 s with answers to other queries only")
    assert not dns(DnsProbe(query=NAME), flags=0x0100, timeout=0.3).good  # a query, not a reply


def test_what_is_no_message_is_bad() -> None:
    assert dns(DnsProbe(query=NAME), raw=b"\x81").reason.startswith("no DNS: a message of 3 bytes")


def test_the_root_can_be_asked_for() -> None:
    assert encode_query(0x1234, ".", "NS") == b"\x12\x34\x01\x00\0\1\0\0\0\0\0\0" + b"\0" + b"\0\2\0\1"
    assert encode_query(0, "a.bc.", "A")[12:] == b"\1a\2bc\0\0\1\0\1"


@pytest.mark.parametrize("name", ["a..b", f"{'a' * 64}.b", ".".join(["a" * 60] * 5)])
def test_what_is_no_name_cannot_be_asked_for(name: str) -> None:
    with pytest.raises(ValueError, match="no domain name"):
        encode_query(1, name, "A")
    assert dns(DnsProbe(query=name)).good is None


def record(kind: str, data: bytes, owner: bytes = b"\xc0\x0c") -> bytes:
    return owner + struct.pack("!HHIH", TYPES[kind], 1, 60, len(data)) + data


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("A", bytes([10, 0, 0, 1]), "10.0.0.1"),
        ("AAAA", bytes(15) + b"\1", "::1"),
        ("NS", b"\2ns\xc0\x10", "ns.example.com"),
        ("PTR", b"\1a\0", "a"),
        ("TXT", b"\5hello\6 world", "hello world"),
        ("MX", b"\0\x0a\4mail\xc0\x10", "10 mail.example.com"),
        ("SRV", b"\0\1\0\2\x13\xc4\3sip\xc0\x10", "1 2 5060 sip.example.com"),
        (
            "SOA",
            b"\2ns\xc0\x10\4root\xc0\x10" + struct.pack("!5I", 1, 2, 3, 4, 5),
            "ns.example.com root.example.com 1 2 3 4 5",
        ),
    ],
)
def test_records_read_as_in_a_zone_file(kind: str, data: bytes, text: str) -> None:
    query = encode_query(7, NAME, kind)
    alias = record("CNAME", b"\5other\xc0\x10")
    other = record("TXT" if kind != "TXT" else "A", b"\3abc" if kind != "TXT" else bytes(4))
    found = read_reply(reply(query, alias, record(kind, data), other), query)
    assert found is not None
    assert found.records == ("other.example.com", text)


def test_case_and_dots_and_spelling_do_not_matter() -> None:
    assert same_record("ns.example.com", "NS.Example.Com.")
    assert same_record("fd00::1", "FD00:0:0::1")
    assert not same_record("192.0.2.1", "192.0.2.11")


@given(st.binary(max_size=120), st.integers(0, 3))
def test_no_reply_however_odd_does_more_than_be_refused(tail: bytes, answers: int) -> None:
    query = encode_query(7, NAME, "MX")
    data = struct.pack("!6H", 7, 0x8180, 1, answers, 0, 0) + query[12:] + tail
    try:
        read_reply(data, query)
        read_reply(tail, query)
    except MalformedError:
        return


def test_a_name_that_points_at_itself_ends() -> None:
    query = encode_query(7, NAME, "NS")
    loop = struct.pack("!H", 0xC000 + len(query))
    with pytest.raises(MalformedError, match="without an end"):
        read_reply(reply(query, loop + b"\0" * 10), query)
