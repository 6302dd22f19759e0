"""Counts the live flows of every backend of some forwardings, in one reading of the conntrack table.

A reading needs nothing of those before it, so no lost event can falsify a count. It takes CPU in proportion
to the table; the caller decides how often it is worth that.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.live import CLOSED_STATES
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack, open_socket
from vipd.dataplane.conntrack.stale import Destination, destinations
from vipd.dataplane.counting import BackendKey
from vipd.model.forwarding import Forwarding, ForwardingKey


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
    found, seen = Counter[BackendKey](), set[bytes]()
    for query in (Query(*part) for part in sorted({(place.family, place.protocol) for place in keys})):
        with Conntrack(connect()) as table:
            for each in (entry for chunk in table.dump(query) for entry in chunk):
                if each.tcp_state in CLOSED_STATES:
                    continue
                entry = each.from_client
                address, port = entry.destination
                key = keys.get(Destination(entry.family, entry.protocol, address, port))
                if key is None and address in own:
                    key = keys.get(Destination(entry.family, entry.protocol, "", port))
                # By identity: an entry may appear twice.
                if key is not None and entry.translated and entry.identity not in seen:
                    seen.add(entry.identity)
                    found[BackendKey(key, *entry.reply_source)] += 1
    return LiveCounts(found, time.thread_time() - began)
