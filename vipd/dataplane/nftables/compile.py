"""Compiles one forwarding to its elements and the chains that they lead to. Pure.

The decisions are kube-proxy's, contract sections 1.4 to 1.6, as in the iptables dataplane.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import NamedTuple

from vipd.dataplane.nftables.chains import Chain, Edge, Gate, Handlers, Limited, Masqueraded, Refuse, Reset
from vipd.dataplane.nftables.layout import (
    FRONTENDS,
    LOCAL_OFFSET,
    NODE_PORTS,
    Place,
    allowed,
    name_address,
    number_address,
)
from vipd.dataplane.nftables.maglev import lookup_table
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.spread import Spread
from vipd.dataplane.slots import interleaved, slot_counts, slots
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import Balance, ExternalAddress, Masquerade, Policy, Refusal, socket_text

Network = IPv4Network | IPv6Network

_NUMBER = re.compile(r"-[0-9]+(?=-|$)")

NUMBER_BITS = 23
"""Bits of an endpoint's number."""


class Slot(NamedTuple):
    """Identifies an element: its holder and its key."""

    holder: str
    key: str


@dataclass(slots=True)
class Fragment:
    """One forwarding's part of the table."""

    elements: dict[Slot, str] = field(default_factory=dict)
    """Its own elements: place -> value."""
    chains: dict[Chain, None] = field(default_factory=dict)
    """The chains that its elements lead to."""
    handlers: dict[str, str] = field(default_factory=dict)
    """Those of its frontends' elements: number -> chain."""
    lengths: set[int] = field(default_factory=set)
    """Prefix lengths of the networks that it is limited to."""
    pings: frozenset[str] = frozenset()
    """Its addresses, if they answer ping."""
    addresses: tuple[str, ...] = ()
    """Its addresses for clients inside."""
    hairpins: frozenset[str] = frozenset()
    """Addresses of endpoints that might be sent their own flows unmasqueraded."""

    def kinds(self) -> frozenset[str]:
        """What its chains look up: their names without numbers of slots.

        If these stay, a packet in the chains from before the change finds elements from after
        it."""
        words = {_NUMBER.sub("", chain.name) for chain in self.chains}
        return frozenset({*words, *map(str, self.lengths)})


def compile_forwarding(forwarding: Forwarding, options: TableOptions, handlers: Handlers) -> Fragment:
    """One forwarding's part of the table. Equal input gives equal elements."""
    return _Compilation(forwarding, options, handlers).run()


def first_chain(forwarding: Forwarding, options: TableOptions) -> str:
    """The chain that a forwarding's first frontend leads to. It costs little for any forwarding."""
    return _Compilation(forwarding, options, Handlers(options.family)).first()


def fill_tables(forwardings: Iterable[Forwarding]) -> None:
    """Fill the lookup tables that compilation uses: with many backends they take a second."""
    for forwarding in forwardings:
        for policy in (Policy.CLUSTER, Policy.LOCAL):
            if forwarding.endpoints_under(policy):
                _slots(forwarding, policy)


