"""Decides which tracked flows are stale, because their backend or frontend no longer serves. Pure.

The kernel chooses the translation of a flow at its first packet, and keeps it even if the rules change. So a
flow to a removed backend, or one that began before vipd wrote its rules, never recovers while its client
keeps sending from the same port (contract 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from vipd.dataplane.conntrack.entries import TCP_SYN_SENT, Entry, SocketAddress
from vipd.dataplane.conntrack.messages import Query
from vipd.model.forwarding import Forwarding
from vipd.model.frozen import compact_set
from vipd.model.service import Family, Protocol


class Reason(StrEnum):
    """Why a flow must end."""

    BACKEND_GONE = "backend gone"
    """The flow was translated to a backend that no longer serves its frontend."""
    CLIENT_REFUSED = "client may no longer come"
    """The source may no longer use the frontend."""
    UNTRANSLATED = "made before the rules"
    """The flow was not translated: its packets go to the frontend's address, where no process answers."""


class Destination(NamedTuple):
    """Destination of client packets. An empty address means a node port of this host."""

    family: Family
    protocol: Protocol
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class FlowTarget:
    """Backends that flows to one destination may lead to."""

    serving: Collection[SocketAddress]
    """Backends that may keep flows, whether or not they take new ones: as `compact_set` returns them."""
    end_stale_flows: bool
    """Whether vipd ends flows to other backends. Always true for UDP; otherwise the service must declare
    it."""
    former_backends: frozenset[SocketAddress] | None = None
    """For a destination that is no longer a frontend: the backends that it had. vipd leaves flows to any
    other address alone. None while the destination is a frontend."""
    allowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Networks whose clients may come, by address (empty: a node port); none: all may."""


class TablePart(NamedTuple):
    """A part of the connection tracking table."""

    family: Family
    protocol: Protocol
    whole: bool
    """Whether the part includes flows that were answered."""


TargetOf = Callable[[Forwarding], FlowTarget]
"""Returns the target for a forwarding's flows."""


@dataclass(frozen=True, slots=True)
class FlowTargets:
    """All destinations that vipd serves, or served until recently."""

    targets: Mapping[Destination, FlowTarget] = field(default_factory=dict)
    host_addresses: frozenset[str] = frozenset()
    """This host's addresses, at which vipd serves node ports. In canonical form."""
    table_parts: Collection[TablePart] | None = field(default=None, compare=False)
    """The parts of the table that may contain flows to the targets; None: `queries` computes them."""

    def target(self, entry: Entry) -> FlowTarget | None:
        """The target of an entry; None if vipd does not serve the entry's destination."""
        address, port = entry.destination
        target = self.targets.get(Destination(entry.family, entry.protocol, address, port))
        if target is None and address in self.host_addresses:
            target = self.targets.get(Destination(entry.family, entry.protocol, "", port))
        return target

    def queries(self) -> tuple[Query, ...]:
        """Queries for the parts of the table that may contain stale flows; none if no part may.

        Where vipd leaves established flows alone, it reads only unanswered flows.
        """
        kinds = self.table_parts
        if kinds is None:
            kinds = {kind for d, target in self.targets.items() if (kind := table_part_of(d, target))}
        whole = {(kind.family, kind.protocol) for kind in kinds if kind.whole}
        parts = {(kind.family, kind.protocol) for kind in kinds}
        return tuple(Query(*part, unreplied=part not in whole) for part in sorted(parts))


def table_part_of(destination: Destination, target: FlowTarget) -> TablePart | None:
    """The part of the table in which flows to a destination may have to end; None if there is none."""
    if target.end_stale_flows:
        return TablePart(destination.family, destination.protocol, whole=True)
    if destination.protocol is Protocol.TCP and target.serving:
        return TablePart(destination.family, destination.protocol, whole=False)
    return None


def stale_reason(entry: Entry, targets: FlowTargets) -> Reason | None:
    """Why an entry must end; None if it must stay."""
    entry = entry.from_client
    target = targets.target(entry)
    if target is None:
        return None
    if target.allowed and target.end_stale_flows and not _may_come(entry, target, targets.host_addresses):
        return Reason.CLIENT_REFUSED
    if entry.reply_source in target.serving:
        return None
    if entry.translated:
        ours = target.former_backends is None or entry.reply_source in target.former_backends
        return Reason.BACKEND_GONE if target.end_stale_flows and ours else None
    return Reason.UNTRANSLATED if target.serving and _unanswered(entry, target) else None


def default_target(forwarding: Forwarding) -> FlowTarget:
    """The target of a forwarding that serves. Every known backend that is not down keeps its flows, even if
    it gets no new ones. UDP flows to other backends are ended; TCP and SCTP flows only if the service
    declares it."""
    known = (*forwarding.reachable(), *forwarding.without_new_flows)
    allowed = {external.address: external.allow_from or () for external in forwarding.external_addresses}
    allowed.update(dict.fromkeys((*forwarding.addresses, ""), forwarding.allow_from))
    return FlowTarget(
        compact_set([(endpoint.address, endpoint.port) for endpoint in known]),
        end_stale_flows=forwarding.ends_flows or forwarding.key.protocol is Protocol.UDP,
        allowed=allowed if any(allowed.values()) else {},
    )


def destinations(forwarding: Forwarding) -> list[Destination]:
    """The destinations to which the clients of a forwarding send."""
    key = forwarding.key
    external = (each.address for each in forwarding.external_addresses)
    found = [
        Destination(key.family, key.protocol, address, forwarding.port)
        for address in (*forwarding.addresses, *external)
    ]
    if forwarding.node_port:
        found.append(Destination(key.family, key.protocol, "", forwarding.node_port))
    return found


def flow_targets(
    forwardings: Iterable[Forwarding], host_addresses: Iterable[str], target_of: TargetOf = default_target
) -> FlowTargets:
    """The targets of these forwardings on a host with these addresses. Former frontends are not included."""
    targets = dict[Destination, FlowTarget]()
    for forwarding in forwardings:
        targets.update(dict.fromkeys(destinations(forwarding), target_of(forwarding)))
    return FlowTargets(targets, frozenset(host_addresses))


def _may_come(entry: Entry, target: FlowTarget, host_addresses: Collection[str]) -> bool:
    """Whether the rules would take a new flow of this client. This host may come if any of its addresses
    may: it may use each of them as its source."""
    address, source = entry.destination[0], entry.source[0]
    networks = target.allowed.get(address, target.allowed[""])
    sources = host_addresses if source in host_addresses else (source,)
    return not networks or any(_is_within(each, networks) for each in sources)


@lru_cache(maxsize=4096)
def _is_within(address: str, networks: tuple[str, ...]) -> bool:
    parsed = ip_address(address)
    return any(parsed in ip_network(network) for network in networks)


def _unanswered(entry: Entry, target: FlowTarget) -> bool:
    """Whether an untranslated flow got no answer. One that got an answer works without vipd."""
    if entry.replied:
        return False
    if entry.protocol is Protocol.TCP:
        return entry.tcp_state == TCP_SYN_SENT
    return entry.protocol is Protocol.UDP or target.end_stale_flows
