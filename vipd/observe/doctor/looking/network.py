"""Devices, addresses, routes and listening sockets, by `ip` and /proc."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from vipd.model import Protocol
from vipd.observe.doctor.facts import Assigned, Link, Listener, Network, Way
from vipd.observe.doctor.looking.processes import Processes
from vipd.process import ProgramTimeoutError, Runner

TCP_LISTEN, UDP_UNCONNECTED = "0A", "07"
SOCKETS = {
    "tcp": (Protocol.TCP, TCP_LISTEN),
    "tcp6": (Protocol.TCP, TCP_LISTEN),
    "udp": (Protocol.UDP, UDP_UNCONNECTED),
    "udp6": (Protocol.UDP, UDP_UNCONNECTED),
}


async def read_network(targets: Collection[str], ports: Collection[int], root: Path, run: Runner) -> Network:
    """What is known of the network: ways to `targets`, and who listens on `ports`."""
    try:
        links = _links(await _ip(["-d", "link"], run))
        addresses = _addresses(await _ip(["address"], run))
        proxies = [
            *await _ip(["-4", "neighbour", "show", "proxy"], run),
            *await _ip(["-6", "neighbour", "show", "proxy"], run),
        ]
        proxied = frozenset((str(item["dst"]), str(item["dev"])) for item in proxies if "dev" in item)
        ways = await _ways(targets, run)
    except (FileNotFoundError, ProgramTimeoutError):
        return Network(fault="the program ip cannot be run", listeners=listeners(ports, root))
    except (ValueError, KeyError, TypeError) as error:
        return Network(fault=f"the output of ip is not understood: {error}")
    return Network(links, addresses, ways, proxied, listeners(ports, root))


async def _ip(words: list[str], run: Runner) -> list[Mapping[str, Any]]:
    said = await run(["ip", "-j", *words], "")
    return list(json.loads(said.output or "[]"))


def _links(found: Iterable[Mapping[str, Any]]) -> tuple[Link, ...]:
    return tuple(
        Link(
            str(item["ifname"]),
            "UP" in item["flags"],
            about.get("info_kind", ""),
            item.get("master", ""),
            about.get("info_slave_data", {}).get("hairpin") if _on_bridge(about) else None,
            "NOARP" not in item["flags"],
        )
        for item in found
        if "ifname" in item
        for about in [item.get("linkinfo", {})]
    )


def _on_bridge(about: Mapping[str, Any]) -> bool:
    return about.get("info_slave_kind") == "bridge"


def _addresses(found: Iterable[Mapping[str, Any]]) -> tuple[Assigned, ...]:
    return tuple(
        Assigned(str(ip_address(own["local"])), own["prefixlen"], str(item["ifname"]))
        for item in found
        for own in item.get("addr_info", ())
        if "local" in own
    )


async def _ways(targets: Collection[str], run: Runner) -> dict[str, Way]:
    """Where packets to each address go: one program for all, which says nothing where there is no way."""
    if not targets:
        return {}
    said = await run(
        ["ip", "-force", "-j", "-batch", "-"], "".join(f"route get {target}\n" for target in targets)
    )
    ways = dict.fromkeys(targets, Way())
    for line in said.output.splitlines():
        for item in json.loads(line) if line.startswith("[") else ():
            ways[str(ip_address(item["dst"]))] = Way(item.get("dev", ""), item.get("type") == "local")
    return ways


def listeners(ports: Collection[int], root: Path) -> tuple[Listener, ...]:
    """Who listens on some of these ports here; which programs, only as far as /proc lets us see."""
    rows = [row for name in SOCKETS for row in _sockets(root, name) if row[2] in ports]
    owners = Processes(root).holding({inode for *_, inode in rows})
    return tuple(
        Listener(protocol, address, port, *owners.get(inode, ("", 0, "")))
        for protocol, address, port, inode in rows
    )


def _sockets(root: Path, name: str) -> Iterator[tuple[Protocol, str, int, str]]:
    protocol, wanted = SOCKETS[name]
    try:
        lines = (root / "proc/net" / name).read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == wanted:
            address, _, port = fields[1].partition(":")
            yield protocol, _address(address), int(port, 16), fields[9]


def _address(text: str) -> str:
    """An address as the kernel prints it: words of four bytes, each in the order of this machine."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return str(ip_address(packed))
