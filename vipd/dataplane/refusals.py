"""Rules of other programs that may refuse flows of services, and the flows that they match. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from vipd.model.forwarding import Forwarding
from vipd.model.service import Family

Networks = tuple[IPv4Network | IPv6Network, ...]
Ports = tuple[tuple[int, int], ...]
"""Ranges of ports, first and last."""

MAX_REFUSALS = 20
"""Refusing rules of one chain that are read; a list of banned addresses may have thousands."""
MAX_SHOWN = 3
"""Refusing rules that one text names."""


@dataclass(frozen=True, slots=True)
class ForwardedFlow:
    """A flow from a client through a virtual address, as chains of the forward hook see it: translated."""

    family: Family
    protocol: str
    port: int
    """Of the frontend."""
    addresses: frozenset[str]
    """Virtual addresses that it may have been sent to."""
    endpoints: frozenset[tuple[str, int]]
    """Addresses and ports of the endpoints that it may get to."""
    source: str = ""
    """Empty: any client."""

    @classmethod
    def of(cls, forwarding: Forwarding) -> ForwardedFlow:
        """The flows of one forwarding."""
        external = (each.address for each in forwarding.external_addresses)
        return cls(
            forwarding.key.family,
            str(forwarding.key.protocol),
            forwarding.port,
            frozenset((*forwarding.addresses, *external)),
            frozenset((endpoint.address, endpoint.port) for endpoint in forwarding.reachable()),
        )


@dataclass(frozen=True, slots=True)
class Scope:
    """The conditions of a rule, as far as they are understood. None: no such condition, or one that is not
    understood."""

    sources: Networks | None = None
    destinations: Networks | None = None
    original: Networks | None = None
    """Destinations before the translation."""
    protocols: frozenset[str] | None = None
    ports: Ports | None = None
    """Destination ports."""
    only_invalid: bool = False
    """Only packets that belong to no flow."""

    def may_match(self, flow: ForwardedFlow) -> bool:
        """Whether the rule may match a packet of the flow, of either direction."""
        if self.only_invalid or (self.protocols is not None and flow.protocol not in self.protocols):
            return False
        if self.original is not None and not _hold(self.original, flow.addresses):
            return False
        there = {endpoint for endpoint in flow.endpoints if self._has_port(endpoint[1])}
        client = [flow.source] if flow.source else None
        if there and _may_hold(self.sources, client) and _may_hold(self.destinations, [a for a, _ in there]):
            return True
        # A rule for a destination that is no endpoint is for another host, unless that is the known client.
        endpoints = [address for address, _ in flow.endpoints]
        to_client = self.destinations is None or bool(client and _hold(self.destinations, client))
        return to_client and _may_hold(self.sources, endpoints) and self.ports is None and bool(endpoints)

    def may_match_untranslated(self, flow: ForwardedFlow) -> bool:
        """Whether it may match a packet that a client sends to one of the virtual addresses."""
        if self.protocols is not None and flow.protocol not in self.protocols:
            return False
        client = [flow.source] if flow.source else None
        there = self.destinations is None or _hold(self.destinations, flow.addresses)
        return self._has_port(flow.port) and _may_hold(self.sources, client) and there

    def _has_port(self, port: int) -> bool:
        return self.ports is None or any(first <= port <= last for first, last in self.ports)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule of another program that refuses flows, or may."""

    chain: str
    text: str
    scopes: tuple[Scope, ...] = ()
    """Its own conditions, and those of each jump on the way to it."""

    def may_match(self, flow: ForwardedFlow) -> bool:
        """Whether it may refuse packets of the flow."""
        return all(scope.may_match(flow) for scope in self.scopes)

    def __str__(self) -> str:
        return f"`{self.text}` in {self.chain}"


def network(text: str) -> Networks | None:
    """A network as one condition; None if it is not understood."""
    try:
        return (ip_network(text, strict=False),)
    except ValueError:
        return None


def listed(refusals: Sequence[Refusal]) -> str:
    """The first of them in words, and the number of the others."""
    more = len(refusals) - MAX_SHOWN
    return ", ".join(map(str, refusals[:MAX_SHOWN])) + (f" and {more} more" if more > 0 else "")


def refusal_text(chain: str, refusals: Sequence[Refusal]) -> str:
    """The warning that these rules of a chain refuse flows of services."""
    return (
        f"{chain}: {listed(refusals)} may refuse flows of services, before vipd's accept: what an "
        "administrator refuses stays refused; hint: accept_forwarded: first in vipd.yaml puts vipd's accept "
        "before it"
    )


def denial_text(denials: Sequence[Refusal]) -> str:
    """The warning that ufw denies something to this host itself that reaches services."""
    return (
        f"ufw denies {listed(denials)}, to this host itself: flows to virtual IPs are forwarded, and pass; "
        "hint: ufw route deny, which vipd's accept does not overrule, or allow_from of the service"
    )


def _may_hold(networks: Networks | None, addresses: Iterable[str] | None) -> bool:
    """Whether one of the addresses, or any address (None), may be in the networks."""
    return networks is None or addresses is None or _hold(networks, list(addresses))


def _hold(networks: Networks, addresses: Collection[str]) -> bool:
    return any(_address(address) in each for address in addresses for each in networks)


@lru_cache(maxsize=4096)
def _address(text: str) -> IPv4Address | IPv6Address:
    return ip_address(text)
