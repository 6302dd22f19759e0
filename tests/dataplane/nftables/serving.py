"""A lab of a client, a host and three backends, and services over them that the nftables dataplane serves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.lab.inside import Synced, synced
from tests.lab.node import Node
from tests.lab.topology import CLUSTER_CIDRS, HOST_TOWARDS_BACKENDS, Lab
from vipd.model.service import Backend, Protocol, Service, ServicePort

SERVED = 8080
PORTS = (ServicePort(80, Protocol.TCP, "tcp", SERVED), ServicePort(80, Protocol.UDP, "udp", SERVED))
VIPS = {4: "10.96.0.1", 6: "fd00:96::1"}
CLIENTS = str(Path(__file__).parent / "clients.py")
MANY, MANY_NETWORK = "10.20.0.1", "10.20.0.0/16"
"""Addresses of the client besides the lab's own."""


def many_clients(lab: Lab, vip: str, count: int, first: str = MANY, port: int = 80) -> dict[str, str]:
    """Which backend answers each of many addresses of the client; all of one process."""
    asked = ("many", vip, str(port), first, str(count))
    output = lab.client.run(sys.executable, "-I", CLIENTS, *asked, timeout=290).stdout
    answers: dict[str, str] = json.loads(output)
    return answers


@contextmanager
def built_lab() -> Iterator[Lab]:
    """A lab whose client has many addresses."""
    with Lab() as built:
        built.serve_everywhere(SERVED)
        built.host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        built.client.run("ip", "route", "add", "local", MANY_NETWORK, "dev", "lo")
        built.host.run("ip", "route", "add", MANY_NETWORK, "via", built.client.ipv4)
        yield built


def synced_in(lab: Lab, state_dir: Path, own: tuple[str, ...] = (), **more: Any) -> Synced:
    """A dataplane of the lab's host, with its own addresses unless others are given."""
    addresses = own or (*HOST_TOWARDS_BACKENDS.values(), lab.host.ipv4, lab.host.ipv6)
    cidrs = list(CLUSTER_CIDRS)
    return synced("nftables", lab.host.namespace, state_dir, own=addresses, cluster_cidrs=cidrs, **more)


def web(lab: Lab, *weights: int, backends: tuple[Node, ...] | None = None) -> Service:
    """A service of both families over the lab's backends."""
    nodes = lab.backends if backends is None else backends
    given = weights or (1,) * len(nodes)
    pairs = list(zip(nodes, given, strict=True))
    return Service(
        "web",
        tuple(VIPS.values()),
        PORTS,
        tuple(Backend(node.address(family), None, weight) for family in (4, 6) for node, weight in pairs),
    )


def other(service: Service, **changes: object) -> Service:
    """The same service but for these fields."""
    return replace(service, **changes)  # type: ignore[arg-type]
