"""Reads which flows to backends were never answered, and which were. It blocks: use it from a thread.

A flow is known by the hash of its identity, so that a reading takes little memory. What is kept is bounded,
and kernels from Linux 5.15 on send only the flows that are asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from itertools import islice
from typing import NamedTuple

from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.entries import (
    DESTINATION_TRANSLATED,
    SEEN_REPLY,
    SOURCE_TRANSLATED,
    SocketAddress,
    address_text,
)
from vipd.dataplane.conntrack.netlink import Conntrack
from vipd.dataplane.conntrack.stale import Destination, FlowTargets
from vipd.host.netlink import unsigned
from vipd.model.service import Family, Protocol, family_of

MAX_FLOWS = 20_000
"""Flows of one family and protocol that a reading takes."""
MAX_ANSWERED = 200_000
MAX_FILTERS = 8
"""Backends up to which the kernel is asked for each by itself: each time it walks through its whole table."""


class Reached(NamedTuple):
    """A backend as it is reached by one protocol."""

    protocol: Protocol
    backend: SocketAddress


class BackendFlows(NamedTuple):
    """The flows to one backend through one destination."""

    destination: Destination
    backend: SocketAddress

    @property
    def reached(self) -> Reached:
        """The backend, whatever the destination."""
        return Reached(self.destination.protocol, self.backend)


Flows = Mapping[BackendFlows, Set[int]]
"""Flows by the hashes of their identities."""


class _Entry(NamedTuple):
    flows: BackendFlows
    identity: int
    answered: bool


def read_unanswered(targets: FlowTargets, connect: Connect) -> Flows:
    """The flows to serving backends that were never answered. Raises ConntrackError."""
    found = defaultdict[BackendFlows, set[int]](set)
    parts = {(place.family, place.protocol) for place in list(targets.targets)}
    for family, protocol in sorted(parts):
        flows = _entries(targets, connect, family, protocol, unreplied=True)
        for entry in islice((each for each in flows if not each.answered), MAX_FLOWS):
            found[entry.flows].add(entry.identity)
    return found


def read_answered(
    targets: FlowTargets, suspects: Collection[Reached], udp: Collection[Destination], connect: Connect
) -> Flows | None:
    """The answered flows to these backends, and those to the destinations in `udp`. None: too many. Raises
    ConntrackError."""
    found, number = defaultdict[BackendFlows, set[int]](set), 0
    parts = {(family_of(reached.backend[0]), reached.protocol) for reached in suspects}
    for family, protocol in sorted(parts):
        backends = {
            s.backend[0] for s in suspects if (family_of(s.backend[0]), s.protocol) == (family, protocol)
        }
        # Whether replies are due by UDP, flows to other backends tell. The kernel filters by IPv4 alone.
        apart = family is Family.IPV4 and protocol is not Protocol.UDP and len(backends) <= MAX_FILTERS
        for backend in sorted(backends) if apart else ("",):
            for entry in _entries(targets, connect, family, protocol, backend=backend):
                if entry.answered and (entry.flows.reached in suspects or entry.flows.destination in udp):
                    found[entry.flows].add(entry.identity)
                    number += 1
                    if number > MAX_ANSWERED:
                        return None
    return found


def _entries(
    targets: FlowTargets,
    connect: Connect,
    family: Family,
    protocol: Protocol,
    *,
    unreplied: bool = False,
    backend: str = "",
) -> Iterator[_Entry]:
    """The entries of flows to serving backends."""
    with Conntrack(connect()) as table:
        for batch in table.dump_packed(family, protocol, unreplied=unreplied, backend=backend):
            for _, source, to, from_port, port, server, _, server_port, _, status, number, _ in batch:
                if status[-1] & (SOURCE_TRANSLATED | DESTINATION_TRANSLATED) == SOURCE_TRANSLATED:
                    continue  # it began with a reply
                destination = Destination(family, protocol, address_text(to), unsigned(port))
                target = targets.targets.get(destination)
                if target is None and destination.address in targets.host_addresses:
                    destination = destination._replace(address="")
                    target = targets.targets.get(destination)
                reached = address_text(server), unsigned(server_port)
                if target is not None and reached in target.serving:
                    identity = hash(number + source + from_port + to + port)
                    yield _Entry(BackendFlows(destination, reached), identity, bool(status[-1] & SEEN_REPLY))
