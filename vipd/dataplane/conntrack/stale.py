"""Which tracked flows are stale, because their backend or frontend no longer serves. Pure.

A translation is decided by a flow's first packet and kept for all others, whatever the rules say later. So a
flow to a backend that is gone, or one that began before there were rules, never heals while its client keeps
sending from the same port (contract 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from vipd.dataplane.conntrack.entries import TCP_SYN_SENT, Entry, SocketAddress
from vipd.dataplane.conntrack.messages import Query
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Protocol


class Reason(StrEnum):
    """Why a flow must end."""

    BACKEND_GONE = "backend gone"
    """It was translated to a backend that does not serve its frontend any more."""
    UNTRANSLATED = "made before the rules"
    """It leads to the frontend itself, where nobody answers."""


class Destination(NamedTuple):
    """Where clients send to. With an empty address: a port of this host itself, a node port."""

    family: Family
    protocol: Protocol
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Target:
    """What flows to one destination may lead to."""

    serving: frozenset[SocketAddress]
    """Backends that may keep flows, whether or not they take new ones."""
    ends_flows: bool
    """Flows to other backends are ended. Always so for UDP; else the service must want it."""
    former: frozenset[SocketAddress] | None = None
    """For a destination that is no frontend any more: the backends that it had. Flows to anything else are
    then somebody else's. None while it is a frontend."""


class Kind(NamedTuple):
    """A part of the table."""

    family: Family
    protocol: Protocol
    whole: bool
    """Not only its unanswered flows."""


TargetOf = Callable[[Forwarding], Target]
"""How a forwarding's flows are judged."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """All destinations that are vipd's, or recently were."""

    targets: Mapping[Destination, Target] = field(default_factory=dict)
    host_addresses: frozenset[str] = frozenset()
    """Canonical text. Node ports are vipd's at these."""
    kinds: Collection[Kind] | None = field(default=None, compare=False)
    """The parts of the table that the targets are in, where they are known; None: they can be found out."""

    def target(self, entry: Entry) -> Target | None:
        """What an entry may lead to; None when it is none of vipd's."""
        address, port = entry.destination
        target = self.targets.get(Destination(entry.family, entry.protocol, address, port))
        if target is None and address in self.host_addresses:
            target = self.targets.get(Destination(entry.family, entry.protocol, "", port))
        return target

    def queries(self) -> tuple[Query, ...]:
        """The parts of the table that can hold anything to judge; none if nothing can.

        Where established flows are left alone, only unanswered ones have to be read.
        """
        kinds = self.kinds
        if kinds is None:
            kinds = {kind for d, target in self.targets.items() if (kind := kind_of(d, target))}
        whole = {(kind.family, kind.protocol) for kind in kinds if kind.whole}
        parts = {(kind.family, kind.protocol) for kind in kinds}
        return tuple(Query(*part, unreplied=part not in whole) for part in sorted(parts))


def kind_of(destination: Destination, target: Target) -> Kind | None:
    """The part of the table in which flows to a destination may have to end; None if there is none."""
    if target.ends_flows:
        return Kind(destination.family, destination.protocol, whole=True)
    if destination.protocol is Protocol.TCP and target.serving:
        return Kind(destination.family, destination.protocol, whole=False)
    return None


def judge(entry: Entry, wanted: Wanted) -> Reason | None:
    """Why an entry must end; None when it is to be left alone."""
    target = wanted.target(entry)
    if target is None or entry.reply_source in target.serving:
        return None
    if entry.translated:
        ours = target.former is None or entry.reply_source in target.former
        return Reason.BACKEND_GONE if target.ends_flows and ours else None
    return Reason.UNTRANSLATED if target.serving and _lost(entry, target) else None


def default_target(forwarding: Forwarding) -> Target:
    """Every known backend that is not down keeps its flows, also without new ones. UDP flows to others are
    ended, TCP and SCTP flows where the service says so."""
    known = (*forwarding.reachable(), *forwarding.resting)
    return Target(
        frozenset((endpoint.address, endpoint.port) for endpoint in known),
        ends_flows=forwarding.ends_flows or forwarding.key.protocol is Protocol.UDP,
    )


def destinations(forwarding: Forwarding) -> list[Destination]:
    """Where the clients of a forwarding send to."""
    key = forwarding.key
    external = (each.address for each in forwarding.external_addresses)
    found = [
        Destination(key.family, key.protocol, address, forwarding.port)
        for address in (*forwarding.addresses, *external)
    ]
    if forwarding.node_port:
        found.append(Destination(key.family, key.protocol, "", forwarding.node_port))
    return found


def wanted_from(
    forwardings: Iterable[Forwarding], host_addresses: Iterable[str], target_of: TargetOf = default_target
) -> Wanted:
    """What these forwardings mean on a host with these addresses, with no memory of earlier ones."""
    targets = dict[Destination, Target]()
    for forwarding in forwardings:
        targets.update(dict.fromkeys(destinations(forwarding), target_of(forwarding)))
    return Wanted(targets, frozenset(host_addresses))


def _lost(entry: Entry, target: Target) -> bool:
    """Whether an untranslated flow is a client in front of nobody, not something that works without vipd."""
    if entry.replied:
        return False
    if entry.protocol is Protocol.TCP:
        return entry.tcp_state == TCP_SYN_SENT
    return entry.protocol is Protocol.UDP or target.ends_flows
