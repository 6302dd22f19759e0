"""Services for packet tests, each on a VIP of its own, so that tests can share a lab."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import sqrt

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import Lab
from vipd.model.service import Frontend, Protocol, socket_text

VIP_PORT = 80
SERVED_PORT = 8080
ENOUGH = 60
"""Flows: of three equal backends they miss one once in ten thousand million times, of two never."""
ENOUGH_OF_TWO = 30
"""Of two equal backends they miss one once in five hundred million times."""


class Services:
    """Adds services with vipctl, as an operator would."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._numbers = itertools.count(1)

    def add(
        self,
        backends: Sequence[Node],
        *options: str,
        family: int = 4,
        protocol: str = "tcp",
        weights: Sequence[int] = (),
    ) -> Frontend:
        """Add a service with these backends on a fresh VIP; its only frontend, which also is its name."""
        frontend = self.vip(family, protocol)
        named = [backend_text(node, family) for node in backends]
        if weights:
            named = [f"{name}@{weight}" for name, weight in zip(named, weights, strict=True)]
        self._daemon.vipctl("add", str(frontend), *named, *options)
        return frontend

    def vip(self, family: int = 4, protocol: str = "tcp") -> Frontend:
        """A frontend that no other test uses."""
        number = next(self._numbers)
        address = f"10.96.0.{number}" if family == 4 else f"fd00:96::{number:x}"
        return Frontend(address, VIP_PORT, Protocol(protocol))


def fits(observed: Mapping[str, int], weights: Mapping[str, int]) -> bool:
    """Whether each got its weight's part of the flows, give or take six standard deviations: a right
    program fails once in 10^8 times, and a wrong one nearly always."""
    flows, total = sum(observed.values()), sum(weights.values())
    parts = {name: weights.get(name, 0) / total for name in {*observed, *weights}}
    return all(
        abs(observed.get(name, 0) - flows * part) <= 6 * sqrt(flows * part * (1 - part))
        for name, part in parts.items()
    )


def origin(lab: Lab, name: str) -> Node:
    """Where flows start: at the `client`, the `host` or a `backend`."""
    return {"client": lab.client, "host": lab.host, "backend": lab.backends[0]}[name]


def backend_text(node: Node, family: int = 4) -> str:
    return socket_text(node.address(family), SERVED_PORT)
