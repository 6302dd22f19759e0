"""A packet between two rules: everything that rules match on and change, for both languages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from types import MappingProxyType
from typing import NamedTuple

from vipd.model.service import Family, socket_text
from vipd.observe.simulator.outcome import Step
from vipd.observe.simulator.packet import Arrival, Host, Packet

PROTOCOLS = {"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "ipv6-icmp": 58, "sctp": 132}
"""Names that a rule may use instead of an IANA protocol number."""

Key = tuple[int, ...]
SetUpdates = Mapping[tuple[str, Key], Key | None]
"""By set or map and key: the added value; None for a deleted element."""

_ECHO_REQUEST = {Family.IPV4: 8, Family.IPV6: 128}


@dataclass(frozen=True, slots=True)
class LocalAddresses:
    """This host's own addresses, as integers."""

    family: Family
    own: frozenset[int]
    primary: int | None
    """The first own address that is not loopback: the source after masquerading."""

    @classmethod
    def of(cls, host: Host, family: Family) -> LocalAddresses:
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
    """The steps so far, newest first, so that branches share their common part."""

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


class Manipulation(Enum):
    """The decisions of nat chains for a flow, each made once."""

    SOURCE = "source"
    DESTINATION = "destination"


class PacketState(NamedTuple):
    """The packet at one point of one branch. Addresses and the protocol are numbers.

    A tuple, because each rule on the way makes a new one: a frozen dataclass takes seven times as long.
    """

    local_addresses: LocalAddresses
    source: int
    destination: int
    protocol: int
    source_port: int | None
    port: int | None
    icmp_type: int | None
    original_source: int
    original_destination: int
    """Both as the client sent them: conntrack's view."""
    original_port: int | None
    recent: frozenset[str]
    """Recent lists that contain the packet's source."""
    from_here: bool
    """A process of this host sent it."""
    mark: int = 0
    connection_mark: int = 0
    states: frozenset[str] = frozenset({"NEW"})
    backend: str | None = None
    masqueraded: bool = False
    decided: frozenset[Manipulation] = frozenset()
    set_updates: SetUpdates = MappingProxyType({})
    """Elements that rules added to dynamic sets and maps, or deleted, for this packet."""
    probability: float = 1.0
    path: Path | None = None

    @classmethod
    def first(cls, packet: Packet, host: Host) -> PacketState:
        """The packet before any rule."""
        source, destination = int(ip_address(packet.source)), int(ip_address(packet.destination))
        return cls(
            local_addresses=LocalAddresses.of(host, packet.family),
            source=source,
            destination=destination,
            protocol=PROTOCOLS[packet.protocol],
            source_port=None if packet.port is None else packet.source_port,
            port=packet.port,
            icmp_type=_ECHO_REQUEST[packet.family] if packet.port is None else None,
            original_source=source,
            original_destination=destination,
            original_port=packet.port,
            recent=host.affinity_lists,
            from_here=packet.arriving is Arrival.LOCAL,
        )

    @property
    def for_this_host(self) -> bool:
        """Its destination is one of this host's addresses now."""
        return self.local_addresses.holds(self.destination)

    @property
    def sent_to(self) -> str | None:
        """The backend that rules chose: by a translation, or by writing another destination."""
        if self.backend is not None or self.destination == self.original_destination:
            return self.backend
        return self.socket(self.destination, self.port)

    @property
    def has_new_source(self) -> bool:
        """It leaves with another source than the client's."""
        return self.masqueraded or self.source != self.original_source

    def socket(self, address: int, port: int | None) -> str:
        """`ip:port`, or the bare address when there is no port."""
        text = self.local_addresses.text(address)
        return text if port is None else socket_text(text, port)

    def with_step(self, step: Step) -> PacketState:
        """The same, one rule further."""
        return self._replace(path=Path(step, self.path))

    def less_likely(self, factor: float) -> PacketState:
        """The same in one of several branches, which has this part of the probability."""
        return self._replace(probability=self.probability * factor)

    def with_update(self, name: str, key: Key, value: Key | None) -> PacketState:
        """The same after an element was added to a set or map, or with None deleted."""
        return self._replace(set_updates={**self.set_updates, (name, key): value})

    def translated(self, address: int, port: int | None) -> PacketState:
        """The packet after DNAT. Without a port it keeps its own."""
        new_port = self.port if port is None or self.port is None else port
        # The kernel flags a flow as DNAT only when its tuple really changed (nf_nat_setup_info).
        changed = (address, new_port) != (self.destination, self.port)
        return self._replace(
            destination=address,
            port=new_port,
            backend=self.socket(address, new_port),
            states=self.states | {"DNAT"} if changed else self.states,
        )

    def redirected(self, port: int | None) -> PacketState:
        """The packet after REDIRECT: to loopback from a local process, else to the host's first address.

        The kernel uses the first address of the incoming interface, which the simulator does not know.
        """
        own = self.local_addresses
        here = own.loopback if self.from_here or own.primary is None else own.primary
        return self.translated(here, port)

    def masquerade(self) -> PacketState:
        """The packet after MASQUERADE, with this host's first address as its source.

        Later rules match it only if the flow stays on the host; for `lo` the kernel chooses that address.
        """
        primary = self.local_addresses.primary
        source = self.source if primary is None else primary
        return self._replace(source=source, masqueraded=True, states=self.states | {"SNAT"})
