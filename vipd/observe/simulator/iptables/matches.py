"""The conditions of rules. Each is a value; `accepts` returns whether the packet meets it now.

A negated condition (`!` before the option) has `negated`; `accepts` takes it into account.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from vipd.observe.simulator.errors import UnknownRule
from vipd.observe.simulator.packet_state import PROTOCOLS, PacketState


class Side(StrEnum):
    """The end of the packet that a condition is about."""

    SOURCE = "source"
    DESTINATION = "destination"


class Match(Protocol):
    """One condition."""

    def accepts(self, packet: PacketState) -> bool:
        """The packet meets the condition."""
        ...


@dataclass(frozen=True, slots=True)
class InPrefix:
    """`-s` and `-d`. `network` has no bit outside `mask`."""

    side: Side
    network: int
    mask: int
    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The address is in the prefix."""
        address = packet.source if self.side is Side.SOURCE else packet.destination
        return (address & self.mask == self.network) != self.negated


@dataclass(frozen=True, slots=True)
class HasProtocol:
    """`-p`, by number."""

    number: int
    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The packet is of the protocol."""
        return (packet.protocol == self.number) != self.negated


@dataclass(frozen=True, slots=True)
class NotSimulated:
    """`-i`, `-o` and `-m multiport`, which others write: a rule with it can be read, and not be traced."""

    option: str

    def accepts(self, packet: PacketState) -> bool:
        """Raises UnknownRule."""
        raise UnknownRule(self.option, "no packet is traced past this option")


@dataclass(frozen=True, slots=True)
class PortIn:
    """`--sport` and `--dport`: a range, both ends included."""

    side: Side
    low: int
    high: int
    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The port is in the range. A packet without ports never matches, negated or not."""
        port = packet.source_port if self.side is Side.SOURCE else packet.port
        return port is not None and (self.low <= port <= self.high) != self.negated


@dataclass(frozen=True, slots=True)
class FirstSegment:
    """`--tcp-flags FIN,SYN,RST,ACK SYN`. Every traced TCP packet begins a flow."""

    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The packet is the first of a TCP flow."""
        return (packet.protocol == PROTOCOLS["tcp"]) != self.negated


@dataclass(frozen=True, slots=True)
class IcmpType:
    """`--icmp-type` and `--icmpv6-type`, any code."""

    number: int
    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The ICMP type is the named one."""
        return packet.icmp_type is not None and (packet.icmp_type == self.number) != self.negated


@dataclass(frozen=True, slots=True)
class IsLocal:
    """`-m addrtype --src-type LOCAL` and `--dst-type LOCAL`."""

    side: Side
    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The address is one of this host's."""
        address = packet.source if self.side is Side.SOURCE else packet.destination
        return packet.local_addresses.holds(address) != self.negated


@dataclass(frozen=True, slots=True)
class Marked:
    """`-m mark --mark` and, with `of_connection`, `-m connmark --mark`."""

    value: int
    mask: int
    of_connection: bool = False
    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The masked mark is the value."""
        mark = packet.connection_mark if self.of_connection else packet.mark
        return (mark & self.mask == self.value) != self.negated


@dataclass(frozen=True, slots=True)
class InState:
    """`-m conntrack --ctstate`: any of the states."""

    states: frozenset[str]
    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The flow is in one of the states. DNAT and SNAT are true besides NEW once an address was
        changed."""
        return bool(self.states & packet.states) != self.negated


@dataclass(frozen=True, slots=True)
class RecentlySeen:
    """`-m recent --rcheck`. Times are not modelled: a list contains the source or not."""

    list_name: str
    negated: bool = False

    def accepts(self, packet: PacketState) -> bool:
        """The list contains the packet's source."""
        return (self.list_name in packet.recent) != self.negated


@dataclass(frozen=True, slots=True)
class Remember:
    """`-m recent --set`: always matches, and adds the source to the list."""

    list_name: str

    def accepts(self, packet: PacketState) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True)
class AtRandom:
    """`-m statistic`, at random or in turn. It forks the trace, so by itself it accepts."""

    probability: float
    """0..1, at random in the kernel's steps of 1/2^31: saved and restored text agree (contract 1.8)."""

    def accepts(self, packet: PacketState) -> bool:
        """Always; the rule's `probability` carries the weight."""
        return True


@dataclass(frozen=True, slots=True)
class OverLimit:
    """`-m hashlimit --hashlimit-above` and `-m connlimit --connlimit-above`. The kernel's counts are unknown
    here: the packet counts as within every limit."""

    kind: str

    def accepts(self, packet: PacketState) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class Always:
    """A match that only labels or counts: `-m comment`, `-m nfacct`."""

    kind: str
    text: str = ""

    def accepts(self, packet: PacketState) -> bool:
        """Always."""
        return True
