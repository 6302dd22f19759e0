"""A packet on its way through base chains, with what nftables can see besides the packet itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from vipd.observe.tracer.passing import Passing
from vipd.observe.tracer.trace import Host, Packet

Key = tuple[int, ...]
Learnt = Mapping[tuple[str, Key], Key | None]


class Manipulation(Enum):
    """What nat may do to a flow; each is decided once."""

    SOURCE = "source"
    DESTINATION = "destination"


@dataclass(frozen=True, slots=True)
class Branch:
    """One way that the dice may have gone, so far."""

    packet: Passing
    original_source: int
    original_destination: int
    """Both as the client named them: what connection tracking has."""
    original_port: int | None
    learnt: Learnt = field(default_factory=dict)
    """What the packet itself put into dynamic maps and sets; None: what it took out."""
    decided: frozenset[Manipulation] = frozenset()

    @classmethod
    def first(cls, packet: Packet, host: Host) -> Branch:
        """Before any rule."""
        passing = Passing.first(packet, host)
        return cls(passing, passing.source, passing.destination, passing.port)

    @property
    def backend(self) -> str | None:
        """Where rules sent it: by a translation, or by writing another address into it."""
        packet = self.packet
        if packet.backend is not None or packet.destination == self.original_destination:
            return packet.backend
        return packet.socket(packet.destination, packet.port)

    @property
    def masqueraded(self) -> bool:
        """Whether it leaves with another source than the client's."""
        return self.packet.masqueraded or self.packet.source != self.original_source

    def with_packet(self, packet: Passing) -> Branch:
        """The same with another packet."""
        return replace(self, packet=packet)

    def learning(self, holder: str, key: Key, value: Key | None) -> Branch:
        """The same after an element was put into a map or set, or with None taken out."""
        return replace(self, learnt={**self.learnt, (holder, key): value})
