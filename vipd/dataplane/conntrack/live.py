"""Counts the remaining flows of a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.entries import TCP_CLOSE, TCP_TIME_WAIT, Entry, SocketAddress
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack, open_socket
from vipd.dataplane.conntrack.stale import FlowTargets, flow_targets
from vipd.host.bounded_threads import BoundedThreads
from vipd.model.forwarding import Forwarding

_threads = BoundedThreads("count flows", 1)
"""One of its own: hundreds may wait for the end of flows, and ask again and again."""
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
    return await _count(
        flow_targets(forwardings, host_addresses), lambda entry: entry.reply_source in backends, connect
    )


async def forwarded_flows(
    forwardings: Iterable[Forwarding], host_addresses: Collection[str], connect: Connect = open_socket
) -> int:
    """Number of tracked flows through these forwardings that other hosts began, and that have not ended.
    Raises ConntrackError."""
    own = frozenset(host_addresses)
    return await _count(
        flow_targets(forwardings, own),
        lambda entry: entry.translated and entry.source[0] not in own,
        connect,
    )


async def _count(wanted: FlowTargets, concerns: Callable[[Entry], bool], connect: Connect) -> int:
    """Number of live flows to these destinations that a condition holds for."""
    parts = {(destination.family, destination.protocol) for destination in wanted.targets}

    def counts(entry: Entry) -> bool:
        entry = entry.from_client
        live = entry.tcp_state not in CLOSED_STATES and concerns(entry)
        return live and wanted.target(entry) is not None

    def count() -> int:
        found = set[bytes]()
        for query in (Query(*part) for part in sorted(parts)):
            with Conntrack(connect()) as table:
                # By identity: an entry may appear twice.
                found.update(e.identity for chunk in table.dump(query) for e in chunk if counts(e))
        return len(found)

    return await asyncio.wrap_future(_threads.submit(count))
