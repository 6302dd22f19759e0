"""New flows from the table's counters, which remain when their backend or service is removed.

The kernel counts by frontend and endpoint, not by service. Growth counts for the service that has the
frontend, or had it last: no flow is lost when it goes, and none is counted again for its next owner.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from vipd.dataplane.counting import BackendKey, RefusedKey
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, family_of

Element = tuple[str, ...]
"""Address, protocol and port as clients name them; address and port of the endpoint."""
Frontend = tuple[str, ...]
"""The first three of these."""


MAX_FORMER_ELEMENTS = 10_000
"""Removed elements that are still known."""


class ElementCounter:
    """Implements `vipd.dataplane.counting.FlowCounter`."""

    def __init__(
        self,
        counted: Callable[[], Awaitable[Mapping[Element, int]]],
        forwardings: Callable[[], Iterable[Forwarding]],
        refused: Callable[[], Awaitable[Mapping[tuple[Frontend, Limit], int]]] | None = None,
    ) -> None:
        """`counted` and `refused` return the kernel's total counts of both families; may raise ApplyError."""
        self._counted, self._refused, self._forwardings = counted, refused, forwardings
        self._known: dict[Element, int] = {}
        self._owners: dict[Frontend, ForwardingKey] = {}
        """The owner of each counted frontend at the last reading."""
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """CPU time that the last `take` took at most."""
        return self._seconds

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Does nothing: `take` reads the forwardings."""

    async def take(self) -> Mapping[BackendKey, int]:
        """The new flows since the last call. A count that decreased restarted at zero."""
        began, cpu = time.monotonic(), time.process_time()
        counted = await self._counted()
        # Each is too much when there is other work on this host, or in this process.
        self._seconds = min(time.monotonic() - began, time.process_time() - cpu)
        taken: dict[BackendKey, int] = {}
        self._forget_gone(counted)
        owners = _Frontends(self._forwardings())
        for element, flows in counted.items():
            known, frontend = self._known.get(element, 0), element[:3]
            if flows == known:
                continue
            key = owners.key(frontend) or self._owners.get(frontend)
            if key is None:
                continue  # its service may be missing only temporarily
            self._known[element], self._owners[frontend] = flows, key
            place = BackendKey(key, element[3], int(element[4]))
            taken[place] = taken.get(place, 0) + (flows - known if flows > known else flows)
        return taken

    def _forget_gone(self, counted: Mapping[Element, int]) -> None:
        """Drop what the kernel no longer has, once it is much: tables may be replaced repeatedly.

        A family without any report is only unreadable now: its counts continue.
        """
        if len(self._known) <= len(counted) + MAX_FORMER_ELEMENTS:
            return
        told = {family_of(element[0]) for element in counted}
        self._known = {
            element: flows
            for element, flows in self._known.items()
            if element in counted or family_of(element[0]) not in told
        }
        there = {element[:3] for element in self._known}
        self._owners = {frontend: key for frontend, key in self._owners.items() if frontend in there}

    async def refused(self) -> Mapping[RefusedKey, int]:
        """The new flows that limits have refused, in all. Raises ApplyError."""
        limited = [forwarding for forwarding in self._forwardings() if forwarding.limits]
        found = {
            RefusedKey(forwarding.key, each.limit): 0
            for forwarding in limited
            for each in (forwarding.limits.applied() if forwarding.limits else ())
        }
        owners = _Frontends(limited)
        for (frontend, limit), flows in (await self._refused()).items() if limited and self._refused else ():
            key = owners.key(frontend)
            if key and (place := RefusedKey(key, limit)) in found:
                found[place] += flows
        return found

    def saved_state(self) -> object:
        """A row for each element: its owner, itself, and its count."""
        return [
            [*self._owners[element[:3]], *element, flows]
            for element, flows in self._known.items()
            if element[:3] in self._owners
        ]

    def restore(self, memory: object) -> None:
        """Rows of an earlier run."""
        for row in memory if isinstance(memory, list) else ():
            try:
                place = BackendKey.of_row([*row[:4], *row[7:9]])
                element, flows = tuple(map(str, row[4:9])), int(row[9])
            except (TypeError, ValueError, LookupError, OverflowError):
                continue
            self._known[element], self._owners[element[:3]] = flows, place.key


class _Frontends:
    """Owners of frontends; a node port matches any address of its family that is no other frontend."""

    def __init__(self, forwardings: Iterable[Forwarding]) -> None:
        self._named: dict[Frontend, ForwardingKey] = {}
        self._node_ports: dict[tuple[Family, str, str], ForwardingKey] = {}
        for forwarding in forwardings:
            key = forwarding.key
            self._named.update(dict.fromkeys(_frontends(forwarding), key))
            if forwarding.node_port:
                self._node_ports[key.family, str(key.protocol), str(forwarding.node_port)] = key

    def key(self, frontend: Frontend) -> ForwardingKey | None:
        address, protocol, port = frontend
        return self._named.get(frontend) or self._node_ports.get((family_of(address), protocol, port))


def _frontends(forwarding: Forwarding) -> Iterator[Frontend]:
    external = (each.address for each in forwarding.external_addresses)
    for address in (*forwarding.addresses, *external):
        yield address, str(forwarding.key.protocol), str(forwarding.port)