class _Compilation:
    """The work on one forwarding."""

    def __init__(self, forwarding: Forwarding, options: TableOptions, handlers: Handlers) -> None:
        self._f, self._options, self._handlers = forwarding, options, handlers
        self._found = Fragment()
        self._pinnable = {*forwarding.endpoints, *forwarding.local_endpoints, *forwarding.pinned}
        self._numbers: Mapping[tuple[str, int], int] = {}

    def first(self) -> str:
        """The name of the chain that the first frontend leads to; empty without one."""
        f = self._f
        if f.addresses:
            return self._internal().name
        if f.external_addresses:
            return self._entry(Place.ADDRESS).name
        return Gate(self._entry(Place.NODE)).name if f.node_port else ""

    def run(self) -> Fragment:
        f, found = self._f, self._found
        if f.ended:
            self._reset()
            return found
        self._numbers = _numbers(self._pinnable) if self._timeout() is not None else {}
        self._inside()
        for external in f.external_addresses:
            self._outside(external)
        if f.node_port:
            self._node_port(f.node_port)
        found.addresses = f.addresses
        reachable = f.reachable()
        if self._may_be_unmarked():
            found.hairpins = frozenset(endpoint.address for endpoint in reachable)
        if self._options.ping and f.answers_ping and reachable:
            found.pings = frozenset(f.addresses)
        return found

    def _may_be_unmarked(self) -> bool:
        """Whether a flow of an endpoint to itself can pass without the mark for masquerade: in the usual
        modes all forwarded flows have the mark, and on this host itself none is needed."""
        f = self._f
        outside = f.externally_accessible and f.external_policy is Policy.LOCAL
        return outside or f.masquerade in (Masquerade.HAIRPIN, Masquerade.OFF_CLUSTER)

    def _reset(self) -> None:
        for address in self._f.addresses:
            self._found.elements[Slot(FRONTENDS.name, self._frontend(address))] = self._handler(Reset())
        if self._f.node_port:
            chain = Reset(Place.NODE)
            self._found.chains[chain] = None
            frontend = f"{self._f.key.protocol} . {self._f.node_port}"
            self._found.elements[Slot(NODE_PORTS.name, frontend)] = f"jump {chain.name}"

    def _internal(self) -> Chain:
        """The chain for flows to an address of the service."""
        f = self._f
        if not f.endpoints_under(f.internal_policy):
            return self._refusal()
        spread = self._spread(Place.ADDRESS, f.internal_policy)
        # Every endpoint's flows to itself are masqueraded elsewhere.
        return spread if f.masquerade is Masquerade.HAIRPIN else Masqueraded(f.masquerade, spread)

    def _inside(self) -> None:
        f = self._f
        policy, chain = f.internal_policy, self._internal()
        for address in f.addresses:
            frontend = self._frontend(address)
            self._found.elements[Slot(FRONTENDS.name, frontend)] = self._handler(chain)
            self._fill(Place.ADDRESS, frontend, policy)

    def _outside(self, external: ExternalAddress) -> None:
        f, frontend = self._f, self._frontend(external.address)
        networks = _limits(external)
        chain = self._entry(Place.ADDRESS)
        if f.served and networks:
            own = (ip_network(external.address),) if f.allow_host else ()
            chain = self._limited((*networks, *own), frontend, chain)
        self._found.elements[Slot(FRONTENDS.name, frontend)] = self._handler(chain)
        if f.served:
            self._fill_outside(Place.ADDRESS, frontend)

    def _limited(self, networks: Collection[Network], frontend: str, onward: Chain) -> Limited:
        """The way into a chain for sources in these networks."""
        self._found.chains[onward] = None
        for network in networks:
            self._found.lengths.add(network.prefixlen)
            source = Slot(allowed(network.prefixlen).name, f"{network.network_address} . {frontend}")
            self._found.elements[source] = f"goto {onward.name}"
        return Limited(tuple(sorted({network.prefixlen for network in networks})))

    def _node_port(self, port: int) -> None:
        """Node ports are not subject to source ranges, as for kube-proxy (contract 1.4)."""
        frontend = f"{self._f.key.protocol} . {port}"
        gate = Gate(self._entry(Place.NODE))
        self._found.chains[gate] = None
        # Other packets return to the dispatch.
        self._found.elements[Slot(NODE_PORTS.name, frontend)] = f"jump {gate.name}"
        if self._f.served:
            self._fill_outside(Place.NODE, frontend)

    def _entry(self, place: Place) -> Chain:
        """The chain for traffic from outside, after the check of its source."""
        f = self._f
        if not f.served or not f.endpoints:
            return self._refusal()
        cluster = self._spread(place, Policy.CLUSTER)
        if f.external_policy is Policy.LOCAL:
            if not f.local_endpoints:
                return Edge(cluster, None, f.resets_flows)
            return Edge(cluster, self._spread(place, Policy.LOCAL))
        # The backend may be on another host, so replies must return through this host, unless the service
        # declares that they do; kube-proxy has no such option.
        if f.masquerade is not Masquerade.HAIRPIN or self._options.kube_proxy:
            return Masqueraded(Masquerade.ALWAYS, cluster)
        return Masqueraded(f.masquerade, cluster) if self._options.loopback_clients else cluster

    def _fill_outside(self, place: Place, frontend: str) -> None:
        self._fill(place, frontend, Policy.CLUSTER)
        if self._f.external_policy is Policy.LOCAL:
            self._fill(place, frontend, Policy.LOCAL)

    def _handler(self, chain: Chain) -> str:
        self._found.chains[chain] = None
        number = self._handlers.number(chain.name)
        self._found.handlers[number] = chain.name
        return number

    def _spread(self, place: Place, policy: Policy) -> Spread:
        f = self._f
        turns = f.balance is Balance.ROUND_ROBIN
        return Spread(
            len(_slots(f, policy)),
            f.balance,
            place,
            local=policy is Policy.LOCAL,
            timeout=self._timeout(),
            owner=_short(self._name()) if turns else "",
        )

    def _fill(self, place: Place, frontend: str, policy: Policy) -> None:
        """Add the slots of one frontend under one policy, and their endpoints."""
        endpoints, local = self._f.endpoints_under(policy), policy is Policy.LOCAL
        if not endpoints:
            return
        elements, offset = self._found.elements, LOCAL_OFFSET if local else 0
        family = self._options.family
        # A draining endpoint may keep its pinned clients: it has a number, and no slot.
        everyone = endpoints if local else (*endpoints, *self._f.pinned)
        texts = [f"{endpoint.address} . {endpoint.port}" for endpoint in everyone]
        holder = place.endpoints.name
        if self._timeout() is not None:
            elements[Slot(place.services.name, frontend)] = name_address(family, self._name())
            numbers = [number_address(family, self._numbers[endpoint[:2]]) for endpoint in everyone]
            for number, text in zip(numbers, texts, strict=True):
                elements[Slot(place.numbered(local).name, f"{frontend} . {number}")] = text
            holder, texts = place.picks.name, numbers
        for slot, index in enumerate(_slots(self._f, policy)):
            elements[Slot(holder, f"{frontend} . {number_address(family, slot + offset)}")] = texts[index]

    def _name(self) -> str:
        """Identifies the service port independently of its frontends."""
        return f"{self._f.key.service_port}/{self._f.key.protocol}"

    def _timeout(self) -> int | None:
        return self._f.affinity_timeout if self._options.affinity else None

    def _frontend(self, address: str) -> str:
        return f"{address} . {self._f.key.protocol} . {self._f.port}"

    def _refusal(self) -> Refuse:
        """If all endpoints are on other hosts, it drops: a client behind a load balancer then tries
        another."""
        silent = self._f.served or self._f.refusal is Refusal.DROP
        return Refuse(silent, resets=silent and self._f.resets_flows)


