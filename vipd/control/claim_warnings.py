"""Warns of claims that others on this host or in its networks hold: a line for each service. Pure.

The cost depends on the number of findings, not of services: facts are looked up among the claims.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from vipd.host.facts import HostFacts, LocalSocket, Subnet, address_number
from vipd.model.forwarding import Forwarding
from vipd.model.service import AnnounceMethod, Family, Protocol, Service, family_of, socket_text

T = TypeVar("T")

MAX_LINES = 10
NAMED = 3
"""Addresses that a line names."""
NEIGHBOUR_LIVE_SECONDS = 600.0
"""A neighbour counts as live this long after it was last known: the kernel deletes and relearns its entry."""

_KNOWN = "%s; hint: choose an address that no host has"
_LIVE = "another host has it (%s) and loses what passes here; hint: choose an address that no host has"
_OWN = (
    "an address of this host itself: at ports that no service has, its own programs answer; hint: ip address"
    " del %s, or give the service another address"
)
_CONNECTED = (
    "lies in %s, where hosts ask for it by %s, which vipd does not answer; hint: choose an address outside of"
    " this host's networks; one for clients in that network belongs under external_addresses"
)


_ALONE = {family: frozenset({family}) for family in Family}


class PortClaim(NamedTuple):
    """The claims of a service port in its families."""

    service: str
    inside: tuple[str, ...]
    """Its `address`es."""
    outside: tuple[str, ...]
    """Its external addresses."""
    protocol: Protocol
    port: int
    node_port: int | None
    families: frozenset[Family]
    shared: tuple[str, ...] = ()
    """Its addresses for which one host of the fleet at a time answers on their LAN."""
    announced: tuple[str, ...] = ()
    """Its addresses that vipd announces beyond this host, by any method."""

    @classmethod
    def of(cls, forwarding: Forwarding) -> PortClaim:
        """The claim of one family."""
        key = forwarding.key
        outside = tuple(each.address for each in forwarding.external_addresses)
        port, families = forwarding.port, _ALONE[key.family]
        announcement, announced = forwarding.announcement, forwarding.announced_addresses()
        return cls(
            key.service,
            forwarding.addresses,
            outside,
            key.protocol,
            port,
            forwarding.node_port,
            families,
            announced if announcement and announcement.by is AnnounceMethod.L2 else (),
            announced if announcement else (),
        )


def claims_of(service: Service) -> Iterator[PortClaim]:
    """A claim for each port of a service."""
    outside = tuple(each.address for each in service.external_addresses)
    families = frozenset(map(family_of, service.all_addresses()))
    announcement, announced = service.announcement, service.announced_addresses()
    for port in service.ports:
        yield PortClaim(
            service.name,
            service.addresses,
            outside,
            port.protocol,
            port.port,
            port.node_port,
            families or frozenset(Family),
            announced if announcement and announcement.by is AnnounceMethod.L2 else (),
            announced if announcement else (),
        )


class Finding(NamedTuple):
    """Something to be reported of one service's claim."""

    service: str
    text: str
    address: str = ""


