"""Compiles one forwarding to its elements and the chains that they lead to. Pure.

The decisions are kube-proxy's, contract sections 1.4 to 1.6, as in the iptables dataplane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Network, IPv6Network, ip_network

from vipd.dataplane.engine import ObjectId
from vipd.dataplane.nftables.balance_chain import BalanceChain
from vipd.dataplane.nftables.chains import (
    Chain,
    ExternalLocalChain,
    MasqueradeChain,
    NodePortChain,
    RejectChain,
    ResetChain,
    SourceRangeChain,
    TableNumbers,
)
from vipd.dataplane.nftables.layout import (
    FRONTENDS,
    LOCAL_OFFSET,
    NODE_PORTS,
    FrontendKind,
    NftSet,
    allowed_sources,
    number_address,
    short_digest,
)
from vipd.dataplane.nftables.limit_chain import LimitChain
from vipd.dataplane.nftables.maglev import lookup_table
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.slots import interleaved, slot_counts, slots
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Balance, ExternalAddress, Masquerade, RejectAction, TrafficPolicy, socket_text

Network = IPv4Network | IPv6Network

_balance_chain = lru_cache(maxsize=1024)(BalanceChain)
_masquerade_chain = lru_cache(maxsize=1024)(MasqueradeChain)
"""Most forwardings have equal chains."""

NUMBER_BITS = 23
"""Bits of an endpoint's number."""


@dataclass(slots=True)
class Fragment:
    """One forwarding's part of the table."""

    elements: dict[ObjectId, str] = field(default_factory=dict)
    """Its own elements: place -> value."""
    chains: dict[Chain, None] = field(default_factory=dict)
    """The chains that its elements lead to."""
    chain_numbers: dict[str, str] = field(default_factory=dict)
    """Those of its frontends' elements: number -> chain."""
    source_sets: set[NftSet] = field(default_factory=set)
    """The maps of the networks that it is limited to."""
    pings: frozenset[str] = frozenset()
    """Its addresses, if they answer ping."""
    addresses: tuple[str, ...] = ()
    """Its addresses for clients inside."""
    hairpins: frozenset[str] = frozenset()
    """Addresses of endpoints that might be sent their own flows unmasqueraded."""

    replies: frozenset[tuple[str, str]] = frozenset()
    """Endpoint and frontend, for those whose replies continue flows of other hosts."""


def compile_forwarding(forwarding: Forwarding, options: TableOptions, numbers: TableNumbers) -> Fragment:
    """One forwarding's part of the table. Equal input gives equal elements."""
    return _Compilation(forwarding, options, numbers).run()


def service_name(key: ForwardingKey) -> str:
    """Identifies the service port independently of its frontends."""
    return f"{key.service_port}/{key.protocol}"


def first_chain(forwarding: Forwarding, options: TableOptions) -> str:
    """The chain that a forwarding's first frontend leads to. It costs little for any forwarding."""
    return _Compilation(forwarding, options, TableNumbers(options.family)).first()


def prefill_lookup_tables(forwardings: Iterable[Forwarding]) -> None:
    """Fill the lookup tables that compilation uses: with many backends they take a second."""
    for forwarding in forwardings:
        for policy in (TrafficPolicy.CLUSTER, TrafficPolicy.LOCAL):
            if forwarding.endpoints_under(policy):
                _slots(forwarding, policy)


