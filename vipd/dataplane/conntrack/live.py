"""Counts the remaining flows of a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.entries import TCP_CLOSE, TCP_TIME_WAIT, Entry, SocketAddress
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack, open_socket
from vipd.dataplane.conntrack.stale import flow_targets
from vipd.model.forwarding import Forwarding

CLOSED_STATES = frozenset({TCP_TIME_WAIT, TCP_CLOSE})
"""TCP states of connections that both sides have closed: nothing depends on the backend any more."""


async def live_flows(
    forwardings: Iterable[Forwarding],
    backends: Collection[SocketAddress],
    host_addresses: Collection[str],
    connect: Connect = open_socket,
) -> int:
    """Number of tracked flows through these forwardings that lead to one of the backends and have not ended.

    UDP flows count until they expire in the kernel. Raises ConntrackError.
    """
    wanted = flow_targets(forwardings, host_addresses)
    parts = {(destination.family, destination.protocol) for destination in wanted.targets}

    def counts(entry: Entry) -> bool:
        live = entry.reply_source in backends and entry.tcp_state not in CLOSED_STATES
        return live and wanted.target(entry) is not None

    def count() -> int:
        found = set[bytes]()
        for query in (Query(*part) for part in sorted(parts)):
            with Conntrack(connect()) as table:
                # By identity: an entry may appear twice.
                found.update(e.identity for chunk in table.dump(query) for e in chunk if counts(e))
        return len(found)

    return await asyncio.to_thread(count)
