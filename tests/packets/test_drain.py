"""Drain, disable and resume, as an operator orders them and as flows feel them."""

from __future__ import annotations

import sys
import time

import pytest

from tests.lab.daemon import Daemon
from tests.lab.flow import Flow, finish
from tests.lab.node import Node
from tests.lab.steady_client import steady_client
from tests.lab.topology import Lab
from tests.lab.traffic import Answer
from tests.packets.services import ENOUGH, SERVED_PORT, Services, backend_text
from vipd.model.service import Frontend, Protocol

pytestmark = [pytest.mark.root, pytest.mark.nightly(each_time="nftables")]

NO_FLOWS_SECONDS = 60
LIVES = (3, 10, 30, 90)
"""Seconds that an order is given; more where the machine was too slow to look before they were over."""


def place(vip: Frontend, backend: Node, family: int = 4) -> str:
    return f"{vip}/{backend_text(backend, family)}"


def serving(lab: Lab, vip: Frontend) -> set[str]:
    return set(lab.client.send(*vip, count=ENOUGH).all_answered().backends)


@pytest.mark.parametrize("family", [4, 6])
def test_a_drained_backend_keeps_its_flows_and_gets_no_more(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    vip = services.add(lab.backends, family=family)
    with lab.client.open(*vip) as flow:
        (drained,) = [node for node in lab.backends if node.name == flow.ask().backend]
        output = daemon.vipctl("drain", place(vip, drained, family), "--reason", "kernel update").stdout
        assert output == f"draining {place(vip, drained, family)}; ends by vipctl resume\n"
        assert serving(lab, vip) == {node.name for node in lab.backends} - {drained.name}
        assert flow.ask().backend == drained.name
        described = daemon.vipctl("describe", str(vip)).stdout
        assert "draining by" in described
        assert "kernel update" in described
    daemon.vipctl("resume", place(vip, drained, family))
    assert serving(lab, vip) == {node.name for node in lab.backends}


def test_waiting_ends_when_the_last_flow_does(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends[:1], "--fallback", backend_text(lab.backends[1]))
    with lab.client.open(*vip) as flow:
        assert flow.ask().backend == lab.backends[0].name
        impatient = daemon.vipctl(
            "drain", place(vip, lab.backends[0]), "--wait", "--timeout", "1s", check=False
        )
        assert impatient.returncode == 5
        assert "1 flow left" in impatient.stderr
        began = time.monotonic()
        waiting = lab.host.start(
            sys.executable, "-m", "vipd.cli.main", "--socket", str(daemon.socket),
            "drain", place(vip, lab.backends[0]), "--wait",
        )  # fmt: skip
        time.sleep(1)
        assert waiting.poll() is None
    assert waiting.wait(NO_FLOWS_SECONDS) == 0
    assert time.monotonic() - began >= 1
    finish(waiting)


def test_an_address_is_drained_in_every_service_under_load_without_a_failure(
    lab: Lab, daemon: Daemon, services: Services
) -> None:
    first, second = services.add(lab.backends), services.add(lab.backends)
    leaving = lab.backends[2]
    with steady_client(lab.client, first.address, first.port) as outcome:
        for _ in range(3):
            daemon.vipctl("drain", "--address", leaving.address(4), "--wait", "--timeout", "90s")
            assert leaving.name not in serving(lab, first) | serving(lab, second)
            later = services.add(lab.backends)
            assert leaving.name not in serving(lab, later), "the order holds for services to come"
            daemon.vipctl("resume", "--address", leaving.address(4))
            assert leaving.name in serving(lab, first)
    assert outcome["failed"] == {}
    assert int(str(outcome["answered"])) > 40


@pytest.mark.parametrize("family", [4, 6])
def test_a_disabled_backend_loses_its_udp_flows(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    vip = services.add(lab.backends[:2], family=family, protocol="udp")
    with lab.client.open(*vip) as flow:
        before = flow.ask().backend
        (out,) = [node for node in lab.backends if node.name == before]
        daemon.vipctl("drain", place(vip, out, family))
        assert flow.ask().backend == before, "a drain leaves flows alone"
        daemon.vipctl("disable", place(vip, out, family))
        deadline = time.monotonic() + 60
        # A datagram that is on its way while its flow ends is lost: that one has no answer says nothing.
        while (now := answerer(flow)) in (before, "timeout") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert {before, now} == {node.name for node in lab.backends[:2]}


def answerer(flow: Flow) -> str:
    outcome = flow.try_ask(2)
    return outcome.backend if isinstance(outcome, Answer) else outcome


@pytest.mark.nightly(each_time="iptables")
def test_pins_hold_for_their_time_only(lab: Lab, daemon: Daemon, services: Services) -> None:
    for seconds in LIVES:
        vip = services.add(lab.backends, "--affinity", "10m")
        (pinned,) = lab.client.send(*vip).all_answered().backends
        (leaving,) = [node for node in lab.backends if node.name == pinned]
        ordered = time.monotonic()
        daemon.vipctl("drain", place(vip, leaving), "--pins-until", f"{seconds}s")
        kept = set(lab.client.send(*vip, count=20).all_answered().backends)
        in_time = time.monotonic() - ordered < seconds
        assert pinned not in set(lab.host.send(*vip, count=ENOUGH).all_answered().backends)
        if in_time:
            break
    assert in_time, "the machine is too slow to tell"
    assert kept == {pinned}
    deadline = time.monotonic() + seconds + 60
    while pinned in lab.client.send(*vip, count=5).all_answered().backends and time.monotonic() < deadline:
        time.sleep(0.2)
    assert pinned not in lab.client.send(*vip, count=20).all_answered().backends


def test_the_weight_of_a_files_backend_is_an_order_for_each_of_its_ports(lab: Lab, daemon: Daemon) -> None:
    backends = ", ".join(node.address(4) for node in lab.backends[:2])
    ports = f"{{port: 80, target: {SERVED_PORT}, name: a}}, {{port: 81, target: {SERVED_PORT}, name: b}}"
    daemon.declare(f"  - {{name: filed, address: 10.96.7.7, ports: [{ports}], backends: [{backends}]}}\n")
    daemon.vipctl("set", f"filed/{lab.backends[0].address(4)}", "--weight", "0")
    vips = [Frontend("10.96.7.7", port, Protocol.TCP) for port in (80, 81)]
    assert [serving(lab, vip) for vip in vips] == [{lab.backends[1].name}] * 2
    daemon.vipctl("resume", "--all")
    assert [len(serving(lab, vip)) for vip in vips] == [2, 2]
    daemon.declare("  []\n")
