"""A packet on its way through the chains: what matches look at and targets change."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from vipd.model import Family, socket_text
from vipd.observe.tracer.trace import Arrival, Host, Packet, Step

PROTOCOLS = {"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "ipv6-icmp": 58, "sctp": 132}
"""Names that a rule may use instead of an IANA protocol number."""

_ECHO_REQUEST = {Family.IPV4: 8, Family.IPV6: 128}


@dataclass(frozen=True, slots=True)
class Locality:
    """Which addresses, as integers, are this host's own."""

    family: Family
    own: frozenset[int]
    primary: int | None
    """The first own address that is not loopback: what the kernel picks when it must pick one."""

    @classmethod
    def of(cls, host: Host, family: Family) -> Locality:
        """The host's addresses of one family."""
        parsed = [ip_address(a) for a in host.addresses]
        wanted = [a for a in parsed if a.version == family]
        primary = next((int(a) for a in wanted if not a.is_loopback), None)
        return cls(family, frozenset(map(int, wanted)), primary)

    @property
    def loopback(self) -> int:
        """127.0.0.1 or ::1."""
        return 0x7F000001 if self.family is Family.IPV4 else 1

    def holds(self, address: int) -> bool:
        """The address is the host's own; all of 127.0.0.0/8 is."""
        if self.family is Family.IPV4 and address >> 24 == 127:
            return True
        return address == self.loopback or address in self.own

    def text(self, address: int) -> str:
        """Canonical text of an address."""
        kind = "0.0.0.0" if self.family is Family.IPV4 else "::"  # noqa: S104 - names a family, binds nothing
        return str(ip_address(kind) + address)


@dataclass(frozen=True, slots=True)
class Path:
    """The steps so far, newest first, so that branches share what they have in common."""

    step: Step
    before: Path | None

    def steps(self) -> tuple[Step, ...]:
        """Oldest first."""
        found = []
        path: Path | None = self
        while path is not None:
            found.append(path.step)
            path = path.before
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Passing:
    """The packet at one moment of one branch. Addresses and the protocol are numbers."""

    locality: Locality
    source: int
    destination: int
    protocol: int
    source_port: int | None
    port: int | None
    icmp_type: int | None
    recent: frozenset[str]
    """Lists that hold the packet's source."""
    from_here: bool
    """A process of this host sent it."""
    in_interface: str = ""
    out_interface: str = ""
    mark: int = 0
    connection_mark: int = 0
    states: frozenset[str] = frozenset({"NEW"})
    backend: str | None = None
    masqueraded: bool = False
    probability: float = 1.0
    path: Path | None = None

    @classmethod
    def first(cls, packet: Packet, host: Host) -> Passing:
        """The packet before any rule."""
        icmp = _ECHO_REQUEST[packet.family] if packet.icmp_type is None else packet.icmp_type
        return cls(
            locality=Locality.of(host, packet.family),
            source=int(ip_address(packet.source)),
            destination=int(ip_address(packet.destination)),
            protocol=PROTOCOLS[packet.protocol],
            source_port=None if packet.port is None else packet.source_port,
            port=packet.port,
            icmp_type=icmp if packet.port is None else None,
            recent=host.pinned,
            from_here=packet.arriving is Arrival.LOCAL,
        )

    @property
    def for_this_host(self) -> bool:
        """Its destination is local now."""
        return self.locality.holds(self.destination)

    def socket(self, address: int, port: int | None) -> str:
        """`ip:port`, or the bare address when there is no port."""
        text = self.locality.text(address)
        return text if port is None else socket_text(text, port)
