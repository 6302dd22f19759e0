"""The destinations whose flows may have to end, in the cache: after a restart, flows to removed ones end.

A service that is removed while vipd is down is missing from the next run's input, but its flows continue in
the kernel. Only destinations are kept whose flows end with their backend: UDP, and `on_remove: reset`.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from vipd.dataplane.conntrack.entries import SocketAddress
from vipd.dataplane.conntrack.stale import Destination
from vipd.model.service import Family, Protocol
from vipd.sources.cache import Value

GARBAGE = (LookupError, TypeError, ValueError, OverflowError, RecursionError)


class SavedTarget(NamedTuple):
    """State of a destination when the last process ended."""

    backends: frozenset[SocketAddress]
    """Its backends; none if its flows are known to have ended."""
    since: float | None = None
    """When the rules without it were written, on the scheduler's clock; None: it was in use."""


SavedTargets = dict[Destination, SavedTarget]


def key_of(destination: Destination) -> str:
    """The key of a destination."""
    return json.dumps(destination, separators=(",", ":"))


def encode(saved: SavedTarget) -> str:
    """The entry of a destination."""
    return json.dumps([sorted(saved.backends), saved.since], separators=(",", ":"))


def decode(key: str, text: Value) -> tuple[Destination, SavedTarget]:
    """The destination of an entry. Raises one of GARBAGE."""
    family, protocol, address, port = json.loads(key)
    backends, since = json.loads(text)
    if not (isinstance(address, str) and isinstance(port, int) and isinstance(backends, list)):
        raise TypeError("it has another form")
    destination = Destination(Family(family), Protocol(str(protocol)), address, port)
    addresses = frozenset((str(backend), int(number)) for backend, number in backends)
    return destination, SavedTarget(addresses, None if since is None else float(since))
