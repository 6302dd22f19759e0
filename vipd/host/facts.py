"""Facts about this host's network: addresses and ports that services must not, or should not, claim. Pure.

A service that claims the address of a live host intercepts all packets to that address that pass this host.
A service that claims the port of a local listener intercepts the listener's packets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import NamedTuple

from vipd.host.netlink import address_bytes
from vipd.model.service import Family, Protocol, Service, family_of, socket_text

ANY_IPV4, ANY_IPV6 = "0.0.0.0", "::"  # noqa: S104 (compared, not bound)

_UNUSED_ADDRESS_HINT = "choose an address that no host has"

_FIRST_ORDINARY_USER, _NOBODY = 1000, 65534
"""Accounts of people have numbers from here on (adduser(8)); `nobody` stands for daemons."""


ADDRESS_BITS = {4: 32, 6: 128}


def address_number(address: str) -> int:
    """The number of a canonical address. Much faster than by `ipaddress`."""
    return int.from_bytes(address_bytes(address), "big")


class Subnet(NamedTuple):
    """A subnet of one of this host's devices: its other addresses may belong to live hosts."""

    version: int
    network: int
    length: int
    text: str
    """`10.0.0.0/24 on eth0`."""

    def contains(self, version: int, number: int) -> bool:
        """Whether the subnet contains the address of this number."""
        return version == self.version and number >> (ADDRESS_BITS[version] - self.length) == self.network


