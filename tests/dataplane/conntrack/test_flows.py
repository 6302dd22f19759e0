"""Real flows through real rules: what heals, and what is left alone (contract 3.3, acceptance 10 and 11)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.dataplane.conntrack.programmed import ProgrammedHost, Spec
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.lab.traffic import Answer
from vipd.dataplane.conntrack.entries import Entry
from vipd.dataplane.conntrack.stale import FlowTarget, Reason, default_target
from vipd.model.forwarding import Forwarding
from vipd.model.service import Frontend, Protocol

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("empty_table")]

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
def host(lab: Lab) -> ProgrammedHost:
    return ProgrammedHost(lab)


@pytest.fixture
def empty_table(host: ProgrammedHost) -> None:
    host.declare()
    host.forget_flows()
    host.clean()


def fresh_vip(family: int, protocol: str) -> Frontend:
    number = next(numbers)
    return Frontend(f"10.96.0.{number}" if family == 4 else f"fd00:96::{number:x}", PORT, Protocol(protocol))


def fresh_port() -> int:
    """A source port that no other test uses."""
    return 20000 + next(numbers)


def service(vip: Frontend, *backends: Node, node_port: int | None = None, more: Spec | None = None) -> Spec:
    port = {"port": PORT, "protocol": str(vip.protocol), "target": SERVED}
    if node_port:
        port["node_port"] = node_port
    family = 6 if ":" in vip.address else 4
    named = [node.address(family) for node in backends]
    return {"name": "tested", "address": vip.address, "ports": [port], "backends": named} | (more or {})


@both_families
@pytest.mark.parametrize("protocol", ["udp", "tcp"])
def test_a_flow_that_began_before_the_rules_heals(
    lab: Lab, host: ProgrammedHost, family: int, protocol: str
) -> None:
    vip, port = fresh_vip(family, protocol), fresh_port()
    for declared in ((), (service(vip, lab.backends[0]),)):
        host.declare(*declared)
        tried = lab.client.send(*vip, source_port=port, timeout=SOON)
        assert not tried.answers, "the entry made before the rules should hide them"
    assert host.clean().deleted == {Reason.UNTRANSLATED: 1}
    assert lab.client.send(*vip, source_port=port).all_answered().backends == {"b1": 1}


@both_families
def test_a_udp_flow_leaves_a_backend_that_is_replaced(lab: Lab, host: ProgrammedHost, family: int) -> None:
    vip = fresh_vip(family, "udp")
    host.declare(service(vip, lab.backends[0]))
    with lab.client.open(*vip) as flow:
        assert flow.ask().backend == "b1"
        assert host.clean().deleted == {}
        host.declare(service(vip, lab.backends[1]))
        assert flow.ask().backend == "b1", "the table decides, not the rules"
        assert host.clean().deleted == {Reason.BACKEND_GONE: 1}
        assert flow.ask().backend == "b2"


@both_families
def test_a_udp_flow_stays_with_a_backend_that_takes_no_new_ones(
    lab: Lab, host: ProgrammedHost, family: int
) -> None:
    vip = fresh_vip(family, "udp")
    first, second = (node.address(family) for node in lab.backends[:2])
    host.declare(service(vip, lab.backends[0]))
    with lab.client.open(*vip) as flow:
        before = flow.ask()
        resting: Spec = {"backends": [{"address": first, "weight": 0}, second]}
        host.declare(service(vip, more=resting))
        assert host.clean().deleted == {}
        assert flow.ask() == before
        assert lab.client.send(*vip, count=5).all_answered().backends == {"b2": 5}


@both_families
def test_a_udp_flow_is_refused_when_the_last_backend_leaves_and_heals_when_one_comes(
    lab: Lab, host: ProgrammedHost, family: int
) -> None:
    vip, port = fresh_vip(family, "udp"), fresh_port()
    host.declare(service(vip, lab.backends[0]))
    with lab.client.open(*vip, source_port=port) as flow:
        assert flow.ask().backend == "b1"
        host.declare(service(vip))
        assert flow.ask().backend == "b1"
        assert host.clean().deleted == {Reason.BACKEND_GONE: 1}
        assert flow.try_ask() == "refused"
        host.declare(service(vip, lab.backends[1]))
        host.clean()
        assert flow.ask().backend == "b2"


@both_families
def test_a_udp_flow_to_a_removed_service_ends(lab: Lab, host: ProgrammedHost, family: int) -> None:
    vip = fresh_vip(family, "udp")
    host.declare(service(vip, lab.backends[0]))
    with lab.client.open(*vip) as flow:
        assert flow.ask().backend == "b1"
        host.declare()
        assert host.clean().deleted == {Reason.BACKEND_GONE: 1}
        assert not isinstance(flow.try_ask(SOON), Answer)


@both_families
def test_a_udp_flow_to_a_node_port_leaves_its_backend(lab: Lab, host: ProgrammedHost, family: int) -> None:
    vip, own = fresh_vip(family, "udp"), lab.host.address(family)
    host.declare(service(vip, lab.backends[0], node_port=30053))
    with lab.client.open(own, 30053, "udp") as flow:
        assert flow.ask().backend == "b1"
        host.declare(service(vip, lab.backends[1], node_port=30053))
        assert host.clean().deleted == {Reason.BACKEND_GONE: 1}
        assert flow.ask().backend == "b2"


@both_families
def test_other_flows_to_an_external_address_survive(lab: Lab, host: ProgrammedHost, family: int) -> None:
    """The external address is the host's own, where tunnels end too."""
    vip, own, tunnel, one_way = fresh_vip(family, "udp"), lab.host.address(family), 4789, 4790
    lab.host.serve(udp=[tunnel], name="tunnel")

    def tunnels() -> dict[bytes, Entry]:
        return {e.identity: e for e in host.flows() if e.destination in ((own, tunnel), (own, one_way))}

    more: Spec = {"external_addresses": [own]}
    host.declare(service(vip, lab.backends[0], more=more))
    with lab.client.open(own, tunnel, "udp") as flow, lab.client.open(own, PORT, "udp") as served:
        assert (flow.ask().backend, served.ask().backend) == ("tunnel", "b1")
        # Each direction of a tunnel is a flow of its own that is never answered.
        lab.client.send(own, one_way, "udp", timeout=SOON)
        before = tunnels()
        assert {entry.replied for entry in before.values()} == {True, False}
        for change in ((service(vip, lab.backends[1], more=more),), (service(vip, more=more),), ()):
            host.declare(*change)
            host.clean()
            assert before.keys() == tunnels().keys()
        assert flow.ask().backend == "tunnel"
        assert not isinstance(served.try_ask(SOON), Answer)
    lab.host.kill()


