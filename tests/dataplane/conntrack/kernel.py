"""The connection tracking table of a namespace: a socket in it, and entries put into it by hand."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable

from tests.dataplane.namespace import inside
from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.entries import Entry, SocketAddress
from vipd.dataplane.conntrack.messages import NEW
from vipd.dataplane.conntrack.netlink import open_socket
from vipd.host.netlink import (
    ACKNOWLEDGE,
    CREATE,
    FAMILY_NUMBERS,
    REQUEST,
    attribute,
    error_number,
    message,
    nested,
    nfgenmsg,
    split,
)
from vipd.model.service import Family, Protocol, family_of

CONFIRMED, ASSURED = 1 << 3, 1 << 2
ESTABLISHED = 3


def connect_in(namespace: str) -> Connect:
    """Opens netlink sockets of a named network namespace, from any thread and without changing it."""
    return lambda: inside(namespace, open_socket)


def made(
    source: SocketAddress,
    destination: SocketAddress,
    reply_source: SocketAddress | None = None,
    *,
    protocol: Protocol = Protocol.UDP,
    replied: bool = False,
    tcp_state: int = 0,
    reply_destination: SocketAddress | None = None,
) -> Entry:
    """An entry as a value."""
    return Entry(
        family_of(destination[0]),
        protocol,
        source,
        destination,
        reply_source or destination,
        reply_destination or source,
        CONFIRMED | (entries.SEEN_REPLY if replied else 0),
        tcp_state,
        600,
        0,
        b"",
    )


def insert(connect: Connect, wanted: Iterable[Entry], zone: int = 0) -> None:
    """Put entries into a table. AssertionError when the kernel refuses one."""
    with connect() as connected:
        connected.settimeout(10)
        batch: list[bytes] = []
        for number, entry in enumerate(wanted, 1):
            batch.append(new_request(entry, number, zone))
            if len(batch) == 64:
                _send(connected, batch)
        _send(connected, batch)


def new_request(entry: Entry, sequence: int, zone: int = 0) -> bytes:
    """The message that makes an entry."""
    body = _ends(entries.CTA_TUPLE_ORIG, entry, entry.source, entry.destination)
    body += _ends(entries.CTA_TUPLE_REPLY, entry, entry.reply_source, entry.reply_destination)
    body += attribute(entries.CTA_STATUS, struct.pack(">I", entry.status))
    body += attribute(entries.CTA_TIMEOUT, struct.pack(">I", entry.timeout))
    body += attribute(entries.CTA_MARK, struct.pack(">I", entry.mark))
    if entry.traffic:
        body += counters(entries.CTA_COUNTERS_ORIG, *entry.traffic[:2])
        body += counters(entries.CTA_COUNTERS_REPLY, *entry.traffic[2:])
    if zone:
        body += attribute(entries.CTA_ZONE, struct.pack(">H", zone))
    if entry.protocol is Protocol.TCP:
        state = attribute(entries.CTA_PROTOINFO_TCP_STATE, bytes([entry.tcp_state]))
        body += nested(entries.CTA_PROTOINFO, nested(entries.CTA_PROTOINFO_TCP, state))
    content = nfgenmsg(FAMILY_NUMBERS[entry.family]) + body
    return message(NEW, REQUEST | ACKNOWLEDGE | CREATE, sequence, content)


def counters(kind: int, packets: int, size: int) -> bytes:
    """What has passed in one direction."""
    numbers = attribute(entries.CTA_COUNTERS_PACKETS, struct.pack(">Q", packets))
    return nested(kind, numbers + attribute(entries.CTA_COUNTERS_BYTES, struct.pack(">Q", size)))


def _ends(kind: int, entry: Entry, source: SocketAddress, destination: SocketAddress) -> bytes:
    v4 = entry.family is Family.IPV4
    pack = socket.AF_INET if v4 else socket.AF_INET6
    first = 1 if v4 else 3
    addresses = attribute(first, socket.inet_pton(pack, source[0]))
    addresses += attribute(first + 1, socket.inet_pton(pack, destination[0]))
    ports = attribute(entries.CTA_PROTO_NUM, bytes([entries.PROTOCOL_NUMBERS[entry.protocol]]))
    ports += attribute(entries.CTA_PROTO_SRC_PORT, struct.pack(">H", source[1]))
    ports += attribute(entries.CTA_PROTO_DST_PORT, struct.pack(">H", destination[1]))
    return nested(kind, nested(entries.CTA_TUPLE_IP, addresses) + nested(entries.CTA_TUPLE_PROTO, ports))


def _send(connected: socket.socket, batch: list[bytes]) -> None:
    connected.sendto(b"".join(batch), (0, 0))
    answered = 0
    while answered < len(batch):
        data = connected.recv(1 << 16)
        for *_, start, end in split(data):
            error = error_number(data, start, end)
            assert not error, f"the kernel refused an entry: {os.strerror(error)}"
            answered += 1
    batch.clear()
