"""Deletes the connection tracking entries of flows to backends and frontends that no longer serve.

A thread does the work: reading and deleting wait for the kernel, and a large table keeps Python busy
for a second. The event loop continues.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vipd.dataplane.conntrack.entries import Entry
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack, open_socket
from vipd.dataplane.conntrack.stale import FlowTargets, Reason, stale_reason

Connect = Callable[[], socket.socket]
"""Opens a netlink socket in the right network namespace. Raises ConntrackError."""

MAX_DELETIONS = 100_000
"""In one run. It limits the memory, a few hundred bytes for each, and the time, some seconds."""


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """The result of a run."""

    examined: int
    """Entries examined, without those that the kernel filtered out."""
    deleted: Mapping[Reason, int]
    """Flows ended, for each reason that occurred."""
    seconds: float
    complete: bool = True
    """False if there was more to delete than one run may: then another one is due."""


async def clean(
    targets: FlowTargets, connect: Connect = open_socket, max_deletions: int = MAX_DELETIONS
) -> CleanupResult:
    """End every flow that `judge` selects. Raises ConntrackError; some may have been ended then.

    `targets`'s mapping may change during the call: each entry is judged by its content at that moment. A
    cancelled call stops soon, but perhaps not at once.
    """
    queries, stop = targets.queries(), threading.Event()
    if not queries:
        return CleanupResult(0, {}, 0.0)
    try:
        return await asyncio.to_thread(_clean, _Run(targets, connect, max_deletions, stop), queries)
    finally:
        stop.set()


@dataclass(frozen=True, slots=True)
class _Run:
    targets: FlowTargets
    connect: Connect
    max_deletions: int
    stop: threading.Event


def _clean(run: _Run, queries: tuple[Query, ...]) -> CleanupResult:
    began, examined, deleted = time.monotonic(), 0, Counter[Reason]()
    budget = run.max_deletions
    for query in queries:
        stale, seen = _find(run, query, budget)
        examined += seen
        budget -= len(stale)
        with Conntrack(run.connect()) as table:
            for reason in Reason:
                entries = [entry for entry, why in stale.values() if why is reason]
                deleted[reason] += table.delete(entries) if not run.stop.is_set() else 0
    return CleanupResult(
        examined,
        {reason: count for reason, count in deleted.items() if count},
        time.monotonic() - began,
        complete=budget > 0,
    )


def _find(run: _Run, query: Query, limit: int) -> tuple[dict[bytes, tuple[Entry, Reason]], int]:
    """Stale entries by their identity, up to `limit`; and the number of examined entries."""
    stale, seen = dict[bytes, tuple[Entry, Reason]](), 0
    with Conntrack(run.connect()) as table:
        for chunk in table.dump(query):
            seen += len(chunk)
            for entry in chunk:
                reason = stale_reason(entry, run.targets)
                if reason and len(stale) < limit:
                    stale[entry.identity] = entry, reason
            if run.stop.is_set() or len(stale) >= limit:
                break
    return stale, seen
