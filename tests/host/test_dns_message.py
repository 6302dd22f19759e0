"""DNS messages read as dnspython reads them, and none costs more than its size allows."""

from __future__ import annotations

import random
import time

import dns.message
import dns.rdatatype
import dns.rrset
import pytest

from vipd.host.dns_message import HEADER, MalformedError, Reply, encode_query, read_reply

NAME = "web.Example.com"
VALUES = {
    "A": ["10.0.0.1", "255.255.255.255"],
    "AAAA": ["::1", "fd00::1", "::ffff:10.0.0.1", "2001:db8:1:2:3:4:5:6"],
    "CNAME": ["other.example.com."],
    "NS": ["ns.example.com.", "ns.a.b.c."],
    "MX": ["10 mail.example.com.", "20 com."],
    "SRV": ["1 2 5060 sip.example.com.", "0 65535 1 ."],
    "SOA": ["ns.example.com. root.example.com. 1 2 3 4 5"],
}


def answer(kind: str, values: list[str], query: bytes, name: str = NAME) -> bytes:
    response = dns.message.make_response(dns.message.from_wire(query))
    response.answer.append(dns.rrset.from_text(f"{name}.", 77, "IN", kind, *values))
    return response.to_wire(max_size=65535)


def query_of(kind: str, payload: int = 1232) -> bytes:
    return encode_query(4711, NAME, kind, payload)


def test_a_query_is_as_dnspython_makes_it() -> None:
    for payload in (0, 1232):
        wanted = dns.message.make_query(NAME, "A", id=4711, use_edns=0 if payload else -1, payload=payload)
        assert query_of("A", payload) == wanted.to_wire()


@pytest.mark.parametrize("kind", VALUES)
def test_records_are_as_dnspython_writes_them(kind: str) -> None:
    query = query_of(kind)
    reply = read_reply(answer(kind, VALUES[kind], query), query)
    assert reply is not None
    found = [(r.owner, r.kind, r.ttl, r.text.lower()) for r in reply.records]
    texts = [value.removesuffix(".") if value[-2:] != " ." else value for value in VALUES[kind]]
    texts = [text.replace(". ", " ") for text in texts]
    assert sorted(found) == sorted((NAME.lower(), kind, 77, text) for text in texts)


def read(data: bytes, query: bytes) -> Reply | str | None:
    try:
        return read_reply(data, query, 3000)
    except MalformedError as error:
        return str(error)


def test_damaged_messages_are_refused_or_read() -> None:
    """Whatever comes raises nothing else."""
    chance = random.Random(1)
    for kind in VALUES:
        query = query_of(kind)
        good = answer(kind, VALUES[kind], query)
        for _ in range(2000):
            bad = bytearray(good)
            for _ in range(chance.randrange(1, 4)):
                bad[chance.randrange(2, len(bad))] = chance.randrange(256)
            read(bytes(bad[: chance.randrange(len(bad) + 1)]), query)
            read(bytes(bad), query)


def pointers(chain: bytes, step: int) -> bytes:
    """An answer of thousands of CNAMEs that point at each part of what the first record holds."""
    query = query_of("CNAME")
    begin = query[: query.index(0, 12) + 5]
    first = b"\xc0\x0c" + (16).to_bytes(2, "big") + b"\0\1" + bytes(4) + len(chain).to_bytes(2, "big") + chain
    start = len(begin) + 12
    records = [first]
    for number in range(2000):
        target = (0xC000 + start + number * step % len(chain)).to_bytes(2, "big")
        records.append(target + b"\0\5\0\1" + bytes(4) + b"\0\2" + target)
    counts = HEADER.pack(4711, 0x8180, 1, len(records), 0, 0)
    return counts + begin[12:] + b"".join(records)


def test_names_that_point_at_each_other_cost_no_more_than_others() -> None:
    labels = b"\1" * 250 + b"\0\0"  # a name of 126 labels at each byte
    hops = b"".join((0xC000 + 45 + 2 * n).to_bytes(2, "big") for n in range(4000))
    growing = b"\0\0" + b"".join(
        b"\x0b" + b"a" * 11 + (0xC000 + 45 + 14 * n).to_bytes(2, "big") for n in range(500)
    )
    for chain, step in ((labels * 60, 1), (labels * 60, 7), (hops, 2), (growing, 14)):
        best = 1.0
        for _ in range(5):
            began = time.thread_time()
            read(pointers(chain, step), query_of("CNAME"))
            best = min(best, time.thread_time() - began)
        assert best < 0.05
