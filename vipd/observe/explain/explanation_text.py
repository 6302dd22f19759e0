"""Describes in words what the rules do to a packet, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from vipd.dataplane.iptables.syntax import UNUSED_PORTS_COMMENT
from vipd.dataplane.nftables.chains import limits_sources
from vipd.dataplane.nftables.layout import UNUSED
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.options import LOOPBACK
from vipd.declaration.syntax import duration_text
from vipd.model.forwarding import Forwarding
from vipd.model.service import Balance, Frontend, Protocol, socket_text
from vipd.observe.explain.query import Query
from vipd.observe.explain.rule_words import Options, in_table
from vipd.observe.simulator import Outcome, Packet, PacketVerdict, Step

_MAX_NAMED = 6
"""Maximum number of ports or networks that a text lists."""


@dataclass(frozen=True, slots=True)
class PacketContext:
    """A packet and the forwardings that can affect it."""

    packet: Packet
    forwardings: Sequence[Forwarding]
    options: Options
    destination_is_local: bool
    """Whether the packet's destination is an address of this host."""

    def owner(self, place: str = "") -> Forwarding | None:
        """The forwarding that serves `place`, an `address:port`; if it is empty, the packet's destination."""
        wanted = place or socket_text(self.packet.destination, self.packet.port or 0)
        for forwarding in self._of_protocol():
            on_node = self.destination_is_local and not place and forwarding.node_port == self.packet.port
            if on_node or wanted in _places(forwarding):
                return forwarding
        return None

    def _of_protocol(self) -> list[Forwarding]:
        return [f for f in self.forwardings if f.key.protocol == self.packet.protocol]


class OutcomeText(NamedTuple):
    """The outcome of a packet in words: a clause for the summary, and the reason or consequence."""

    clause: str
    reason: str = ""


def outcome_text(outcome: Outcome, context: PacketContext) -> OutcomeText:
    """The outcome of a packet that is not delivered, and the reason."""
    if outcome.verdict is PacketVerdict.UNCHANGED:
        return OutcomeText(_unchanged_text(context))
    last = outcome.steps[-1]
    owner = context.owner(outcome.backend or "")
    refused = "refused" if outcome.verdict is PacketVerdict.REJECTED else "dropped"
    does = f"is translated to {outcome.backend}, then {refused}" if outcome.backend else f"is {refused}"
    if owner is None and of_unused_port(last):
        return OutcomeText(
            f"{does}: no service has this address and port",
            "by the setting reject_unused_ports a virtual IP refuses every other port at once",
        )
    if owner is None:
        return OutcomeText(
            f"{does} by {last.chain}", last.rule if in_table(last) else last.comment or last.rule
        )
    name = owner.key.service_port
    if _in_source_range_chain(last, context.options) and not _source_allowed(owner, context):
        return OutcomeText(f"{does}: this source may not use {name}", _allowed(owner, context))
    if owner.has_endpoints:
        return OutcomeText(
            f"{does}: {name} has no backends on this host",
            "its traffic policy is local; a client behind a load balancer tries another host",
        )
    return OutcomeText(f"{does}: no backend of {name} is ready", _reject_text(outcome))


def of_unused_port(step: Step) -> bool:
    """Whether the rule refuses packets to a virtual IP at a port that no service has."""
    return step.chain == UNUSED if in_table(step) else step.comment == UNUSED_PORTS_COMMENT


def _in_source_range_chain(step: Step, options: Options) -> bool:
    """Whether the rule is in a chain that drops packets from sources that are not allowed."""
    if isinstance(options, TableOptions):
        return limits_sources(step.chain)
    return step.chain == options.names.fixed("PROXY-FIREWALL")


def _reject_text(outcome: Outcome) -> str:
    """What a client sees if the service has no ready backend."""
    if outcome.verdict is PacketVerdict.DROPPED:
        return "its fallback is drop: clients wait until they give up"
    if "tcp reset" in outcome.steps[-1].rule.replace("-", " "):
        return "refused by a TCP reset: clients see connection refused"
    return "refused by an ICMP error, port unreachable: clients see connection refused"


