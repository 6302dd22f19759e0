"""New flows from the table's counters, which remain when their backend or service is removed.

The kernel counts by frontend and endpoint, not by service. Growth counts for the service that has the
frontend, or had it last: no flow is lost when it goes, and none is counted again for its next owner. Counts
that nothing can add to any more are deleted, as the sets have room for a number of elements.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping

from vipd.dataplane.counting import BackendKey, RefusedKey
from vipd.dataplane.nftables.layout import FLOWS, NftSet, refused_flows
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, family_of

Element = tuple[str, ...]
"""Address, protocol and port as clients name them; address and port of the endpoint, or a limit."""
Frontend = tuple[str, ...]
"""The first three of these."""


MAX_FORMER_ELEMENTS = 10_000
"""Removed elements that are still known."""

Read = Callable[[], Awaitable[Mapping[Element, int]]]
"""Returns the kernel's total counts of both families; may raise ApplyError."""

Delete = Callable[[NftSet, Collection[Element]], Awaitable[Mapping[Element, int]]]
"""Deletes elements of a set, named by their keys; returns the last counts of those that it has deleted."""


class ElementCounter:
    """Implements `vipd.dataplane.counting.FlowCounter`."""

    def __init__(
        self,
        counted: Read,
        forwardings: Callable[[], Iterable[Forwarding]],
        refused: Read | None = None,
        delete: Delete | None = None,
    ) -> None:
        """`refused` and `delete`: None where the kernel has no such counts, or keeps them."""
        self._counted, self._refused, self._forwardings = counted, refused, forwardings
        self._delete = delete
        self._flows, self._refusals = _Counts(), _Counts()
        self._refused_last: dict[tuple[ForwardingKey, Element], int] = {}
        """What deleted elements had counted since they were read last."""
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
        return _by_backend(self._flows.grown(counted, _Frontends(self._forwardings())))

    async def refused(self) -> Mapping[RefusedKey, int]:
        """The new flows that limits have refused since the last call. Raises ApplyError."""
        limited = [forwarding for forwarding in self._forwardings() if forwarding.limits]
        found = {
            RefusedKey(forwarding.key, each.limit): 0
            for forwarding in limited
            for each in (forwarding.limits.applied() if forwarding.limits else ())
        }
        if (limited or self._refusals.known) and self._refused:
            grown = self._refusals.grown(await self._refused(), _Frontends(limited))
            last, self._refused_last = self._refused_last, {}
            for (key, (limit,)), flows in (*grown.items(), *last.items()):
                place = RefusedKey(key, Limit(limit))
                found[place] = found.get(place, 0) + flows
        return found

    async def collect_garbage(self) -> Mapping[BackendKey, int]:
        """Delete the elements of frontends and endpoints that no forwarding has any more."""
        if self._delete is None:
            return {}
        forwardings = list(self._forwardings())
        gone = await asyncio.to_thread(self._flows.gone, _Frontends(forwardings), FLOWS.size)
        final = await self._delete(FLOWS, gone)
        left = self._flows.end(gone, final)
        limited = _Frontends(f for f in forwardings if f.limits)
        for limit in Limit:
            nft_set = refused_flows(limit)
            refused = [e for e in self._refusals.gone(limited, nft_set.size) if e[3:] == (limit,)]
            ended = await self._delete(nft_set, [element[:3] for element in refused])
            final = {(*element, limit): flows for element, flows in ended.items()}
            self._refused_last.update(self._refusals.end(refused, final))
        return _by_backend(left)

    def saved_state(self) -> object:
        """A row for each element: its owner, itself, and its count."""
        return {"flows": self._flows.rows(), "refused": self._refusals.rows()}

    def restore(self, memory: object) -> None:
        """Rows of an earlier run."""
        memory = {"flows": memory} if isinstance(memory, list) else memory  # of an earlier version
        if isinstance(memory, dict):
            self._flows.restore(memory.get("flows"), 5)
            self._refusals.restore(memory.get("refused"), 4)


