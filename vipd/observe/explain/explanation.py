"""The effect of the compiled rules on one packet, in words and numbers. Pure: reads neither kernel nor files.

`query.ask` parses the request, `explain` returns an `Explanation`; its `view` is the API's form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vipd.dataplane.iptables.render import render as render_rules
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.render import render as render_table
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, socket_text
from vipd.observe.explain.explanation_text import (
    OutcomeText,
    PacketContext,
    hint,
    notes,
    of_unused_port,
    outcome_text,
)
from vipd.observe.explain.query import Query, is_own
from vipd.observe.explain.rule_words import Options, step_words
from vipd.observe.simulator import (
    Host,
    Outcome,
    Packet,
    PacketVerdict,
    Ruleset,
    SimulationResult,
    Tables,
    parse_ruleset,
    parse_tables,
    trace,
)

Json = dict[str, object]


@runtime_checkable
class Compiled(Protocol):
    """A dataplane whose rules can be explained."""

    def options_of(self, family: Family) -> Options:
        """Everything besides the forwardings that shapes a family's rules. Its type identifies the
        dataplane."""

    def host_addresses(self) -> frozenset[str]:
        """This host's own addresses."""


@dataclass(frozen=True, slots=True)
class Reached:
    """One backend that new flows of this kind get to. `share` is 0..1 of all of them."""

    endpoint: str
    share: float
    masqueraded: bool
    """Its source is this host's address, not the client's own."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer to one query."""

    trace: SimulationResult
    service_port: str
    """`namespace/name:port` of the service that the packet is for; empty when it is for none."""
    summary: str
    """One sentence: from, to, and the outcome."""
    reason: str
    """The consequence for the client, or the cause; may be empty."""
    hint: str
    """A suggestion if no service matches the packet; may be empty."""
    notes: tuple[str, ...]

    @property
    def packet(self) -> Packet:
        """The packet of the query."""
        return self.trace.packet

    @property
    def verdict(self) -> str:
        """`delivered`, `rejected`, `dropped` or `unchanged`; `mixed` when it depends on chance."""
        return _verdict(self.trace)

    def backends(self) -> tuple[Reached, ...]:
        """The backends that packets are delivered to, in rule order."""
        return tuple(_reached(self.trace))

    def view(self) -> Json:
        """As JSON, in the form that docs/api.md describes. The rules do not say how backends are."""
        packet = self.packet
        return {
            "packet": {
                "source": packet.source,
                "source_port": packet.source_port,
                "destination": packet.destination,
                "port": packet.port,
                "protocol": packet.protocol,
                "arriving": str(packet.arriving),
            },
            "service_port": self.service_port or None,
            "verdict": self.verdict,
            "summary": self.summary,
            "reason": self.reason,
            "hint": self.hint,
            "notes": list(self.notes),
            "backends": [
                {
                    "endpoint": reached.endpoint,
                    "share": round(reached.share, 6),
                    "masqueraded": reached.masqueraded,
                    "source_seen": "host" if reached.masqueraded else "client",
                    "health": None,
                }
                for reached in self.backends()
            ],
            "outcomes": [_outcome_view(outcome, self.service_port) for outcome in self.trace.outcomes],
        }


def explain(
    query: Query,
    forwardings: Iterable[Forwarding],
    options: Options,
    host_addresses: Collection[str],
) -> Explanation:
    """The effect of the rules for these forwardings on the query's packet.

    `options` are those of the packet's family in the chosen dataplane, `host_addresses` all of this host. For
    speed only the forwardings are compiled that can affect the packet: those with its destination address, or
    with its port as a node or health port, those for which the same is true with a backend of these, and
    those that have a backend in common with them which is the packet's source. All rules and elements of
    other forwardings require an address or a port that the packet never has. With iptables so few are not
    dispatched by groups of addresses, as many may be in the kernel: the steps omit the jumps between such
    groups.

    Raises:
        RulesetError: the simulator does not know the form of a compiled rule; that is a fault in vipd.
    """
    packet = query.packet
    concerned, others = _related(packet, forwardings)
    # Without any forwarding there would be no rules at all, not even those that all packets pass.
    addresses = tuple(sorted(host_addresses))
    own = _own_rules(concerned or others, options, packet.family)
    found = trace(own, packet, Host(addresses))
    context = PacketContext(
        packet, concerned, options, destination_is_local=is_own(packet.destination, host_addresses)
    )
    owner = context.owner()
    clause, reason = _outcome_texts(found, context)
    return Explanation(
        found,
        owner.key.service_port if owner else "",
        f"{_place(packet)} {clause}",
        reason,
        hint(context) if _unserved(found) else "",
        notes(query, owner, several_backends=len(found.shares()) > 1),
    )


