"""How the new flows that a dataplane translated are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family
from vipd.model.service import Protocol as Transport


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
