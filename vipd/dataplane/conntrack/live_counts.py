"""Counts the live flows of every backend of some forwardings, in one reading of the conntrack table.

A reading needs nothing of those before it, so no lost event can falsify a count. It takes CPU in proportion
to the table; the caller decides how often it is worth that.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address
from typing import NamedTuple

from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.entries import DESTINATION_TRANSLATED, SOURCE_TRANSLATED, address_text
from vipd.dataplane.conntrack.live import CLOSED_STATES
from vipd.dataplane.conntrack.netlink import Conntrack, open_socket
from vipd.dataplane.conntrack.stale import Destination, destinations
from vipd.dataplane.counting import BackendKey
from vipd.host.netlink import unsigned
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Protocol, family_of

_CLOSED = frozenset(bytes([state]) for state in CLOSED_STATES)
_TRANSLATED = SOURCE_TRANSLATED | DESTINATION_TRANSLATED


class LiveCounts(NamedTuple):
    """One reading."""

    flows: Mapping[BackendKey, int]
    """Flows that have not ended; a backend without flows is missing."""
    seconds: float
    """CPU time that the reading took."""


async def live_counts(
    forwardings: Iterable[Forwarding], host_addresses: Collection[str], connect: Connect = open_socket
) -> LiveCounts:
    """The live flows of each backend of these forwardings. UDP flows count until they expire in the kernel.
    Raises ConntrackError."""
    keys = {place: f.key for f in forwardings for place in destinations(f)}
    return await asyncio.to_thread(_read, keys, frozenset(host_addresses), connect)


def _read(keys: Mapping[Destination, ForwardingKey], own: frozenset[str], connect: Connect) -> LiveCounts:
    began = time.thread_time()
    found = Counter[BackendKey]()
    for part in sorted({(place.family, place.protocol) for place in keys}):
        frontends = _Frontends(*part, keys, own)
        for (destination, port, backend), flows in _count(frontends, connect).items():
            if (key := frontends.key(destination, port)) is not None:
                found[BackendKey(key, address_text(backend[:-2]), unsigned(backend[-2:]))] += flows
    return LiveCounts(found, time.thread_time() - began)


class _Frontends:
    """Where clients send by one protocol. Addresses and ports are packed."""

    def __init__(
        self,
        family: Family,
        protocol: Protocol,
        keys: Mapping[Destination, ForwardingKey],
        own: frozenset[str],
    ) -> None:
        self.family, self.protocol = family, protocol
        here = {p: key for p, key in keys.items() if (p.family, p.protocol) == (family, protocol)}
        self.addressed = {_packed(p.address, p.port): key for p, key in here.items() if p.address}
        self.node_ports = {p.port.to_bytes(2, "big"): key for p, key in here.items() if not p.address}
        self.own = {ip_address(address).packed for address in own if family_of(address) is family}

    def key(self, destination: bytes, port: bytes) -> ForwardingKey | None:
        """The forwarding of flows to this destination."""
        key = self.addressed.get(destination + port)
        return self.node_ports.get(port) if key is None and destination in self.own else key


def _count(frontends: _Frontends, connect: Connect) -> Counter[tuple[bytes, bytes, bytes]]:
    """The live flows by destination, its port, and the backend with its port. All stay packed, and the loop
    is written for speed: a table has 100,000 flows."""
    found, seen = Counter[tuple[bytes, bytes, bytes]](), set[bytes]()
    addressed, node_ports, own = frontends.addressed, frontends.node_ports, frontends.own
    tcp = frontends.protocol is Protocol.TCP
    with Conntrack(connect()) as table:
        for batch in table.dump_packed(frontends.family, frontends.protocol):
            for (
                _,
                source,
                to,
                from_port,
                port,
                server,
                client,
                server_port,
                to_port,
                status,
                number,
                state,
            ) in batch:
                if state in _CLOSED:
                    continue
                identity = number + source + from_port + to + port
                destination, backend = to, server + server_port
                if tcp and status[-1] & _TRANSLATED == SOURCE_TRANSLATED:
                    # The entry begins with a reply: see `Entry.from_client`.
                    destination, port, backend = client, to_port, source + from_port
                place = destination + port
                if place not in addressed and not (port in node_ports and destination in own):
                    continue
                # By identity: an entry may appear twice.
                if backend != place and identity not in seen:
                    seen.add(identity)
                    found[destination, port, backend] += 1
    return found


def _packed(address: str, port: int) -> bytes:
    return ip_address(address).packed + port.to_bytes(2, "big")
