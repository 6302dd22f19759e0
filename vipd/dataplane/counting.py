"""How a dataplane tells of the new flows that its rules translated."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from vipd.model import Endpoint, Family, ForwardingKey
from vipd.model import Protocol as Transport


class Place(NamedTuple):
    """A backend of one forwarding; its weight may change, its counter goes on."""

    key: ForwardingKey
    address: str
    port: int

    def row(self) -> list[object]:
        """As a JSON value."""
        return [*self.key, self.address, self.port]

    @classmethod
    def of_row(cls, row: object) -> Place:
        """From what `row` gave. Raises ValueError for anything else."""
        if not isinstance(row, list) or len(row) != 6:
            raise ValueError("a place has six parts")
        service, port_name, protocol, family, address, port = row
        key = ForwardingKey(str(service), str(port_name), Transport(protocol), Family(family))
        return cls(key, str(address), int(port))


class FlowCounter(Protocol):
    """Counts new flows while rules come and go."""

    @property
    def seconds(self) -> float:
        """CPU time that the last `take` took, about."""

    async def take(self) -> Mapping[Place, int]:
        """The new flows since `take` was last called, of backends that had any, also of some that are gone.

        Raises ApplyError or OSError; what was counted then comes the next time.
        """

    def memory(self) -> object:
        """A JSON value for `remember` after a restart: what of the kernel's counts has been taken."""

    def remember(self, memory: object) -> None:
        """Go on from what an earlier run had taken. What is not understood is left out."""


Absolute = Mapping[ForwardingKey, Mapping[Endpoint, int]]


class Differences:
    """Implements FlowCounter for a dataplane that says how many flows the kernel has counted in all."""

    def __init__(self, counters: Callable[[], Awaitable[Absolute]]) -> None:
        self._counters = counters
        self._known: dict[Place, int] = {}
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """CPU time that the last `take` took at most."""
        return self._seconds

    async def take(self) -> Mapping[Place, int]:
        """A count that is less than it was began anew at zero."""
        taken: dict[Place, int] = {}
        began, cpu = time.monotonic(), time.process_time()
        counters = await self._counters()
        # Each is too much when there is other work on this host, or in this process.
        self._seconds = min(time.monotonic() - began, time.process_time() - cpu)
        for key, endpoints in counters.items():
            for endpoint, flows in endpoints.items():
                place = Place(key, endpoint.address, endpoint.port)
                known = self._known.get(place, 0)
                if flows != known:
                    self._known[place] = flows
                    taken[place] = flows - known if flows > known else flows
        return taken

    def memory(self) -> object:
        """Every count, as a row of its place and the number."""
        return [[*place.row(), flows] for place, flows in self._known.items()]

    def remember(self, memory: object) -> None:
        """Rows of an earlier run."""
        for row in memory if isinstance(memory, list) else ():
            try:
                self._known[Place.of_row(row[:-1])] = int(row[-1])
            except (TypeError, ValueError, LookupError):
                continue
