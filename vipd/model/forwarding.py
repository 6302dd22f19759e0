"""The input of a dataplane, as frozen values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from vipd.model.flow_limits import FlowLimits
from vipd.model.service import (
    Announcement,
    Balance,
    ExternalAddress,
    Family,
    Masquerade,
    Protocol,
    RejectAction,
    TrafficPolicy,
    socket_text,
)


class ForwardingKey(NamedTuple):
    """Identifies one forwarding: a service's port and protocol in one address family."""

    service: str
    port_name: str
    """Empty for the only unnamed port of its protocol."""
    protocol: Protocol
    family: Family

    @property
    def service_port(self) -> str:
        """`namespace/name` plus `:port` when the port is named (contract 1.1)."""
        return f"{self.service}:{self.port_name}" if self.port_name else self.service


class Endpoint(NamedTuple):
    """A backend as one forwarding reaches it."""

    address: str
    port: int
    weight: int = 1

    def __str__(self) -> str:
        return socket_text(self.address, self.port)


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Everything that a dataplane needs for one service port in one family: the seam of the program.

    A dataplane has no access to sources, health or the reason for a weight; the caller has decided all that.
    Endpoints take new flows, each with weight >= 1, sorted by their text as kube-proxy does (contract 1.5).
    `endpoints` serve traffic under the cluster policy, `local_endpoints` traffic under the local one;
    each is empty when no traffic can use it. `without_new_flows` are declared backends that take no new flow.
    """

    key: ForwardingKey
    addresses: tuple[str, ...]
    port: int
    endpoints: tuple[Endpoint, ...]
    masquerade: Masquerade
    affinity_timeout: int | None = None
    refusal: RejectAction = RejectAction.REJECT
    without_new_flows: tuple[Endpoint, ...] = ()
    local_endpoints: tuple[Endpoint, ...] = ()
    unavailable: tuple[Endpoint, ...] = ()
    """Known backends whose flows should end: they are declared down."""
    ends_flows: bool = False
    answers_ping: bool = True
    has_endpoints: bool = True
    """Some endpoint could serve somewhere, here or on another host: decides between refusing and dropping."""
    internal_policy: TrafficPolicy = TrafficPolicy.CLUSTER
    external_policy: TrafficPolicy = TrafficPolicy.CLUSTER
    external_addresses: tuple[ExternalAddress, ...] = ()
    """Each with the networks that may use it (never None here)."""
    allow_host: bool = False
    """An address of this host is in the networks that external addresses are limited to."""
    allow_from: tuple[str, ...] = ()
    """Networks that may use `addresses` and the node port; empty: all."""
    allow_host_inside: bool = False
    """An address of this host is in these networks."""
    node_port: int | None = None
    health_port: int | None = None
    ready_local: tuple[str, ...] = ()
    """Addresses on this host that are ready, each once, without drained ones. Empty without a health port."""
    balance: Balance = Balance.RANDOM
    affinity_only: tuple[Endpoint, ...] = ()
    """Those of `without_new_flows` that clients with affinity to them still reach, under the cluster policy
    and while there are endpoints for other clients."""
    frontend_removed: bool = False
    """The frontend is gone: packets of TCP flows from before get a reset, all others pass as if the
    forwarding did not exist."""
    announcement: Announcement | None = None
    """Whether hosts elsewhere learn its addresses; no rule depends on it."""
    limits: FlowLimits | None = None
    """Limits on new flows, after sources that may not come were dropped. A flow over one is refused as
    `refusal` says."""

    full_under: frozenset[TrafficPolicy] = frozenset()
    """The policies under which a backend is left out only because it has its maximum of flows."""

    flow_takeover: bool = False
    """TCP segments of its backends that belong to no tracked flow continue one of another host."""

    @property
    def resets_flows(self) -> bool:
        """Clients of established flows that end get a TCP reset."""
        return self.ends_flows and self.key.protocol is Protocol.TCP

    def announced_addresses(self) -> tuple[str, ...]:
        """Its addresses that are to be announced beyond this host."""
        if self.announcement is None:
            return ()
        inside = self.addresses if self.announcement.inside else ()
        return (*inside, *(external.address for external in self.external_addresses))

    def takeover_addresses(self) -> tuple[str, ...]:
        """Addresses of flows that may come from another host: those for outside; without any, its own."""
        if not self.flow_takeover or self.key.protocol is not Protocol.TCP:
            return ()
        return tuple(external.address for external in self.external_addresses) or self.addresses

    @property
    def externally_exposed(self) -> bool:
        """Whether it has any address besides the service's own."""
        return bool(self.node_port or self.external_addresses)

    def endpoints_under(self, policy: TrafficPolicy) -> tuple[Endpoint, ...]:
        """The endpoints for traffic under a policy."""
        return self.local_endpoints if policy is TrafficPolicy.LOCAL else self.endpoints

    def reachable(self) -> tuple[Endpoint, ...]:
        """Every endpoint that a new flow can reach from this host, in order, each once."""
        if not self.local_endpoints:
            return self.endpoints
        return tuple(sorted({*self.endpoints, *self.local_endpoints}, key=str))

    def endpoint_count(self) -> int:
        """Number of known endpoints, ready or not."""
        if not (self.local_endpoints or self.without_new_flows or self.unavailable):
            return len(self.endpoints)  # mostly, and no two of these are equal
        known = (*self.endpoints, *self.local_endpoints, *self.without_new_flows, *self.unavailable)
        return len({endpoint[:2] for endpoint in known})

    def compile_cost(self) -> int:
        """Cost of compiling it: the known endpoints at each address, and whatever else requires a rule."""
        frontends = max(1, len(self.addresses) + len(self.external_addresses))
        networks = sum(len(external.allow_from or ()) for external in self.external_addresses)
        networks += len(self.allow_from) * (len(self.addresses) + bool(self.node_port))
        slots, weights = self.endpoint_count(), [endpoint.weight for endpoint in self.endpoints]
        if len({*weights}) > 1:  # up to 1,024 slots, or four for each
            slots = max(slots, min(sum(weights) // gcd(*weights), max(1024, 4 * len(weights))))
        return slots * frontends + frontends - 1 + networks

    def shares(self, policy: TrafficPolicy | None = None) -> dict[Endpoint, float]:
        """The part of new flows under a policy (the internal one if None) that each endpoint takes, 0..1."""
        endpoints = self.endpoints_under(policy or self.internal_policy)
        total = sum(e.weight for e in endpoints)
        return {e: e.weight / total for e in endpoints}