class _Counts:
    """The counts of elements as they were read last, and the services that they counted for."""

    def __init__(self) -> None:
        self.known: dict[Element, int] = {}
        self._owners: dict[Frontend, ForwardingKey] = {}
        """The owner of each counted frontend at the last reading."""
        self._unowned: frozenset[Element] = frozenset()
        """Elements of frontends that nobody is known to have had."""

    def grown(
        self, counted: Mapping[Element, int], owners: _Frontends
    ) -> dict[tuple[ForwardingKey, Element], int]:
        """The growth since the last reading, by the owner of the frontend and the rest of the key."""
        grown: dict[tuple[ForwardingKey, Element], int] = {}
        self._forget_gone(counted)
        unowned = []
        for element, flows in counted.items():
            known, frontend = self.known.get(element, 0), element[:3]
            if flows == known:
                continue
            key = owners.key(frontend) or self._owners.get(frontend)
            if key is None:
                unowned.append(element)
                continue  # its service may be missing only temporarily
            self.known[element], self._owners[frontend] = flows, key
            place = key, element[3:]
            grown[place] = grown.get(place, 0) + (flows - known if flows > known else flows)
        self._unowned = frozenset(unowned)
        return grown

    def gone(self, owners: _Frontends, room: int) -> list[Element]:
        """The elements that packets no longer reach; those that nobody had only while they take much of the
        room of their set."""
        gone = [element for element in list(self.known) if not owners.reaches(element)]
        return [*gone, *self._unowned] if 2 * len(self._unowned) > room else gone

    def end(
        self, elements: Iterable[Element], final: Mapping[Element, int]
    ) -> dict[tuple[ForwardingKey, Element], int]:
        """These elements are deleted, if they have a final count; returns the growth until then."""
        grown: dict[tuple[ForwardingKey, Element], int] = {}
        for element in elements:
            if element not in final:
                continue
            known, key = self.known.pop(element, 0), self._owners.get(element[:3])
            if key and final[element] > known:
                grown[key, element[3:]] = grown.get((key, element[3:]), 0) + final[element] - known
        self._drop_owners()
        return grown

    def _forget_gone(self, counted: Mapping[Element, int]) -> None:
        """Drop what the kernel no longer has, once it is much: tables may be replaced repeatedly.

        A family without any report is only unreadable now: its counts continue.
        """
        if len(self.known) <= len(counted) + MAX_FORMER_ELEMENTS:
            return
        told = {family_of(element[0]) for element in counted}
        self.known = {
            element: flows
            for element, flows in self.known.items()
            if element in counted or family_of(element[0]) not in told
        }
        self._drop_owners()

    def _drop_owners(self) -> None:
        there = {element[:3] for element in self.known}
        self._owners = {frontend: key for frontend, key in self._owners.items() if frontend in there}

    def rows(self) -> list[list[object]]:
        """As JSON values."""
        return [
            [*self._owners[element[:3]], *element, flows]
            for element, flows in self.known.items()
            if element[:3] in self._owners
        ]

    def restore(self, rows: object, width: int) -> None:
        """From the output of `rows`, whose elements have this many parts. Others are left out."""
        for row in rows if isinstance(rows, list) else ():
            try:
                owner, element, flows = row[:4], tuple(map(str, row[4 : 4 + width])), int(row[4 + width])
                key = BackendKey.of_row([*owner, "", 0]).key
            except (TypeError, ValueError, LookupError, OverflowError):
                continue
            if len(row) == 5 + width:
                self.known[element], self._owners[element[:3]] = flows, key


def _by_backend(grown: Mapping[tuple[ForwardingKey, Element], int]) -> dict[BackendKey, int]:
    return {BackendKey(key, address, int(port)): flows for (key, (address, port)), flows in grown.items()}


class _Frontends:
    """Owners of frontends; a node port matches any address of its family that is no other frontend."""

    def __init__(self, forwardings: Iterable[Forwarding]) -> None:
        self._named: dict[Frontend, Forwarding] = {}
        self._node_ports: dict[tuple[Family, str, str], Forwarding] = {}
        for forwarding in forwardings:
            key = forwarding.key
            self._named.update(dict.fromkeys(_frontends(forwarding), forwarding))
            if forwarding.node_port:
                self._node_ports[key.family, str(key.protocol), str(forwarding.node_port)] = forwarding
        self._backends: dict[ForwardingKey, Collection[Element]] = {}

    def key(self, frontend: Frontend) -> ForwardingKey | None:
        owner = self._owner(frontend)
        return owner.key if owner else None

    def reaches(self, element: Element) -> bool:
        """Whether a packet may still be counted in an element."""
        owner, rest = self._owner(element[:3]), element[3:]
        if owner is None:
            return False
        if len(rest) == 1:
            return bool(owner.limits and rest[0] in {each.limit for each in owner.limits.applied()})
        if owner.key not in self._backends:
            known = (*owner.reachable(), *owner.without_new_flows, *owner.unavailable)
            self._backends[owner.key] = {(e.address, str(e.port)) for e in known}
        return rest in self._backends[owner.key]

    def _owner(self, frontend: Frontend) -> Forwarding | None:
        address, protocol, port = frontend
        return self._named.get(frontend) or self._node_ports.get((family_of(address), protocol, port))


def _frontends(forwarding: Forwarding) -> Iterator[Frontend]:
    external = (each.address for each in forwarding.external_addresses)
    for address in (*forwarding.addresses, *external):
        yield address, str(forwarding.key.protocol), str(forwarding.port)
