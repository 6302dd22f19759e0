"""Devices, addresses, routes and listening sockets, by `ip` and /proc."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from vipd.host.process import ProgramTimeoutError, Runner
from vipd.host.processes import Processes
from vipd.model.service import Protocol
from vipd.observe.doctor.collect.policy_rules import read_policy_rules
from vipd.observe.doctor.facts import HostAddress, Link, Listener, Network, Route
from vipd.observe.doctor.finding import listed

TCP_LISTEN, UDP_UNCONNECTED = "0A", "07"
SOCKETS = {
    "tcp": (Protocol.TCP, TCP_LISTEN),
    "tcp6": (Protocol.TCP, TCP_LISTEN),
    "udp": (Protocol.UDP, UDP_UNCONNECTED),
    "udp6": (Protocol.UDP, UDP_UNCONNECTED),
}


_WITHOUT_IPV6 = ("tcp6", "udp6")
"""Lists that a kernel without IPv6 does not have."""
_FAILED = re.compile(r"^Command failed -:(\d+)$", re.MULTILINE)
_HAVE_ADDRESS = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT"}
"""States of a neighbour that has answered, or that was configured."""
_UNREACHABLE_TYPES = ("unreachable", "blackhole", "prohibit", "throw")


async def read_network(targets: Collection[str], ports: Collection[int], root: Path, run: Runner) -> Network:
    """Facts about the network: ways to `targets`, and listeners on `ports`."""
    try:
        found, listeners_fault = listeners(ports, root), ""
    except (OSError, ValueError) as error:
        found, listeners_fault = (), f"the list of sockets cannot be read: {error}"
    try:
        network = await _read(targets, run, six=(root / "proc/net/if_inet6").exists())
    except (OSError, ProgramTimeoutError) as error:
        network = Network(fault=f"the program ip cannot be run: {error}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        network = Network(fault=f"the output of ip is not understood: {type(error).__name__}: {error}")
    return replace(network, listeners=found, listeners_fault=listeners_fault)


async def _read(targets: Collection[str], run: Runner, *, six: bool) -> Network:
    families = ("-4", "-6") if six else ("-4",)
    links = _links(await ip_objects(["-d", "link"], run))
    addresses = _addresses(await ip_objects(["address"], run))
    proxies = [item for of in families for item in await ip_objects([of, "neighbour", "show", "proxy"], run)]
    proxied = frozenset((str(item["dst"]), str(item["dev"])) for item in proxies if "dev" in item)
    ways = await _routes_to(targets, run)
    networks = [ip_network(f"{own.address}/{own.length}", strict=False) for own in addresses]
    others: dict[str, str] = {}
    if any(ip_address(target) in network for target in targets for network in networks):
        # On a host with the routes of the whole internet they are not listed for other purposes.
        routes = [
            item for of in families for item in await ip_objects([of, "route", "show", "table", "all"], run)
        ]
        neighbours = _of_neighbours(await ip_objects(["neighbour", "show"], run))
        others = _of_networks(addresses) | neighbours | _of_routers(routes)
    policies = await read_policy_rules(ways, networks, links, lambda words: ip_objects(words, run))
    return Network(links, addresses, ways, proxied, others, policies)


async def ip_objects(words: list[str], run: Runner) -> list[Mapping[str, Any]]:
    """Objects in the output of `ip`. Raises ValueError if it fails, or prints anything else."""
    said = await run(["ip", "-j", *words], "")
    if said.exit_code:
        why = " ".join(said.stderr.split()) or f"exit code {said.exit_code}"
        raise ValueError(f"ip {' '.join(words)}: {why}")
    found = json.loads(said.stdout or "[]")
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise TypeError(f"ip {' '.join(words)}: no list of objects")
    return found


def _links(found: Iterable[Mapping[str, Any]]) -> tuple[Link, ...]:
    return tuple(
        Link(
            str(item["ifname"]),
            "UP" in item["flags"],
            about.get("info_kind", ""),
            item.get("master", ""),
            about.get("info_slave_data", {}).get("hairpin") if _on_bridge(about) else None,
            "NOARP" not in item["flags"],
            item.get("mtu", 0),
            about.get("info_data", {}).get("table") if about.get("info_kind") == "vrf" else None,
        )
        for item in found
        if "ifname" in item
        for about in [item.get("linkinfo", {})]
    )


def _on_bridge(about: Mapping[str, Any]) -> bool:
    return about.get("info_slave_kind") == "bridge"


def _addresses(found: Iterable[Mapping[str, Any]]) -> tuple[HostAddress, ...]:
    return tuple(
        HostAddress(str(ip_address(own["local"])), own["prefixlen"], str(item["ifname"]))
        for item in found
        for own in item.get("addr_info", ())
        if "local" in own
    )


def _of_networks(addresses: Iterable[HostAddress]) -> dict[str, str]:
    """The network and broadcast addresses of this host's networks."""
    found: dict[str, str] = {}
    for own in addresses:
        network = ip_network(f"{own.address}/{own.length}", strict=False)
        if network.prefixlen < network.max_prefixlen - 1:
            found[str(network.network_address)] = f"the address of the network {network}"
            if network.version == 4:
                found[str(network.broadcast_address)] = f"the broadcast address of {network}"
    return found


