"""What a host's administrators let each source claim: addresses, backends, ports of this host, requests of
checks. Pure.

This host's administrators write files and vipctl's store; others write to etcd. By default a service from
etcd gets no port outside of Kubernetes' range, no link-local backend, and no check request but GET and
HEAD.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from vipd.model.check import Check, HttpProbe
from vipd.model.service import Backend, Protocol, Service, family_of

SourceName: TypeAlias = Literal["file", "cli", "etcd"]
"""Kinds of sources, as `Origin.source` names them."""
SOURCES: tuple[SourceName, ...] = get_args(SourceName)
FILE: SourceName = "file"
CLI: SourceName = "cli"
ETCD: SourceName = "etcd"

BySource: TypeAlias = tuple[str, ...] | Mapping[SourceName, tuple[str, ...]]
"""Networks, or ranges of ports: for all sources, or by source. A source with None has no limit."""

KUBERNETES_PORTS = "30000-32767"
"""Kubernetes' range of node ports."""

ANY_PORT = "1-65535"

ANY_NAME = "."
"""The ending of every DNS name."""

_SAFE_METHODS = ("GET", "HEAD")
_MAX_NAMED = 3
"""Backends that a problem names."""


def limits_of(limits: BySource, source: str) -> tuple[str, ...]:
    """Those of one source."""
    return limits.get(cast("SourceName", source), ()) if isinstance(limits, Mapping) else limits


class NetworkSet:
    """Disjoint ranges of numbers. A lookup is a bisection."""

    def __init__(self, networks: Iterable[str]) -> None:
        """Raises ValueError for an invalid network."""
        parsed = [ip_network(network) for network in networks]
        self._ranges = {
            family: _Ranges((int(n.network_address), int(n.broadcast_address)) for n in some)
            for family in (4, 6)
            if (some := [network for network in parsed if network.version == family])
        }

    def contains(self, address: str) -> bool:
        """Whether an address is in one of the networks."""
        ranges = self._ranges.get(family_of(address))
        return ranges is not None and ranges.contains(int(ip_address(address)))