def _own_rules(forwardings: Iterable[Forwarding], options: Options, family: Family) -> Ruleset | Tables:
    """The rules of these forwardings."""
    if isinstance(options, TableOptions):
        return parse_tables(render_table(forwardings, options), family)
    return parse_ruleset(render_rules(forwardings, options), family)


def related(packet: Packet, forwardings: Iterable[Forwarding]) -> tuple[Forwarding, ...]:
    """The forwardings that affect the packet."""
    return _related(packet, forwardings)[0]


def _related(
    packet: Packet, forwardings: Iterable[Forwarding]
) -> tuple[tuple[Forwarding, ...], tuple[Forwarding, ...]]:
    """The forwardings that affect the packet, and one of the others, if there is one."""
    family = [f for f in forwardings if f.key.family is packet.family]
    port = packet.port or 0
    direct = [f for f in family if _concerns(f, {packet.destination}, {port})]
    endpoints = [endpoint for f in direct for endpoint in f.reachable()]
    # A backend may itself be the address of a service, whose refusal then applies to the translated packet.
    addresses, ports = {e.address for e in endpoints}, {e.port for e in endpoints}
    known = {f.key for f in direct}
    left = [f for f in family if endpoints and f.key not in known]
    further = [f for f in left if _concerns(f, addresses, ports)]
    if packet.source in addresses:
        # Which backends connect to themselves depends on addresses, not on services (nftables).
        further += [f for f in left if any(e.address == packet.source for e in f.reachable())]
    return (*direct, *{f.key: f for f in further}.values()), tuple(family[:1])


def _concerns(forwarding: Forwarding, addresses: Collection[str], ports: Collection[int]) -> bool:
    if forwarding.node_port in ports or forwarding.health_port in ports:
        return True
    if any(address in addresses for address in forwarding.addresses):
        return True
    return any(external.address in addresses for external in forwarding.external_addresses)


def _place(packet: Packet) -> str:
    there = socket_text(packet.destination, packet.port or 0)
    return f"{packet.source} -> {there}/{packet.protocol}"


def _outcome_texts(found: SimulationResult, context: PacketContext) -> OutcomeText:
    """The outcome of the packet; several with the probability of each."""
    delivered = found.probability(PacketVerdict.DELIVERED)
    others = [outcome for outcome in found.outcomes if outcome.verdict is not PacketVerdict.DELIVERED]
    if not others:
        return OutcomeText(_delivery(found))
    texts = [outcome_text(outcome, context) for outcome in others]
    if len(found.outcomes) == 1:
        return texts[0]
    ways = [f"in {100 * delivered:.1f}% {_delivery(found)}"] if delivered else []
    ways += [f"in {100 * o.probability:.1f}% {f.clause}" for o, f in zip(others, texts, strict=True)]
    return OutcomeText("; ".join(ways), next((f.reason for f in texts if f.reason), ""))


def _delivery(found: SimulationResult) -> str:
    backends = list(_reached(found))
    count = len(found.shares())
    where = f"is balanced over {count} backends" if count > 1 else f"goes to {backends[0].endpoint}"
    masqueraded = [reached.masqueraded for reached in backends]
    if all(masqueraded):
        return f"{where}, masqueraded"
    return f"{where}, masqueraded for some" if any(masqueraded) else f"{where}, not masqueraded"


def _reached(found: SimulationResult) -> Iterator[Reached]:
    for outcome in found.outcomes:
        if outcome.verdict is PacketVerdict.DELIVERED and outcome.backend is not None:
            yield Reached(outcome.backend, outcome.probability, outcome.masqueraded)


def _unserved(found: SimulationResult) -> bool:
    """No service has the packet's address and port."""
    last = found.outcomes[0].steps[-1:] if found.outcomes else ()
    return _verdict(found) == PacketVerdict.UNCHANGED or any(map(of_unused_port, last))


def _verdict(found: SimulationResult) -> str:
    verdicts = {str(outcome.verdict) for outcome in found.outcomes}
    return verdicts.pop() if len(verdicts) == 1 else "mixed"


def _outcome_view(outcome: Outcome, service_port: str) -> Json:
    return {
        "verdict": str(outcome.verdict),
        "backend": outcome.backend,
        "probability": round(outcome.probability, 6),
        "masqueraded": outcome.masqueraded,
        "rules": [
            {
                "table": step.table,
                "chain": step.chain,
                "rule": step.rule,
                "comment": step.comment,
                "element": step.element,
                "meaning": step_words(step, service_port),
            }
            for step in outcome.steps
        ],
    }