def _slots(forwarding: Forwarding, policy: Policy) -> tuple[int, ...]:
    """The index of the endpoint in each slot."""
    endpoints = forwarding.endpoints_under(policy)
    weights = tuple(endpoint.weight for endpoint in endpoints)
    if forwarding.balance is Balance.SOURCE_HASH:
        return lookup_table(tuple(str(endpoint) for endpoint in endpoints), weights)
    if forwarding.balance is Balance.ROUND_ROBIN:
        return interleaved(slot_counts(weights))
    return slots(weights)


def _numbers(endpoints: Collection[Endpoint]) -> dict[tuple[str, int], int]:
    """A number for each address and port, which does not depend on the others, except when two would have
    the same: then the second takes the next free one."""
    taken: dict[int, tuple[str, int]] = {}
    for place in sorted({endpoint[:2] for endpoint in endpoints}):
        digest = blake2b(socket_text(*place).encode(), digest_size=4).digest()
        number = int.from_bytes(digest, "big") >> (32 - NUMBER_BITS)
        while number in taken:
            number = (number + 1) % (1 << NUMBER_BITS)
        taken[number] = place
    return {place: number for number, place in taken.items()}


def _limits(external: ExternalAddress) -> list[Network]:
    """The networks that may use an address; empty if all may."""
    networks = [ip_network(network) for network in external.allow_from or ()]
    return [] if any(network.prefixlen == 0 for network in networks) else networks


def _short(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()