def _of_neighbours(neighbours: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The addresses of known neighbours."""
    return {
        str(ip_address(neighbour["dst"])): f"a neighbour on {neighbour['dev']}"
        for neighbour in neighbours
        if "lladdr" in neighbour and _HAVE_ADDRESS.intersection(neighbour.get("state", ()))
    }


def _of_routers(routes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The addresses that routes lead over."""
    found: dict[str, str] = {}
    for route in routes:
        to = route.get("dst")
        what = "the default gateway" if to == "default" else f"the next hop to {to}"
        for hop in (route, *route.get("nexthops", ())):
            if gateway := hop.get("gateway") or hop.get("via", {}).get("host"):
                found[str(ip_address(gateway))] = what
    return found


async def _routes_to(targets: Collection[str], run: Runner) -> dict[str, Route]:
    """The next hop to each address: one program reads all; it names the lines without a way.
    Raises ValueError if one has no result."""
    if not targets:
        return {}
    asked = list(targets)
    said = await run(
        ["ip", "-force", "-j", "-batch", "-"], "".join(f"route get {target}\n" for target in asked)
    )
    lines = [int(line) for line in _FAILED.findall(said.stderr)]
    ways = {asked[line - 1]: Route() for line in lines if 0 < line <= len(asked)}
    for text in said.stdout.splitlines():
        for item in json.loads(text) if text.startswith("[") else ():
            nowhere = item.get("type") in _UNREACHABLE_TYPES
            mtu = next((metric["mtu"] for metric in item.get("metrics", ()) if "mtu" in metric), 0)
            way = Route() if nowhere else Route(item.get("dev", ""), item.get("type") == "local", mtu)
            ways[str(ip_address(item["dst"]))] = way
    if silent := [target for target in asked if str(ip_address(target)) not in ways]:
        raise ValueError(f"nothing is said of the way to {listed(silent)}")
    return ways


def listeners(ports: Collection[int], root: Path) -> tuple[Listener, ...]:
    """Listeners on some of these local ports; their programs only as far as /proc shows them.

    Raises OSError and ValueError if the kernel's lists cannot be read.
    """
    rows = [row for name in SOCKETS for row in _sockets(root, name) if row[2] in ports]
    owners = Processes(root).socket_owners({inode for *_, inode in rows})
    return tuple(
        Listener(protocol, address, port, *owners.get(inode, ("", 0, "")))
        for protocol, address, port, inode in rows
    )


def _sockets(root: Path, name: str) -> Iterator[tuple[Protocol, str, int, str]]:
    protocol, wanted = SOCKETS[name]
    try:
        lines = (root / "proc/net" / name).read_text().splitlines()
    except FileNotFoundError:
        if name in _WITHOUT_IPV6:
            return
        raise
    if not lines or "local_address" not in lines[0]:
        raise ValueError(f"/proc/net/{name} has no heading")
    for line in lines[1:]:
        fields = line.split()
        if len(fields) <= 9:
            raise ValueError(f"/proc/net/{name}: {line.strip()!r}")
        if fields[3] == wanted:
            address, _, port = fields[1].partition(":")
            yield protocol, _address(address), int(port, 16), fields[9]


def _address(text: str) -> str:
    """Parses an address as the kernel prints it: words of four bytes, each in the order of this machine."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return str(ip_address(packed))