class _Ranges:
    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(pairs):
            if self._ends and start <= self._ends[-1] + 1:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def contains(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number <= self._ends[index]


class SourceNetworks:
    """The networks that a source is limited to, and the link-local networks among them."""

    def __init__(self, limits: BySource) -> None:
        """Raises ValueError for an invalid network."""
        named = {source: limits_of(limits, source) for source in SOURCES}
        self._all: dict[str, NetworkSet] = {s: NetworkSet(found) for s, found in named.items() if found}
        self._single: dict[str, set[str]] = {
            source: {str(net.network_address) for net in map(ip_network, networks) if net.num_addresses == 1}
            for source, networks in named.items()
        }
        self._link_local: dict[str, NetworkSet] = {
            source: NetworkSet(filter(_within_link_local, networks)) for source, networks in named.items()
        }

    def allows(self, address: str, source: str) -> bool:
        """Whether a source may name an address; a source without networks may name any."""
        networks = self._all.get(source)
        return networks is None or networks.contains(address)

    def allows_link_local(self, address: str, source: str) -> bool:
        """Whether a network that is itself link-local contains the address."""
        return source in self._link_local and self._link_local[source].contains(address)

    def names_alone(self, address: str, source: str) -> bool:
        """Whether a network of this source is this address alone."""
        return address in self._single.get(source, ())

    def is_limited(self, source: str) -> bool:
        """Whether the source has limits."""
        return source in self._all


def _within_link_local(network: str) -> bool:
    return ip_network(network).is_link_local


def source_networks(limits: BySource) -> SourceNetworks:
    """Returns one object for equal limits. Raises ValueError for an invalid network."""
    return _source_networks(_hashable(limits))


def claim_limits(backends: BySource, host_ports: BySource) -> ClaimLimits:
    """Returns one object for equal limits. Raises ValueError for an invalid network or range."""
    return _claim_limits(_hashable(backends), _hashable(host_ports))


_Hashable: TypeAlias = tuple[str, ...] | tuple[tuple[SourceName, tuple[str, ...]], ...]


def _hashable(limits: BySource) -> _Hashable:
    return tuple(sorted(limits.items())) if isinstance(limits, Mapping) else limits


def _limits(hashable: _Hashable) -> BySource:
    return dict(hashable) if hashable and isinstance(hashable[0], tuple) else hashable  # type: ignore[return-value]


@lru_cache(maxsize=8)
def _source_networks(limits: _Hashable) -> SourceNetworks:
    return SourceNetworks(_limits(limits))


@lru_cache(maxsize=8)
def _claim_limits(backends: _Hashable, host_ports: _Hashable) -> ClaimLimits:
    return ClaimLimits(_limits(backends), _limits(host_ports))


class _HostPort(NamedTuple):
    what: str
    number: int


class ClaimLimits:
    """The limits of backends, of this host's ports and of checks."""

    def __init__(self, backends: BySource = (), host_ports: BySource = ()) -> None:
        """Raises ValueError for an invalid network or range."""
        self._backends, self._host_ports = SourceNetworks(backends), host_ports
        ranges = {source: limits_of(host_ports, source) for source in SOURCES}
        self._ports: dict[str, _Ranges] = {source: _ports(some) for source, some in ranges.items() if some}

    def violations(self, service: Service, host_addresses: Collection[str] = ()) -> Iterator[tuple[str, str]]:
        """The claims of a service that exceed its source's limits, each with a hint.

        `host_addresses`: this host's addresses, whose ports are ports of this host.
        """
        source = service.origin.source
        yield from self._port_violations(service, host_addresses)
        for what, hint in self.backend_violations((*service.backends, *service.fallback), source):
            yield f"{service.name}: {what}", hint

    def backend_violations(self, backends: Iterable[Backend], source: str) -> Iterator[tuple[str, str]]:
        """One refusal for all backends that lie outside, and one for all that are link-local."""
        if source != ETCD and not self._backends.is_limited(source):
            return
        addresses = dict.fromkeys(backend.address for backend in backends)
        local = [a for a in addresses if source == ETCD and self._refused_link_local(a, source)]
        if local:
            hint = "declare it in a file, or name the network, such as 169.254.0.0/16, in allowed_backends"
            yield f"{_named(local)} link-local, which etcd's backends must not be", hint
        outside = [a for a in addresses if a not in local and not self._backends.allows(a, source)]
        if outside:
            hint = "choose other backends, or widen allowed_backends in vipd's settings"
            yield f"{_named(outside)} outside allowed_backends", hint

    def resolved_violation(self, address: str, source: str) -> str:
        """Why an address that a name resolved to may be no backend; empty: it may. No declaration names it,
        so it is not link-local from any source: 169.254.169.254 answers with the keys of many clouds' hosts.
        """
        if not self._backends.allows(address, source):
            return "outside allowed_backends"
        if self._refused_link_local(address, source):
            return "link-local, and in no link-local network of allowed_backends"
        return ""

    def names_alone(self, address: str, source: str) -> bool:
        """Whether `allowed_backends` lists this very address for a source, and not only a network with it."""
        return self._backends.names_alone(address, source)

    def _refused_link_local(self, address: str, source: str) -> bool:
        if not address.startswith("169.254.") and ":" not in address:
            return False
        return ip_address(address).is_link_local and not self._backends.allows_link_local(address, source)

    def _port_violations(self, service: Service, own: Collection[str]) -> Iterator[tuple[str, str]]:
        source = service.origin.source
        ports = self._ports.get(source)
        for what, number in _host_ports(service, own) if ports else ():
            if ports and not ports.contains(number):
                named = f"{', '.join(limits_of(self._host_ports, source))} for {source}"
                hint = "choose a port within it, or widen node_port_range in vipd's settings"
                yield f"{service.name}: {what} lies outside node_port_range ({named})", hint


def name_allowed(name: str, allowed: BySource, source: str) -> bool:
    """Whether a source may name backends by a DNS name: only if it ends in one of these names."""
    return any(
        suffix in (ANY_NAME, name) or name.endswith(f".{suffix}") for suffix in limits_of(allowed, source)
    )


def check_violation(check: Check, source: str) -> tuple[str, str] | None:
    """Why a source may not have a check, with a hint. A check from etcd must not modify anything."""
    probe = check.probe
    if source != ETCD or not isinstance(probe, HttpProbe) or probe.method in _SAFE_METHODS:
        return None
    what = f"a check of etcd's may use {' and '.join(_SAFE_METHODS)}, not {probe.method}"
    return what, "use one of these, or declare the service in a file"


def _host_ports(service: Service, own: Collection[str]) -> Iterator[_HostPort]:
    for port in service.ports:
        if port.node_port:
            yield _HostPort(f"node port {port.node_port}/{port.protocol}", port.node_port)
        for address in service.all_addresses() if own else ():
            if address in own:
                yield _HostPort(f"port {port} of this host's address {address}", port.port)
    if service.health_port:
        yield _HostPort(f"health port {service.health_port}/{Protocol.TCP}", service.health_port)


def _ports(ranges: Iterable[str]) -> _Ranges:
    pairs = (each.partition("-") for each in ranges)
    return _Ranges((int(low), int(high or low)) for low, _, high in pairs)


def _named(addresses: list[str]) -> str:
    more = len(addresses) - _MAX_NAMED
    named = ", ".join(addresses[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"backend {named} is" if len(addresses) == 1 else f"backends {named} are"
