"""Real flows of a daemon's services: what heals, and what goes on (contract 3.3, acceptance 10 and 11)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.lab.traffic import Answer
from tests.lab.waiting import wait_until
from vipd.model.service import Frontend, Protocol

pytestmark = pytest.mark.root

PORT, SERVED = 80, 8080
SOON = 0.5
"""Seconds to wait for an answer that should not come."""
both_families = pytest.mark.parametrize("family", [4, 6])
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as built:
        built.serve_everywhere(SERVED)
        # Else an entry that nobody answers may end by itself while a slow machine is at work: 30 s.
        for name in ("udp_timeout", "udp_timeout_stream"):
            built.host.sysctl(f"net.netfilter.nf_conntrack_{name}", 600)
        yield built


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    with Daemon(lab.host, reject_unused_ports=False) as made:
        yield made


def fresh_vip(family: int, protocol: str) -> Frontend:
    number = next(numbers)
    return Frontend(f"10.96.0.{number}" if family == 4 else f"fd00:96::{number:x}", PORT, Protocol(protocol))


def service(vip: Frontend, *backends: Node, **port: Any) -> str:
    spec = {
        "name": "tested",
        "address": vip.address,
        "ports": [{"port": PORT, "protocol": str(vip.protocol), "target": SERVED, **port}],
        "backends": [node.address(6 if ":" in vip.address else 4) for node in backends],
    }
    return f"  - {json.dumps(spec)}\n"


@both_families
@pytest.mark.parametrize("protocol", ["udp", "tcp"])
def test_a_flow_that_began_before_the_rules_heals(
    lab: Lab, daemon: Daemon, family: int, protocol: str
) -> None:
    vip, port = fresh_vip(family, protocol), 20000 + next(numbers)
    daemon.declare("")
    assert not lab.client.send(*vip, source_port=port, timeout=SOON).answers
    daemon.declare(service(vip, lab.backends[0]))
    wait_until(lambda: lab.client.send(*vip, source_port=port, timeout=SOON).backends == {"b1": 1}, "b1")


@both_families
@pytest.mark.parametrize("way", ["VIP", "node port"])
def test_a_udp_flow_leaves_a_backend_that_is_replaced(
    lab: Lab, daemon: Daemon, family: int, way: str
) -> None:
    """And is refused when the last one leaves, until another comes; a removed service ends it."""
    vip = fresh_vip(family, "udp")
    to = (vip.address, PORT) if way == "VIP" else (lab.host.address(family), 30053)
    one, other, none = (
        service(vip, *nodes, **({} if way == "VIP" else {"node_port": 30053}))
        for nodes in (lab.backends[:1], lab.backends[1:2], ())
    )
    daemon.declare(one)
    with lab.client.open(*to, "udp") as flow:

        def answer() -> str:
            found = flow.try_ask(SOON)
            return found.backend if isinstance(found, Answer) else found

        assert answer() == "b1"
        for text, expected in ((other, "b2"), (none, "refused"), (one, "b1")):
            daemon.declare(text)
            daemon.wait_until(answer, expected)
        daemon.declare("")
        daemon.wait_until(lambda: isinstance(flow.try_ask(SOON), Answer), False)