class _Compilation:
    """The work on one forwarding."""

    def __init__(self, forwarding: Forwarding, options: TableOptions, numbers: TableNumbers) -> None:
        self._f, self._options, self._table_numbers = forwarding, options, numbers
        self._limits = forwarding.limits if options.limits else None
        self._found = Fragment()
        self._numbers: Mapping[tuple[str, int], int] = {}

    def first(self) -> str:
        """The name of the chain that the first frontend leads to; empty without one."""
        f = self._f
        if f.addresses:
            return self._internal().name
        if f.external_addresses:
            return self._external_chain(FrontendKind.ADDRESS).name
        return NodePortChain(self._external_chain(FrontendKind.NODE)).name if f.node_port else ""

    def run(self) -> Fragment:
        f, found = self._f, self._found
        if f.frontend_removed:
            self._reset()
            return found
        if self._timeout() is not None:
            self._numbers = _numbers({*f.endpoints, *f.local_endpoints, *f.affinity_only})
        self._inside()
        for external in f.external_addresses:
            self._outside(external)
        if f.node_port:
            self._node_port(f.node_port)
        found.addresses = f.addresses
        reachable = f.reachable()
        if self._may_be_unmarked():
            found.hairpins = frozenset(endpoint.address for endpoint in reachable)
        found.replies = self._replies()
        if self._options.ping and f.answers_ping and reachable:
            found.pings = frozenset(f.addresses)
        return found

    def _replies(self) -> frozenset[tuple[str, str]]:
        """Each endpoint that may have flows, also one that gets no new ones."""
        f = self._f
        if not (frontends := f.takeover_addresses()):
            return frozenset()
        endpoints = {(e.address, e.port) for e in (*f.reachable(), *f.without_new_flows)}
        return frozenset(
            (f"{address} . {port}", f"{frontend} . {f.port}")
            for frontend in frontends
            for address, port in endpoints
        )

    def _may_be_unmarked(self) -> bool:
        """Whether a flow of an endpoint to itself can pass without the mark for masquerade: in the usual
        modes all forwarded flows have the mark, and on this host itself none is needed."""
        f = self._f
        outside = f.externally_exposed and f.external_policy is TrafficPolicy.LOCAL
        return outside or f.masquerade in (Masquerade.HAIRPIN, Masquerade.OFF_CLUSTER)

    def _reset(self) -> None:
        for address in self._f.addresses:
            self._found.elements[FRONTENDS.name, self._frontend(address)] = self._dispatch_number(
                ResetChain()
            )
        if self._f.node_port:
            chain = ResetChain(FrontendKind.NODE)
            self._found.chains[chain] = None
            frontend = f"{self._f.key.protocol} . {self._f.node_port}"
            self._found.elements[NODE_PORTS.name, frontend] = f"jump {chain.name}"

    def _internal(self) -> Chain:
        """The chain for flows to an address of the service."""
        f = self._f
        if not f.endpoints_under(f.internal_policy):
            return self._refusal()
        spread = self._balance_chain(FrontendKind.ADDRESS, f.internal_policy)
        # Every endpoint's flows to itself are masqueraded elsewhere.
        return spread if f.masquerade is Masquerade.HAIRPIN else _masquerade_chain(f.masquerade, spread)

    def _inside(self) -> None:
        f = self._f
        policy, chain = f.internal_policy, self._internal()
        networks = _limits(f.allow_from) if f.endpoints_under(policy) else []
        for address in f.addresses:
            frontend = self._frontend(address)
            own = (ip_network(address),) if f.allow_host_inside else ()
            entry = self._source_range_chain((*networks, *own), frontend, chain) if networks else chain
            self._found.elements[FRONTENDS.name, frontend] = self._dispatch_number(entry)
            self._fill(FrontendKind.ADDRESS, frontend, policy)

    def _outside(self, external: ExternalAddress) -> None:
        f, frontend = self._f, self._frontend(external.address)
        networks = _limits(external.allow_from or ())
        chain = self._external_chain(FrontendKind.ADDRESS)
        if f.has_endpoints and networks:
            own = (ip_network(external.address),) if f.allow_host else ()
            chain = self._source_range_chain((*networks, *own), frontend, chain)
        self._found.elements[FRONTENDS.name, frontend] = self._dispatch_number(chain)
        if f.has_endpoints:
            self._fill_outside(FrontendKind.ADDRESS, frontend)

    def _source_range_chain(
        self,
        networks: Collection[Network],
        frontend: str,
        onward: Chain,
        kind: FrontendKind = FrontendKind.ADDRESS,
    ) -> SourceRangeChain:
        """The way into a chain for sources in these networks."""
        self._found.chains[onward] = None
        for network in networks:
            source_set = allowed_sources(network.prefixlen, kind)
            self._found.source_sets.add(source_set)
            source = (source_set.name, f"{network.network_address} . {frontend}")
            self._found.elements[source] = f"goto {onward.name}"
        return SourceRangeChain(tuple(sorted({network.prefixlen for network in networks})), kind)

    def _node_port(self, port: int) -> None:
        """Node ports are not subject to the ranges of load balancer addresses, as for kube-proxy (contract
        1.4)."""
        frontend = f"{self._f.key.protocol} . {port}"
        chain = self._external_chain(FrontendKind.NODE)
        gate = NodePortChain(chain)
        if self._f.has_endpoints and (networks := _limits(self._f.allow_from)):
            limited = self._source_range_chain(networks, frontend, chain, FrontendKind.NODE)
            gate = NodePortChain(limited, chain if self._f.allow_host_inside else None)
        self._found.chains[gate] = None
        # Other packets return to the dispatch.
        self._found.elements[NODE_PORTS.name, frontend] = f"jump {gate.name}"
        if self._f.has_endpoints:
            self._fill_outside(FrontendKind.NODE, frontend)

    def _external_chain(self, place: FrontendKind) -> Chain:
        """The chain for traffic from outside, after the check of its source."""
        f = self._f
        if not f.has_endpoints or not f.endpoints:
            return self._refusal()
        cluster = self._balance_chain(place, TrafficPolicy.CLUSTER)
        if f.external_policy is TrafficPolicy.LOCAL:
            if not f.local_endpoints:
                return ExternalLocalChain(cluster, None, f.resets_flows)
            return ExternalLocalChain(cluster, self._balance_chain(place, TrafficPolicy.LOCAL))
        # The backend may be on another host, so replies must return through this host, unless the service
        # declares that they do; kube-proxy has no such option.
        if f.masquerade is not Masquerade.HAIRPIN or self._options.kube_proxy:
            return MasqueradeChain(Masquerade.ALWAYS, cluster)
        return MasqueradeChain(f.masquerade, cluster) if self._options.loopback_clients else cluster

    def _fill_outside(self, place: FrontendKind, frontend: str) -> None:
        self._fill(place, frontend, TrafficPolicy.CLUSTER)
        if self._f.external_policy is TrafficPolicy.LOCAL:
            self._fill(place, frontend, TrafficPolicy.LOCAL)

    def _dispatch_number(self, chain: Chain) -> str:
        self._found.chains[chain] = None
        name = chain.name
        number = self._table_numbers.chain(name)
        self._found.chain_numbers[number] = name
        return number

    def _balance_chain(self, place: FrontendKind, policy: TrafficPolicy) -> Chain:
        """The chain that chooses the endpoint, behind the one of limits if there are any."""
        f = self._f
        turns = f.balance is Balance.ROUND_ROBIN
        balance = _balance_chain(
            len(_slots(f, policy)),
            f.balance,
            place,
            local=policy is TrafficPolicy.LOCAL,
            timeout=self._timeout(),
            owner=short_digest(service_name(f.key)) if turns else "",
        )
        if self._limits is None:
            return balance
        return LimitChain(self._limits, RejectChain(f.refusal is RejectAction.DROP), balance)

    def _fill(self, place: FrontendKind, frontend: str, policy: TrafficPolicy) -> None:
        """Add the slots of one frontend under one policy, and their endpoints."""
        endpoints, local = self._f.endpoints_under(policy), policy is TrafficPolicy.LOCAL
        if not endpoints:
            return
        elements, offset = self._found.elements, LOCAL_OFFSET if local else 0
        family = self._options.family
        # A draining endpoint may keep its pinned clients: it has a number, and no slot.
        everyone = endpoints if local else (*endpoints, *self._f.affinity_only)
        texts = [f"{endpoint.address} . {endpoint.port}" for endpoint in everyone]
        holder = place.endpoints.name
        if self._timeout() is not None or self._limits:
            number = self._table_numbers.service(service_name(self._f.key))
            elements[place.service_numbers.name, frontend] = number
        if self._timeout() is not None:
            numbers = [number_address(family, self._numbers[endpoint[:2]]) for endpoint in everyone]
            for number, text in zip(numbers, texts, strict=True):
                elements[place.numbered_endpoints(local).name, f"{frontend} . {number}"] = text
            holder, texts = place.slot_endpoints.name, numbers
        for slot, index in enumerate(_slots(self._f, policy)):
            elements[(holder, f"{frontend} . {number_address(family, slot + offset)}")] = texts[index]

    def _timeout(self) -> int | None:
        return self._f.affinity_timeout if self._options.affinity else None

    def _frontend(self, address: str) -> str:
        return f"{address} . {self._f.key.protocol} . {self._f.port}"

    def _refusal(self) -> RejectChain:
        """If all endpoints are on other hosts, it drops: a client behind a load balancer then tries
        another."""
        silent = self._f.has_endpoints or self._f.refusal is RejectAction.DROP
        return RejectChain(silent, resets_old_flows=silent and self._f.resets_flows)


def _slots(forwarding: Forwarding, policy: TrafficPolicy) -> tuple[int, ...]:
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


def _limits(allowed: Iterable[str]) -> list[Network]:
    """The networks that may come; empty if all may."""
    networks = [ip_network(network) for network in allowed]
    return [] if any(network.prefixlen == 0 for network in networks) else networks
