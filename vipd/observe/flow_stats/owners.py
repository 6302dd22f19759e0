"""Finds the service of a tracked flow. Pure.

A removed frontend still owns its existing flows: their traffic counts for that service until they end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from vipd.dataplane.conntrack.flow_end import FlowTuple
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.stale import Destination, destinations
from vipd.dataplane.counting import BackendKey
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Protocol

MAX_FORMER = 10_000
"""Removed destinations that are still known, besides about as many as there are current ones."""


class FlowOwners:
    """The forwardings behind destinations."""

    def __init__(
        self, forwardings: Iterable[Forwarding] = (), host_addresses: Collection[str] = frozenset()
    ) -> None:
        self._keys = {place: f.key for f in forwardings for place in destinations(f)}
        self._host = frozenset(host_addresses)
        self._followed: Mapping[str, tuple[Forwarding, ...]] = {}
        self._max_keys = MAX_FORMER
        """With more destinations the removed ones are dropped."""

    def update(self, services: Mapping[str, tuple[Forwarding, ...]], host_addresses: Collection[str]) -> None:
        """The forwardings of all services are these now. Costs little where they are the same objects.
        The mapping is kept: it must not change."""
        self._host = frozenset(host_addresses)
        before, self._followed = self._followed, services
        for name, forwardings in services.items():
            if before.get(name) is not forwardings:
                self._keys.update((place, f.key) for f in forwardings for place in destinations(f))
        if len(self._keys) > self._max_keys:
            self._keys = {p: f.key for part in services.values() for f in part for p in destinations(f)}
            self._max_keys = 2 * len(self._keys) + MAX_FORMER

    def queries(self) -> list[Query]:
        """The parts of the table that can contain such flows. The kernel walks through all of it for each."""
        protocols = dict[Family, set[Protocol]]()
        for place in self._keys:
            protocols.setdefault(place.family, set()).add(place.protocol)
        return [Query(f, *(found if len(found) == 1 else ())) for f, found in sorted(protocols.items())]

    def backend_key(self, way: FlowTuple) -> BackendKey | None:
        """The backend that flows lead to, and the forwarding that translated them; None if none did."""
        if way.backend == way.destination:
            return None
        address, port = way.destination
        key = self._keys.get(Destination(way.family, way.protocol, address, port))
        if key is None and address in self._host:
            key = self._keys.get(Destination(way.family, way.protocol, "", port))
        return None if key is None else BackendKey(key, *way.backend)
