"""The input of a simulation: packets and hosts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

from vipd.model.service import Family, family_of

WITH_PORTS = frozenset({"tcp", "udp", "sctp"})
WITHOUT_PORTS = frozenset({"icmp", "icmpv6"})


class Arrival(StrEnum):
    """How a packet reaches the rules."""

    FORWARDED = "forwarded"
    """By an interface: nat PREROUTING first, even if its destination is this host."""
    LOCAL = "local"
    """From a process of this host: nat OUTPUT first."""


@dataclass(frozen=True, slots=True)
class Packet:
    """The first packet of a new flow.

    Raises:
        ValueError: an address cannot be read, the families differ, the protocol is none of tcp, udp, sctp,
            icmp and icmpv6, or a port is missing or out of range.
    """

    source: str
    destination: str
    protocol: str
    port: int | None = None
    """Destination port; None for ICMP."""
    source_port: int = 40000
    arriving: Arrival = Arrival.FORWARDED

    def __post_init__(self) -> None:
        if ip_address(self.source).version != ip_address(self.destination).version:
            raise ValueError(f"{self.source} and {self.destination} are of different families")
        if self.protocol not in WITH_PORTS | WITHOUT_PORTS:
            raise ValueError(f"protocol {self.protocol!r} is none of tcp, udp, sctp, icmp, icmpv6")
        if (self.protocol in WITH_PORTS) != (self.port is not None):
            raise ValueError(f"{self.protocol} packet with port {self.port}")
        ports = (self.source_port, self.source_port if self.port is None else self.port)
        if not all(1 <= port <= 65535 for port in ports):
            raise ValueError(f"port {self.port} or source port {self.source_port} is not within 1..65535")

    @property
    def family(self) -> Family:
        """The family of both addresses."""
        return family_of(self.destination)


@dataclass(frozen=True, slots=True)
class Host:
    """Everything besides the packet that rules match on: this host's addresses, and entries of session
    affinity.

    127.0.0.0/8 and ::1 are always its own. `affinity_lists` names the recent lists (iptables) that contain
    the packet's source and have not expired; nftables has such entries in its maps.
    """

    addresses: tuple[str, ...] = ()
    affinity_lists: frozenset[str] = frozenset()
