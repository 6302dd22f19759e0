"""Parses a packet's addresses and ports from its headers; and describes the flow to trace. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

from vipd.model.service import Family, Protocol, family_of, socket_text

PROTOCOL_NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132}
_PROTOCOLS = {number: protocol for protocol, number in PROTOCOL_NUMBERS.items()}
_IPV6_HEADER = 40


class Headers(NamedTuple):
    """Addresses and ports of a packet at one point of its trace."""

    source: str
    source_port: int
    destination: str
    port: int
    protocol: Protocol

    @property
    def sender(self) -> str:
        """`ip:port`."""
        return socket_text(self.source, self.source_port)

    @property
    def receiver(self) -> str:
        """`ip:port`."""
        return socket_text(self.destination, self.port)

    def __str__(self) -> str:
        return f"{self.sender} -> {self.receiver}/{self.protocol}"


@dataclass(frozen=True, slots=True)
class Flow:
    """Which packets to trace: those to a destination, from anywhere or from one source."""

    destination: str
    port: int
    protocol: Protocol
    source: str = ""
    """Empty: from anywhere."""
    source_port: int = 0
    """0: from any port."""
    from_here: bool = False
    """Only packets from programs of this host."""

    @property
    def family(self) -> Family:
        """The family of its addresses."""
        return family_of(self.destination)

    def __str__(self) -> str:
        source = "this host" if self.from_here else "anywhere"
        if self.source:
            source = socket_text(self.source, self.source_port) if self.source_port else self.source
        return f"{source} -> {socket_text(self.destination, self.port)}/{self.protocol}"


def read_headers(network: bytes, transport: bytes) -> Headers | None:
    """Addresses and ports from the start of both headers; None for a packet without ports.

    With IPv6 only the first header is read: a packet with extension headers counts as one without ports.
    """
    version = network[0] >> 4 if network else 0
    if version == 4 and len(network) >= 20:
        number, source, destination = network[9], network[12:16], network[16:20]
    elif version == 6 and len(network) >= _IPV6_HEADER:
        number, source, destination = network[6], network[8:24], network[24:40]
    else:
        return None
    protocol = _PROTOCOLS.get(number)
    if protocol is None or len(transport) < 4:
        return None
    return Headers(
        str(ip_address(source)),
        int.from_bytes(transport[:2], "big"),
        str(ip_address(destination)),
        int.from_bytes(transport[2:4], "big"),
        protocol,
    )