class ClaimIndex:
    """All current claims, indexed by address and by node port."""

    def __init__(self) -> None:
        self._known: dict[Hashable, PortClaim] = {}
        self._addresses: dict[str, dict[Hashable, bool]] = {}
        """The claimants of an address, and whether each claims it for inside."""
        self._node_ports: dict[tuple[Protocol, int], dict[Hashable, None]] = {}
        self._subnets: tuple[Subnet, ...] = ()
        self._connected: dict[str, str] = {}
        """Addresses within subnets, each with its subnet."""
        self._live: dict[str, tuple[str, float]] = {}
        """Addresses that a neighbour has, each with where, and until when that counts."""
        self.assigned = frozenset[str]()
        """Addresses that this host has on a device, and should not, as of the last `warnings`."""

    def put(self, key: Hashable, claim: PortClaim | None) -> None:
        """Set the claim of a key; None removes it."""
        if (before := self._known.pop(key, None)) is not None:
            self._leave(key, before)
        if claim is not None:
            self._known[key] = claim
            self._enter(key, claim)

    def _enter(self, key: Hashable, claim: PortClaim) -> None:
        for address in (*claim.outside, *claim.inside):
            self._addresses.setdefault(address, {})[key] = address in claim.inside
            self._connect(address)
        if claim.node_port:
            self._node_ports.setdefault((claim.protocol, claim.node_port), {})[key] = None

    def _leave(self, key: Hashable, claim: PortClaim) -> None:
        for address in (*claim.outside, *claim.inside):
            claimants = self._addresses.get(address, {})
            claimants.pop(key, None)
            if not claimants:
                for index in (self._addresses, self._connected, self._live):
                    index.pop(address, None)
        if claim.node_port:
            self._node_ports[claim.protocol, claim.node_port].pop(key)

    def _connect(self, address: str) -> None:
        version, number = family_of(address).value, address_number(address)
        subnet = next((each.text for each in self._subnets if each.contains(version, number)), "")
        if subnet:
            self._connected[address] = subnet

    def warnings(self, facts: HostFacts, now: float) -> tuple[str, ...]:
        """A line for each service and fault, in order: at most MOST_LINES, and one that counts the rest.
        `now` is from any monotonic clock."""
        if facts.subnets != self._subnets:
            self._subnets, self._connected = facts.subnets, {}
            for address in self._addresses:
                self._connect(address)
        for address in _both(facts.neighbours, self._addresses):
            self._live[address] = facts.neighbours[address], now + NEIGHBOUR_LIVE_SECONDS
        self._live = {address: held for address, held in self._live.items() if held[1] > now}
        assigned = list(self._of_assigned(facts))
        self.assigned = frozenset(finding.address for finding in assigned)
        return _lines(
            {
                *self._of_addresses(facts),
                *assigned,
                *self._of_node_ports(facts),
                *self._of_own_ports(facts),
            }
        )

    def _of_assigned(self, facts: HostFacts) -> Iterator[Finding]:
        for address, where in self._here(facts.assigned_addresses):
            for key, inside in self._addresses[address].items():
                claim = self._known[key]
                # keepalived gives external addresses that vipd does not announce to one host at a time.
                if inside or address in claim.announced or not facts.vrrp:
                    yield Finding(claim.service, _OWN % where, address)

    def _of_addresses(self, facts: HostFacts) -> Iterator[Finding]:
        """The findings about addresses: the most important one for each."""
        told = {
            **{
                each: _CONNECTED % (subnet, _asked(each))
                for each, subnet in self._connected.items()
                if each not in facts.proxied_addresses
            },
            **{each: _LIVE % where for each, (where, _) in self._live.items()},
            **{each: _KNOWN % f"a gateway of this host, on {on}" for each, on in self._here(facts.gateways)},
            **{each: _KNOWN % what for each, what in self._here(facts.reserved_addresses)},
            **{each: "; hint: ".join(words) for each, words in self._here(facts.dependencies)},
        }
        for address, text in told.items():
            # An external address may be in a connected subnet if a host answers for it, as with keepalived.
            only_inside = text.startswith(_CONNECTED[:8])
            # Another host of the fleet may answer for it; the one that answers looks for others itself.
            of_lan = only_inside or text.startswith(_LIVE[:8])
            for key, inside in self._addresses[address].items():
                if of_lan and address in self._known[key].shared:
                    continue
                if address not in facts.own_addresses and (inside or not only_inside):
                    yield Finding(self._known[key].service, text, address)

    def _here(self, known: Mapping[str, T]) -> Iterator[tuple[str, T]]:
        return ((address, known[address]) for address in _both(known, self._addresses))

    def _of_node_ports(self, facts: HostFacts) -> Iterator[Finding]:
        for socket in facts.sockets:
            for key in self._node_ports.get((socket.protocol, socket.port), ()):
                claim = self._known[key]
                if not facts.intercepted_families(socket).isdisjoint(claim.families):
                    yield Finding(claim.service, _held(f"node port {socket.port}/{socket.protocol}", socket))

    def _of_own_ports(self, facts: HostFacts) -> Iterator[Finding]:
        """This host may itself have a service's address: with `compat: kube-proxy`, or by keepalived."""
        own = list(_both(facts.own_addresses, self._addresses))
        for socket in facts.sockets if own else ():
            for address in filter(socket.accepts, own):
                for key in self._addresses[address]:
                    claim = self._known[key]
                    if (claim.protocol, claim.port) == (socket.protocol, socket.port):
                        place = f"{socket_text(address, socket.port)}/{socket.protocol}"
                        yield Finding(claim.service, _held(place, socket))


def warnings_of(services: Iterable[Service], facts: HostFacts) -> tuple[str, ...]:
    """The warnings for these services alone."""
    claims = ClaimIndex()
    for service in services:
        for number, claim in enumerate(claims_of(service)):
            claims.put((service.name, number), claim)
    return claims.warnings(facts, 0.0)


def _both(one: Collection[str], other: Collection[str]) -> Iterator[str]:
    """Elements in both; iterates over the smaller one."""
    small, large = (one, other) if len(one) < len(other) else (other, one)
    return (each for each in small if each in large)


def _asked(address: str) -> str:
    return "neighbour discovery" if family_of(address) is Family.IPV6 else "ARP"


def _held(place: str, socket: LocalSocket) -> str:
    if socket.protected:
        return f"{place} is the port of {socket.owner}; hint: choose another port"
    who = socket.owner or "a program"
    lost = "and gets no connections any more"
    return f"{place} is in use: {who} listens here, {lost}; hint: {socket.show_command} shows who"


def _lines(findings: Collection[Finding]) -> tuple[str, ...]:
    """A line for all addresses for which a service gets the same warning."""
    grouped = dict[tuple[str, str], list[str]]()
    for finding in sorted(findings):
        grouped.setdefault((finding.service, finding.text), []).append(finding.address)
    lines = [f"service {name}: {_named(found)}{text}" for (name, text), found in grouped.items()]
    more = len(lines) - MAX_LINES
    rest = [f"and {more} more such warnings of what services claim"] if more > 0 else []
    return (*lines[:MAX_LINES], *rest)


def _named(addresses: list[str]) -> str:
    more = len(addresses) - NAMED
    return (
        ", ".join(filter(None, addresses[:NAMED]))
        + (f" and {more} more" if more > 0 else "")
        + (": " if addresses[0] else "")
    )