class LocalSocket(NamedTuple):
    """A socket on this host that accepts new flows."""

    protocol: Protocol
    address: str
    """`0.0.0.0`: all IPv4 addresses. `::`: all IPv6 addresses, and maybe all IPv4 addresses."""
    port: int
    owner: str = ""
    """Its owner, as a phrase for messages; empty if unknown."""
    protected: bool = False
    """Whether no service may claim its port."""
    user: int = 0
    """The number of the user that opened it."""

    @property
    def reserves_port(self) -> bool:
        """Whether a service may not newly claim its port. Anybody may listen on a high port, and must not
        keep services from it: a socket of an ordinary user causes a warning."""
        return self.protected or self.user < _FIRST_ORDINARY_USER or self.user == _NOBODY

    @property
    def show_command(self) -> str:
        """The command that shows the socket's owner."""
        return "ss -ltnp" if self.protocol is Protocol.TCP else "ss -lunp"

    def accepts(self, address: str) -> bool:
        """Whether the socket receives flows to this address of this host."""
        return self.address in (address, ANY_IPV6, ANY_IPV4 if family_of(address) is Family.IPV4 else "")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The state of this host's network at one poll. Two states are equal if they refuse the same claims:
    facts that cause only warnings are not compared."""

    gateways: Mapping[str, str] = field(default_factory=dict)
    """The next hops of this host's routes, each with its device."""
    reserved_addresses: Mapping[str, str] = field(default_factory=dict)
    """Network and broadcast addresses of connected subnets, each with a description: `the broadcast address
    of 10.0.0.0/24 on eth0`."""
    protected_sockets: tuple[LocalSocket, ...] = ()
    """Sockets whose ports no service may claim."""
    etcd_servers: frozenset[str] = frozenset()
    """The addresses that the settings name as etcd's, by which services reach this host. Whoever claims one
    cuts it off for good."""
    etcd_sockets: tuple[LocalSocket, ...] = ()
    """The same for an etcd on this host: among the protected ones."""
    dependencies: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Other addresses that vipd itself sends to, each with what it is, and a hint: name servers, and those
    that etcd has by a name."""
    node_port_addresses: Mapping[Family, frozenset[str] | None] = field(default_factory=dict)
    """The addresses of this host on which node ports are served; None, or no entry: all."""
    localhost_node_ports: bool = False
    """Whether node ports are also served on 127.0.0.0/8."""
    subnets: tuple[Subnet, ...] = field(default=(), compare=False)
    neighbours: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Addresses of other hosts that answered, each with the place: `02:00:00:00:00:01 on eth0`."""
    sockets: tuple[LocalSocket, ...] = field(default=(), compare=False)
    """All sockets, including protected ones."""
    own_addresses: frozenset[str] = field(default=frozenset(), compare=False)
    assigned_addresses: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Addresses on devices that no service should have -> how `ip address` names them: `10.0.0.1/24 dev
    eth0`. Empty with `compat: kube-proxy`, where services may have them."""
    vrrp: bool = field(default=False, compare=False)
    """keepalived runs: it may give this host services' external addresses (docs/announce.md)."""
    proxied_addresses: frozenset[str] = field(default=frozenset(), compare=False)
    """Addresses that this host does not have, but for which it answers its neighbours (proxy ARP, NDP)."""
    _by_port: dict[tuple[Protocol, int], list[LocalSocket]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Sockets by protocol and port, protected ones first."""

    def __post_init__(self) -> None:
        for socket in dict.fromkeys((*self.protected_sockets, *self.sockets)):
            self._by_port.setdefault((socket.protocol, socket.port), []).append(socket)

    def with_session_protected(self, address: str, port: int) -> HostFacts:
        """The same facts, and the socket of the requester's own login session as a protected one."""
        session = LocalSocket(Protocol.TCP, address, port, "your own session", protected=True)
        return replace(self, protected_sockets=(session, *self.protected_sockets))

    def without_addresses(self) -> HostFacts:
        """The facts for a host where services may claim any address but etcd's, and any port except protected
        ones."""
        return replace(self, gateways={}, dependencies={}, reserved_addresses={}, sockets=())

    def of_settings(self) -> HostFacts:
        """The facts that follow from the settings: where etcd is. They hold for accepted services, too."""
        return HostFacts(
            etcd_servers=self.etcd_servers,
            protected_sockets=self.etcd_sockets,
            node_port_addresses=self.node_port_addresses,
        )

    def violations(self, service: Service, serving: Service | None = None) -> Iterator[tuple[str, str]]:
        """The claims of a service that this host refuses, each with a hint. What `serving`, its version in
        use, claims already is not judged again, except etcd's addresses: the host may have changed since."""
        claimed = frozenset(serving.all_addresses()) if serving else frozenset[str]()
        for address in service.all_addresses():
            if refusal := self.address_refusal(address, claimed):
                yield f"{service.name}: {refusal[0]}", refusal[1]
        if self._by_port:
            yield from self._port_violations(service, serving)

    def _port_violations(self, service: Service, serving: Service | None) -> Iterator[tuple[str, str]]:
        known = {claim for claim, _ in self._port_conflicts(serving)} if serving else set[str]()
        for claim, found in self._port_conflicts(service):
            if claim in known or not found.reserves_port:
                continue
            hint = "choose another: backends would get its new connections"
            if found.protected:
                yield f"{service.name}: {claim} is the port of {found.owner}", hint
            else:
                what = f"{service.name}: {claim} is in use: {found.owner or 'a program'} listens here"
                yield what, f"{hint}; {found.show_command} shows who"

    def address_refusal(self, address: str, claimed: Collection[str]) -> tuple[str, str] | None:
        """Why no service may have an address, with a hint; None if one may. `claimed`: addresses that the
        service has already."""
        if address in self.etcd_servers:
            what = f"{address} is an address of etcd, which feeds this host"
            return what, f"{_UNUSED_ADDRESS_HINT}: vipd would not reach etcd any more"
        if address in claimed:
            return None
        if address in self.dependencies:
            what, hint = self.dependencies[address]
            return f"{address} is {what}", hint
        if address in self.gateways:
            what = f"{address} is a gateway of this host, on {self.gateways[address]}"
            return what, f"{_UNUSED_ADDRESS_HINT}: what this host sends by way of the gateway needs it"
        if address in self.reserved_addresses:
            return f"{address} is {self.reserved_addresses[address]}", _UNUSED_ADDRESS_HINT
        return None

    @property
    def roles(self) -> tuple[object, ...]:
        """What `role_of` goes by: equal if it returns the same."""
        return (
            self.own_addresses,
            self.gateways,
            self.etcd_servers,
            self.dependencies,
            self.reserved_addresses,
        )

    def role_of(self, address: str) -> str:
        """What an address is to this host, as a phrase; empty: nothing."""
        if address in self.own_addresses:
            return "an address of this host itself"
        if address in self.gateways:
            return "a gateway of this host"
        if address in self.etcd_servers:
            return "an address of etcd, which feeds this host"
        if address in self.dependencies:
            return self.dependencies[address][0]
        return self.reserved_addresses.get(address, "")

    def _port_conflicts(self, service: Service) -> Iterator[tuple[str, LocalSocket]]:
        """The sockets whose ports a service claims, each with the claim.

        A node port conflicts with any socket. The health port conflicts only with a protected socket, and so
        does a port at one of this host's own addresses. The latter does not conflict with a socket that is
        bound to all addresses, because that socket keeps its port at the other addresses.
        """
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
        """The socket whose connections a node port would intercept, if any; one that reserves it first."""
        sockets = self._by_port.get((protocol, node_port), ())
        taken = [each for each in sockets if not self.intercepted_families(each).isdisjoint(families)]
        return next((each for each in taken if each.reserves_port), taken[0] if taken else None)

    @property
    def bound_ports(self) -> Collection[tuple[Protocol, int]]:
        """The protocol and port of every socket."""
        return self._by_port.keys()

    def intercepted_families(self, found: LocalSocket) -> frozenset[Family]:
        """The families in which a node port with a socket's port number intercepts the socket's flows."""
        if found.address == ANY_IPV6:
            return frozenset(
                family for family in Family if self.node_port_addresses.get(family) != frozenset()
            )
        family = family_of(found.address)
        answering = self.node_port_addresses.get(family)
        if found.address == ANY_IPV4:
            taken = answering != frozenset()
        elif ip_address(found.address).is_loopback:
            taken = self.localhost_node_ports and family is Family.IPV4
        else:
            taken = answering is None or found.address in answering
        return frozenset({family} if taken else ())


NO_FACTS = HostFacts()
"""For a host of which nothing is known: refuses no claim."""
