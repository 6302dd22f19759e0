"""Facts about this host's network: what services must not claim, or should not. Pure.

A service that claims the address of a live host intercepts every packet for it that passes this host;
one that claims a port of a local listener intercepts its packets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import NamedTuple

from vipd.model.service import Family, Protocol, Service, family_of, socket_text

ANY_IPV4, ANY_IPV6 = "0.0.0.0", "::"  # noqa: S104 (compared, not bound)

_NOBODYS = "choose an address that no host has"


class Subnet(NamedTuple):
    """A network of a device of this host, so that other hosts in it may be live."""

    version: int
    network: int
    length: int
    text: str
    """`10.0.0.0/24 on eth0`."""

    def contains(self, address: str) -> bool:
        """Whether it contains an address."""
        parsed = ip_address(address)
        return parsed.version == self.version and (
            int(parsed) >> (parsed.max_prefixlen - self.length) == self.network
        )


class LocalSocket(NamedTuple):
    """A socket of this host that takes new flows."""

    protocol: Protocol
    address: str
    """`0.0.0.0` for all of IPv4; `::` for all of IPv6, and perhaps of IPv4."""
    port: int
    owner: str = ""
    """Its owner, as part of a sentence; empty if unknown."""
    protected: bool = False
    """No service may claim its port."""

    @property
    def show_command(self) -> str:
        """The command that shows its owner."""
        return "ss -ltnp" if self.protocol is Protocol.TCP else "ss -lunp"

    def accepts(self, address: str) -> bool:
        """Whether flows to an address of this host end at it."""
        return self.address in (address, ANY_IPV6, ANY_IPV4 if family_of(address) is Family.IPV4 else "")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """State at one poll. Two are equal if they refuse the same; facts that cause only warnings do not
    count."""

    gateways: Mapping[str, str] = field(default_factory=dict)
    """The next hops of this host's routes, each with its device."""
    reserved_addresses: Mapping[str, str] = field(default_factory=dict)
    """Network and broadcast addresses of connected subnets, each with a description: `the broadcast address
    of 10.0.0.0/24 on eth0`."""
    protected_sockets: tuple[LocalSocket, ...] = ()
    """Sockets whose ports no service may claim."""
    node_port_addresses: Mapping[Family, frozenset[str] | None] = field(default_factory=dict)
    """This host's addresses that answer on node ports; None, or no entry: all."""
    on_localhost: bool = False
    """Node ports match 127.0.0.0/8, too."""
    subnets: tuple[Subnet, ...] = field(default=(), compare=False)
    neighbours: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Addresses that other hosts answer for, each with where: `02:00:00:00:00:01 on eth0`."""
    sockets: tuple[LocalSocket, ...] = field(default=(), compare=False)
    """All sockets, guarded ones included."""
    own_addresses: frozenset[str] = field(default=frozenset(), compare=False)
    proxied_addresses: frozenset[str] = field(default=frozenset(), compare=False)
    """Addresses for which this host answers its neighbours though it does not have them."""
    _by_port: dict[tuple[Protocol, int], list[LocalSocket]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Sockets by the port that a node port would claim, the guarded ones first."""

    def __post_init__(self) -> None:
        for socket in dict.fromkeys((*self.protected_sockets, *self.sockets)):
            self._by_port.setdefault((socket.protocol, socket.port), []).append(socket)

    def with_session_protected(self, address: str, port: int) -> HostFacts:
        """The same facts, with the socket of the requester's session guarded."""
        session = LocalSocket(Protocol.TCP, address, port, "your own session", protected=True)
        return replace(self, protected_sockets=(session, *self.protected_sockets))

    def without_addresses(self) -> HostFacts:
        """For a host where any address may be claimed, and any port except the guarded ones."""
        return replace(self, gateways={}, reserved_addresses={}, sockets=())

    def violations(self, service: Service) -> Iterator[tuple[str, str]]:
        """The claims that a service must not make here, each with a hint."""
        for address in service.all_addresses():
            if address in self.gateways:
                what = f"{service.name}: {address} is a gateway of this host, on {self.gateways[address]}"
                yield what, f"{_NOBODYS}: what this host sends by way of the gateway needs it"
            elif address in self.reserved_addresses:
                yield f"{service.name}: {address} is {self.reserved_addresses[address]}", _NOBODYS
        for place, found in self._port_conflicts(service) if self.protected_sockets or self.sockets else ():
            if found.protected:
                what = f"{service.name}: {place} is the port of {found.owner}"
                yield what, "choose another: backends would get its new connections"
            else:
                what = f"{service.name}: {place} is in use: {found.owner or 'a program'} listens here"
                yield (
                    what,
                    f"choose another: backends would get its new connections; {found.show_command} shows who",
                )

    def _port_conflicts(self, service: Service) -> Iterator[tuple[str, LocalSocket]]:
        """The ports of sockets that a service claims: node ports; and of guarded ones its health port, and
        ports of this host's own addresses. A socket of all addresses keeps the others."""
        addresses = service.all_addresses()
        families = {family_of(address) for address in addresses} or set(Family)
        for port in service.ports:
            found = (
                self.conflicting_socket(port.protocol, port.node_port, families) if port.node_port else None
            )
            if found is not None:
                yield f"node port {port.node_port}/{port.protocol}", found
            places = {
                (port.protocol, address, port.port) for address in self.own_addresses.intersection(addresses)
            }
            for found in (each for each in self.protected_sockets if each[:3] in places):
                yield f"{socket_text(found.address, found.port)}/{found.protocol}", found
        found = (
            self.conflicting_socket(Protocol.TCP, service.health_port, set(Family))
            if service.health_port
            else None
        )
        if found is not None and found.protected:
            yield f"health port {service.health_port}/{Protocol.TCP}", found

    def conflicting_socket(
        self, protocol: Protocol, node_port: int, families: Collection[Family]
    ) -> LocalSocket | None:
        """The socket whose connections a node port would take, if any; preferably a guarded one."""
        sockets = self._by_port.get((protocol, node_port), ())
        return next((each for each in sockets if not self.node_families(each).isdisjoint(families)), None)

    @property
    def bound_ports(self) -> Collection[tuple[Protocol, int]]:
        """The ports that sockets have."""
        return self._by_port.keys()

    def node_families(self, found: LocalSocket) -> frozenset[Family]:
        """The families in which a node port of its number takes the flows of a socket."""
        if found.address == ANY_IPV6:
            return frozenset(
                family for family in Family if self.node_port_addresses.get(family) != frozenset()
            )
        family = family_of(found.address)
        answering = self.node_port_addresses.get(family)
        if found.address == ANY_IPV4:
            taken = answering != frozenset()
        elif ip_address(found.address).is_loopback:
            taken = self.on_localhost and family is Family.IPV4
        else:
            taken = answering is None or found.address in answering
        return frozenset({family} if taken else ())


NO_FACTS = HostFacts()
"""The facts of an unknown host."""