def hint(context: PacketContext) -> str:
    """A suggestion if no service matches the packet; otherwise empty."""
    packet = context.packet
    owner = context.owner()
    if owner is not None:
        return (
            f"{packet.port} is a node port of {owner.key.service_port}, but not at this address; "
            "see node_port_addresses and localhost_node_ports"
        )
    there = [f for f in context.forwardings if _has_address(f, packet.destination)]
    if there:
        served = [f"{f.port}/{f.key.protocol}" for f in there]
        return f"{packet.destination} serves {_listed(served)}"
    return _node_port_hint(context)


def notes(query: Query, owner: Forwarding | None, *, several_backends: bool) -> tuple[str, ...]:
    """Notes on other conditions that affect such packets."""
    said = []
    if query.assumed:
        said.append(f"{query.packet.source} is assumed as the source; --from ADDRESS tells another")
    hashed = owner is not None and owner.balance is Balance.SOURCE_HASH and len(owner.endpoints) > 1
    if (several_backends or hashed) and owner is not None and owner.affinity_timeout is not None:
        kept = duration_text(owner.affinity_timeout)
        said.append(f"a client that connected within {kept} keeps its backend; the shares are for others")
    if owner is not None and hashed:
        said.append(f"{owner.key.service_port} gives each client one backend by its address")
    said += _limit_notes(owner)
    if owner is not None and ip_address(query.packet.source) in ip_network(LOOPBACK):
        setting = "net.ipv4.conf.all.route_localnet is 1, which vipd never sets"
        said.append(f"from {LOOPBACK} only backends on this host are reached, unless {setting}")
    return tuple(said)


def _limit_notes(owner: Forwarding | None) -> Iterator[str]:
    """What the simulator cannot know: how much of each limit is used."""
    if owner is not None and owner.limits:
        limits = "; ".join(map(str, owner.limits.applied()))
        yield f"the packet counts as within all limits of {owner.key.service_port}: {limits}"


def _unchanged_text(context: PacketContext) -> str:
    packet, health = context.packet, None
    if context.destination_is_local and packet.protocol == Protocol.TCP:
        health = next((f for f in context.forwardings if f.health_port == packet.port), None)
    if health is not None:
        return f"is left to this host: {packet.port} is the health port of {health.key.service}"
    return "is left alone: no service has this address and port"


def _node_port_hint(context: PacketContext) -> str:
    packet = context.packet
    with_port = [f for f in context.forwardings if f.node_port == packet.port]
    if not with_port:
        return ""
    named = [f"{Frontend('', packet.port or 0, f.key.protocol)} ({f.key.service_port})" for f in with_port]
    return f"there is {_listed(named)}" + (
        "" if context.destination_is_local else ", at this host's own addresses"
    )


def _source_allowed(owner: Forwarding, context: PacketContext) -> bool:
    """Whether the source is allowed. The dropping chain does not tell: iptables drops in the same chain if no
    backend is on this host."""
    source = ip_address(context.packet.source)
    return any(source in ip_network(network) for network in _networks(owner, context))


def _allowed(owner: Forwarding, context: PacketContext) -> str:
    allowed = _networks(owner, context)
    return f"allowed are {_listed(allowed)}" if allowed else ""


def _networks(owner: Forwarding, context: PacketContext) -> list[str]:
    destination = context.packet.destination
    external = {e.address: e.allow_from or () for e in owner.external_addresses}
    return [*external.get(destination, owner.allow_from)]


def _places(forwarding: Forwarding) -> set[str]:
    external = (e.address for e in forwarding.external_addresses)
    return {socket_text(address, forwarding.port) for address in (*forwarding.addresses, *external)}


def _has_address(forwarding: Forwarding, address: str) -> bool:
    return address in forwarding.addresses or any(e.address == address for e in forwarding.external_addresses)


def _listed(words: Sequence[str]) -> str:
    shown = ", ".join(list(dict.fromkeys(words))[:_MAX_NAMED])
    more = len(set(words)) - _MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
