"""UDP and DNS checks of real servers."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

from tests.health.servers import as_wanted, beside, checked, closed_port, healthy_and_reason, seen, udp_server
from tests.lab.inside import probed

Reply = Callable[[bytes], list[bytes]]
NAME = "www.example.com"
QR, TRUNCATED = 0x8180, 0x0200
TYPES = {"A": 1, "NS": 2, "CNAME": 5, "SOA": 6, "PTR": 12, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33}


Cases = dict[str, tuple[Reply, dict[str, Any], str]]


def differing(cases: Cases, type_: str) -> dict[str, str]:
    """What is seen of the cases in which it is another than it should be."""
    with contextlib.ExitStack() as stack:
        checks = [
            checked(type_, stack.enter_context(beside(udp_server(reply))), **keys)
            for reply, keys, _ in cases.values()
        ]
        verdicts = probed(*checks, worker=True)
    shown = {name: seen(verdict) for name, verdict in zip(cases, verdicts, strict=True)}
    return {name: text for name, text in shown.items() if not as_wanted(text, cases[name][2])}


def test_a_udp_server_is_good_or_bad() -> None:
    def says(*datagrams: bytes) -> Reply:
        return lambda query: list(datagrams) if query == b"ping" else []

    ping: dict[str, Any] = {"send": "ping", "expect": "pong"}
    short: dict[str, Any] = {"send": "ping", "timeout": "500ms"}
    cases: Cases = {
        "what is expected": (says(b"pong and more"), ping, "good"),
        "anything": (says(b"anything"), {"send": "hex:70696e67", "expect": ""}, "good"),
        "other bytes": (says(b"gnop\0\x1b"), ping, r"bad: the answer begins with b'gnop\x00\x1b'"),
        "silence": (says(), {**ping, **short}, "bad: timeout after 0.5 s while waiting for the answer"),
        "silence where it is good": (says(), short, "good"),
        "an answer to what expects none": (says(b"surprise"), {"send": "ping"}, "good"),
    }
    assert differing(cases, "udp") == {}


def test_a_refusal_is_bad_and_silence_may_be_good() -> None:
    with closed_port(socket.SOCK_DGRAM) as port:
        checks: list[tuple[str, dict[str, Any]]] = [
            ("udp", {"send": "x", "expect": "y"}),
            ("udp", {"send": "x"}),
        ]
        for type_, keys in (*checks, ("dns", {})):
            assert healthy_and_reason(type_, port, **keys) == (False, "connection refused")
    with beside(udp_server(lambda _: [])) as port:
        assert healthy_and_reason("udp", port, send="x", timeout="300ms") == (
            True,
            "not refused within 0.3 s",
        )


def record(kind: str, data: bytes, owner: bytes = b"\xc0\x0c") -> bytes:
    return owner + struct.pack("!HHIH", TYPES[kind], 1, 60, len(data)) + data


A = record("A", bytes([192, 0, 2, 7]))


def answer(*records: bytes, flags: int = 0, shift: int = 0) -> Reply:
    """Replies with these records, and these flags or code; `shift`: to a query of another number."""

    def reply(query: bytes) -> list[bytes]:
        number = (struct.unpack_from("!H", query)[0] + shift) % 65536
        header = struct.pack("!6H", number, QR ^ flags, 1, len(records), 0, 0)
        return [header + query[12:] + b"".join(records)]

    return reply


def raw(data: bytes) -> Reply:
    return lambda query: [query[:2] + data]


def test_a_name_server_is_good_or_bad() -> None:
    seven: dict[str, Any] = {"query": NAME, "answer": "192.0.2.7"}
    eight: dict[str, Any] = {"query": NAME, "answer": "192.0.2.8"}
    name: dict[str, Any] = {"query": NAME}
    short: dict[str, Any] = {"query": NAME, "timeout": "500ms"}
    others = "bad: timeout after 0.5 s with answers to other queries only"
    # "www.example.com" is 17 bytes behind the header of 12: a name at 29 points at itself.
    itself = struct.pack("!H", 0xC000 + 12 + 17 + 4)
    cases: Cases = {
        "a record": (answer(A), name, "good"),
        "none": (answer(), name, "good"),
        "the root": (answer(), {"record": "NS"}, "good"),
        "the code that is wanted": (answer(flags=3), {**name, "rcode": "NXDOMAIN"}, "good"),
        "SERVFAIL": (answer(flags=2), name, "bad: SERVFAIL"),
        "NXDOMAIN": (answer(flags=3), name, "bad: NXDOMAIN"),
        "REFUSED": (answer(flags=5), name, "bad: REFUSED"),
        "a code without a name": (answer(flags=9), name, "bad: rcode 9"),
        "a refusal without the question": (raw(struct.pack("!5H", 0x8185, 0, 0, 0, 0)), name, "bad: REFUSED"),
        "the record that is wanted": (answer(A), seven, "good"),
        "another record": (answer(A), eight, "bad: the answer is 192.0.2.7"),
        "no record": (answer(), eight, "bad: the answer is no record"),
        "truncated": (answer(flags=TRUNCATED), name, "good"),
        "truncated before the record": (
            answer(flags=TRUNCATED),
            seven,
            "bad: the wanted record is not in the answer, which is truncated",
        ),
        "to another query": (answer(A, shift=1), short, others),
        "a query": (answer(A, flags=0x8000), short, others),
        "three bytes": (raw(b"\x81"), name, "bad: no DNS: a message of 3 bytes…"),
        "a name that points at itself": (answer(itself + bytes(10)), seven, "bad: no DNS: …"),
    }
    assert differing(cases, "dns") == {}
    many = answer(*(record("A", bytes([192, 0, 2, n])) for n in (1, 2, 3)))
    with beside(udp_server(many)) as port:
        assert healthy_and_reason("dns", port, **eight) == (False, "the answer is 192.0.2.1, 192.0.2.2, …")


def test_a_query_names_what_is_declared() -> None:
    queries: list[bytes] = []

    def note(query: bytes) -> list[bytes]:
        queries.append(query[2:])
        return answer()(query)

    with beside(udp_server(note)) as port:
        for keys in ({"record": "NS"}, {"query": "a.bc."}):
            assert healthy_and_reason("dns", port, **keys)[0]
    one_question = b"\1\0\0\1\0\0\0\0\0\0"
    assert queries == [one_question + b"\0\0\2\0\1", one_question + b"\1a\2bc\0\0\1\0\1"]


def test_records_read_as_in_a_zone_file() -> None:
    soa = b"\2ns\xc0\x10\4root\xc0\x10" + struct.pack("!5I", 1, 2, 3, 4, 5)
    records = {
        "A": (bytes([10, 0, 0, 1]), "10.0.0.1"),
        "AAAA": (bytes(15) + b"\1", "::1"),
        "NS": (b"\2ns\xc0\x10", "ns.example.com"),
        "PTR": (b"\1a\0", "a"),
        "TXT": (b"\5hello\6 world", "hello world"),
        "MX": (b"\0\x0a\4mail\xc0\x10", "10 mail.example.com"),
        "SRV": (b"\0\1\0\2\x13\xc4\3sip\xc0\x10", "1 2 5060 sip.example.com"),
        "SOA": (soa, "ns.example.com root.example.com 1 2 3 4 5"),
    }
    alias = record("CNAME", b"\5other\xc0\x10")
    cases: Cases = {}
    for kind, (data, text) in records.items():
        # Behind an alias, and before a record of another type.
        other = record("TXT", b"\3abc") if kind != "TXT" else record("A", bytes(4))
        reply = answer(alias, record(kind, data), other)
        keys: dict[str, Any] = {"query": NAME, "record": kind}
        cases[kind] = (reply, {**keys, "answer": text}, "good")
        cases[f"{kind}, another"] = (
            reply,
            {**keys, "answer": "x"},
            f"bad: the answer is other.example.com, {text}",
        )
    spelled = {
        "case and dot": ("NS", records["NS"][0], "NS.Example.Com.", "good"),
        "case of the record": ("NS", b"\2NS\xc0\x10", "ns.example.com", "good"),
        "spelling": ("AAAA", b"\xfd" + bytes(14) + b"\1", "FD00:0:0::1", "good"),
        "a beginning": ("A", bytes([192, 0, 2, 1]), "192.0.2.11", "bad: the answer is 192.0.2.1"),
    }
    for name, (kind, data, wanted, seen_) in spelled.items():
        cases[name] = (answer(record(kind, data)), {"query": NAME, "record": kind, "answer": wanted}, seen_)
    assert differing(cases, "dns") == {}
