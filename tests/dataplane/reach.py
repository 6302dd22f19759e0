"""Where first packets to frontends go under some rules, and where a declaration says they should."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Frontend, RejectAction, family_of
from vipd.observe.simulator import Arrival, Host, Packet, parse_ruleset, trace

SOURCES = {
    Family.IPV4: ("10.244.0.1", "10.20.0.1", "192.0.2.7"),
    Family.IPV6: ("fd00:244::1", "fd00:20::1", "2001:db8::7"),
}
"""A backend (the hairpin case), a host that some cluster CIDRs hold, and a stranger."""

Way = tuple[str, str | None, bool, float]
"""Verdict, backend, masqueraded, probability."""
Reach = frozenset[tuple[str, Arrival, frozenset[Way]]]
"""Every way a first packet goes, by source and arrival."""


def reach(
    rules: str, frontends: Iterable[Frontend], pinned: frozenset[str] = frozenset()
) -> dict[Frontend, Reach]:
    """Where first packets to frontends of one family go; `pinned` lists hold every source already."""
    asked = list(frontends)
    if not asked:
        return {}
    family = family_of(asked[0].address)
    ruleset = parse_ruleset(rules, family)
    host = Host(affinity_lists=pinned)

    def ways(frontend: Frontend, source: str, arrival: Arrival) -> frozenset[Way]:
        packet = Packet(source, frontend.address, frontend.protocol, frontend.port, arriving=arrival)
        traced = trace(ruleset, packet, host)
        return frozenset(
            (str(o.verdict), o.backend, o.masqueraded, round(o.probability, 6)) for o in traced.outcomes
        )

    return {
        frontend: frozenset(
            (source, arrival, ways(frontend, source, arrival))
            for source in SOURCES[family]
            for arrival in Arrival
        )
        for frontend in asked
    }


def declared_shares(forwardings: Iterable[Forwarding]) -> dict[Frontend, Mapping[str, float]]:
    """Of each frontend: the share of each backend; or `rejected` or `dropped` with share 1."""
    return {
        Frontend(address, forwarding.port, forwarding.key.protocol): _shares(forwarding)
        for forwarding in forwardings
        for address in forwarding.addresses
    }


def traced_shares(reached: Reach) -> list[Mapping[str, float]]:
    """The same for each source and arrival, as traced."""
    found: list[Mapping[str, float]] = []
    for _, _, ways in reached:
        shares: dict[str, float] = {}
        for verdict, backend, _, probability in ways:
            name = backend if verdict == "delivered" and backend else verdict
            shares[name] = shares.get(name, 0.0) + probability
        found.append(shares)
    return found


def _shares(forwarding: Forwarding) -> Mapping[str, float]:
    if forwarding.endpoints:
        return {str(endpoint): share for endpoint, share in forwarding.shares().items()}
    return {"dropped" if forwarding.refusal is RejectAction.DROP else "rejected": 1.0}
