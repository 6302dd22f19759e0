"""Real flows of a daemon's services: what heals, and what goes on (contract 3.3, acceptance 10 and 11)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.daemon import Daemon
from tests.lab.flow import Flow
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.lab.traffic import Answer
from vipd.model.service import Frontend, Protocol

pytestmark = pytest.mark.root

PORT, SERVED = 80, 8080
SOON = 0.5
"""Seconds to wait for an answer that should not come."""
WITNESS = {4: Frontend("10.96.99.1", 9, Protocol.UDP), 6: Frontend("fd00:99::9", 9, Protocol.UDP)}
both_families = pytest.mark.parametrize("family", [4, 6])
numbers = itertools.count(1)

Spec = dict[str, object]
"""One service as the declaration has it."""


class Host:
    """The host of a lab, with its daemon."""

    def __init__(self, lab: Lab, daemon: Daemon) -> None:
        self._lab, self._daemon = lab, daemon
        self._turns = itertools.cycle(lab.backends[:2])
        self._witnesses: dict[int, Flow] = {}

    def declare(self, *services: Spec) -> None:
        """Serve these; returns when flows that must end for it have ended. In each family a flow of another
        service shows that, whose backend changes with each declaration."""
        backend = next(self._turns)
        others = [
            {
                "name": f"witness{family}",
                "address": vip.address,
                "ports": {"port": vip.port, "protocol": "udp", "target": SERVED},
                "backends": backend.address(family),
            }
            for family, vip in WITNESS.items()
        ]
        self._daemon.declare("".join(f"  - {json.dumps(spec)}\n" for spec in (*others, *services)))
        for family, vip in WITNESS.items():
            if family not in self._witnesses:
                self._witnesses[family] = self._lab.client.open(*vip).__enter__()
            self._daemon.wait_until(lambda family=family: self._server(family), backend.name)  # type: ignore[misc]

    def _server(self, family: int) -> str:
        answer = self._witnesses[family].try_ask(SOON)
        return answer.backend if isinstance(answer, Answer) else ""

    def close(self) -> None:
        """End the witnesses."""
        for witness in self._witnesses.values():
            witness.__exit__(None, None, None)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as built:
        built.serve_everywhere(SERVED)
        # Else an entry that nobody answers may end by itself while a slow machine is at work: 30 s.
        for name in ("udp_timeout", "udp_timeout_stream"):
            built.host.sysctl(f"net.netfilter.nf_conntrack_{name}", 600)
        yield built


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    with Daemon(lab.host, reject_unused_ports=False) as daemon:
        made = Host(lab, daemon)
        made.declare()
        yield made
        made.close()


def fresh_vip(family: int, protocol: str) -> Frontend:
    number = next(numbers)
    return Frontend(f"10.96.0.{number}" if family == 4 else f"fd00:96::{number:x}", PORT, Protocol(protocol))


def service(vip: Frontend, *backends: Node, node_port: int | None = None, **more: Any) -> Spec:
    port: Spec = {"port": PORT, "protocol": str(vip.protocol), "target": SERVED}
    if node_port:
        port["node_port"] = node_port
    family = 6 if ":" in vip.address else 4
    addresses = [node.address(family) for node in backends]
    return {"name": "tested", "address": vip.address, "ports": [port], "backends": addresses, **more}


@both_families
@pytest.mark.parametrize("protocol", ["udp", "tcp"])
def test_a_flow_that_began_before_the_rules_heals(lab: Lab, host: Host, family: int, protocol: str) -> None:
    vip, port = fresh_vip(family, protocol), 20000 + next(numbers)
    host.declare()
    tried = lab.client.send(*vip, source_port=port, timeout=SOON)
    assert not tried.answers
    host.declare(service(vip, lab.backends[0]))
    assert lab.client.send(*vip, source_port=port).all_answered().backends == {"b1": 1}


@both_families
def test_a_udp_flow_leaves_a_backend_that_is_replaced(lab: Lab, host: Host, family: int) -> None:
    """And is refused when the last one leaves, until another comes; a removed service ends it."""
    vip = fresh_vip(family, "udp")
    host.declare(service(vip, lab.backends[0]))
    with lab.client.open(*vip) as flow:
        assert flow.ask().backend == "b1"
        host.declare(service(vip, lab.backends[1]))
        assert flow.ask().backend == "b2"
        host.declare(service(vip))
        assert flow.try_ask() == "refused"
        host.declare(service(vip, lab.backends[0]))
        assert flow.ask().backend == "b1"
        host.declare()
        assert not isinstance(flow.try_ask(SOON), Answer)


@both_families
def test_a_udp_flow_to_a_node_port_leaves_its_backend(lab: Lab, host: Host, family: int) -> None:
    vip, own = fresh_vip(family, "udp"), lab.host.address(family)
    host.declare(service(vip, lab.backends[0], node_port=30053))
    with lab.client.open(own, 30053, "udp") as flow:
        assert flow.ask().backend == "b1"
        host.declare(service(vip, lab.backends[1], node_port=30053))
        assert flow.ask().backend == "b2"