@both_families
def test_an_established_connection_survives_its_backends_removal(
    lab: Lab, host: ProgrammedHost, family: int
) -> None:
    vip = fresh_vip(family, "tcp")
    host.declare(service(vip, lab.backends[0]))
    with lab.client.open(*vip) as flow:
        before = flow.ask()
        for change in ((service(vip, lab.backends[1]),), (service(vip),), ()):
            host.declare(*change)
            assert host.clean().deleted == {}
            assert flow.ask() == before


@both_families
def test_an_established_connection_ends_with_its_backend_if_the_service_wants_it(
    lab: Lab, family: int
) -> None:
    def ending(forwarding: Forwarding) -> FlowTarget:
        return replace(default_target(forwarding), end_stale_flows=True)

    host, vip = ProgrammedHost(lab, ending), fresh_vip(family, "tcp")
    host.declare(service(vip, *lab.backends[:2]))
    with lab.client.open(*vip) as first, lab.client.open(*vip) as second:
        flows = {flow: flow.ask().backend for flow in (first, second)}
        (stays,) = [n for n in lab.backends[:2] if n.name == flows[first]]
        (leaves,) = [n for n in lab.backends[:2] if n is not stays]
        host.declare(service(vip, stays))
        ended = sum(name == leaves.name for name in flows.values())
        assert sum(host.clean().deleted.values()) == ended
        assert first.ask().backend == stays.name
        host.declare(service(vip, leaves))
        assert host.clean().deleted == {Reason.BACKEND_GONE: 2 - ended}
        assert first.try_ask() == "ECONNRESET"
