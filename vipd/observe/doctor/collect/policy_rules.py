"""Routing rules and VRFs that send some packets for an address another way than `ip route get` says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any

from vipd.observe.doctor.facts import Link, PolicyRule, Route

MAX_TABLES = 20
"""Maximum number of routing tables that are read."""
MAX_ROUTES = 10_000
"""A larger table is not searched."""
_REFUSALS = ("unreachable", "blackhole", "prohibit")
_SELECTORS = ("fwmark", "iif", "ipproto", "sport", "dport", "tos", "not")
"""Conditions beside the addresses. Not `oif` and `uid_start`: only packets of this host's programs match."""
_LOCAL = "local"

IpNetwork = IPv4Network | IPv6Network
Ask = Callable[[list[str]], Awaitable[list[Mapping[str, Any]]]]
"""Runs `ip -j` with some words. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule of one family."""

    text: str
    priority: int
    destination: IpNetwork | None
    conditional: bool
    """Only some packets for an address match."""
    table: str
    """Empty: it refuses packets."""
    least_length: int = 0
    """Routes with shorter prefixes do not count."""


async def read_policy_rules(
    ways: Mapping[str, Route], connected: Collection[IpNetwork], links: Collection[Link], ask: Ask
) -> tuple[PolicyRule, ...]:
    """The rules and VRFs that concern these addresses. `connected` are the networks of this host.

    Routing tables are only read where such a rule names them: the main one may be very large.
    """
    found: list[PolicyRule] = []
    for family in (4, 6):
        targets = [address for address in ways if ip_address(address).version == family]
        if not targets:
            continue
        rules = [*_vrfs(links), *map(_rule, await ask([f"-{family}", "rule"]))]
        tables = dict.fromkeys(rule.table for rule in rules if rule.conditional and rule.table)
        routes = {}
        for table in list(tables)[:MAX_TABLES]:
            routes[table] = (await ask([f"-{family}", "route", "show", "table", table]))[:MAX_ROUTES]
        for place, rule in enumerate(rules):
            if rule.conditional:
                before = [other for other in rules[:place] if not other.conditional]
                free = [a for a in targets if not _decided(a, before, ways, connected)]
                taken = {a: way for a in free if (way := _way(a, rule, routes)) is not None}
                found.append(PolicyRule(rule.text, rule.priority, taken))
    return tuple(rule for rule in found if rule.routes)


def _vrfs(links: Collection[Link]) -> Iterator[_Rule]:
    for vrf in links:
        devices = [link.name for link in links if link.master == vrf.name]
        if vrf.vrf_table is not None and devices:
            yield _Rule(f"VRF {vrf.name} ({', '.join(devices)})", 1000, None, True, str(vrf.vrf_table))


def _rule(item: Mapping[str, Any]) -> _Rule:
    source, to = _network(item.get("src", "all"), item.get("srclen")), item.get("dst", "all")
    selectors = [name for name in _SELECTORS if name in item]
    words = ["not"] if "not" in item else []
    words += [f"from {source or 'all'}"] + ([f"to {_network(to, item.get('dstlen'))}"] if to != "all" else [])
    for name in selectors:
        mask = f"/{item['fwmask']}" if name == "fwmark" and "fwmask" in item else ""
        words += [f"{name} {item[name]}{mask}"] if name != "not" else []
    table = str(item.get("table", ""))
    action = str(item.get("action", "")) or (f"lookup {table}" if table else "")
    # A rule for programs of this host, or of a kind that is not known, concerns no forwarded packet here.
    ignored = "oif" in item or "uid_start" in item or "l3mdev" in item or "goto" in item
    refuses = item.get("action") in _REFUSALS
    return _Rule(
        " ".join((*words, action)),
        int(item.get("priority", 0)),
        _network(to, item.get("dstlen")),
        (source is not None or bool(selectors)) and not ignored and (bool(table) or refuses),
        "" if ignored else table,
        int(item.get("suppress_prefixlen", -1)) + 1,
    )


def _network(address: object, length: object) -> IpNetwork | None:
    if address == "all":
        return None
    return ip_network(f"{address}/{length}" if length is not None else str(address), strict=False)


def _decided(
    address: str, before: Collection[_Rule], ways: Mapping[str, Route], connected: Collection[IpNetwork]
) -> bool:
    """Whether an earlier rule, for every packet, has a route to an address."""
    near = any(ip_address(address) in network for network in connected)
    return any(
        bool(ways[address].device) if rule.least_length == 0 else near
        for rule in before
        if rule.table and rule.table != _LOCAL and _concerns(rule, address)
    )


def _concerns(rule: _Rule, address: str) -> bool:
    return rule.destination is None or ip_address(address) in rule.destination


def _way(address: str, rule: _Rule, tables: Mapping[str, list[Mapping[str, Any]]]) -> Route | None:
    """The way by which a rule sends packets for an address; None if it has none, so that later ones count."""
    if not _concerns(rule, address):
        return None
    if not rule.table:
        return Route()
    best: tuple[int, int, Mapping[str, Any]] | None = None
    for item in tables.get(rule.table, ()):
        to = item.get("dst", "default")
        network = None if to == "default" else ip_network(to, strict=False)
        length = network.prefixlen if network else 0
        if (network is None or ip_address(address) in network) and length >= rule.least_length:
            candidate = (-length, int(item.get("metric", 0)), item)
            best = candidate if best is None or candidate[:2] < best[:2] else best
    if best is None or best[2].get("type") == "throw":
        return None
    route = best[2]
    hop = next(iter(route.get("nexthops", ())), route)
    return Route() if route.get("type") in _REFUSALS else Route(str(hop.get("dev", "")))
