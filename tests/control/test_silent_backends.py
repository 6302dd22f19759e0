"""Backends whose flows have no reply are told of after a minute, a line for each host, until they reply."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable
from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import ESTABLISHED, made
from tests.lab.daemon import Daemon
from tests.lab.inside import DATAPLANES
from tests.lab.topology import Lab, Wiring
from vipd.control import silent_backends
from vipd.control.silent_backends import HOSTS_NAMED, POLL_SECONDS, SilentBackends
from vipd.dataplane.conntrack import unanswered
from vipd.dataplane.conntrack.entries import TCP_CLOSE, TCP_SYN_SENT, Entry, SocketAddress
from vipd.dataplane.conntrack.scheduler import ConntrackScheduler
from vipd.model.forwarding import Forwarding
from vipd.model.service import Protocol

TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
VIP, HOST, NODE_PORT = ("10.96.0.1", 80), "10.10.0.1", 30080
DEAD, ALIVE = ("10.244.0.1", 8080), ("10.244.0.2", 8080)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Story:
    """A table of flows, and readings of it in simulated time."""

    def __init__(self, *forwardings: Forwarding) -> None:
        self.table, self.seconds = FakeTable(), 1000.0
        self.forwardings = {f.key.service: (f,) for f in forwardings}
        scheduler = ConntrackScheduler(lambda: self.seconds)
        scheduler.services_changed({f.key: f for f in forwardings})
        scheduler.host_changed(frozenset({HOST}))
        self.watched = SilentBackends(
            scheduler,
            lambda: self.forwardings,
            lambda: BEGAN + timedelta(seconds=self.seconds - 1000),
            self.table.connect,
            lambda: self.seconds,
        )

    def add(self, *entries: Entry) -> None:
        self.table.entries.update({entry.source[1]: entry for entry in entries})

    def poll(self, seconds: float = 0) -> list[str]:
        """Read for so long, at least once; returns the warnings."""
        until = self.seconds + seconds
        while True:
            asyncio.run(self.watched.poll())
            self.seconds += POLL_SECONDS
            if self.seconds > until:
                return self.watched.warnings()


def flow(
    port: int,
    backend: SocketAddress = DEAD,
    *,
    replied: bool = False,
    protocol: Protocol = TCP,
    to: SocketAddress = VIP,
) -> Entry:
    """A flow of a client's port; the port is its place in the table, too."""
    state = (ESTABLISHED if replied else TCP_SYN_SENT) if protocol is TCP else 0
    return made(("10.10.0.2", port), to, backend, protocol=protocol, tcp_state=state, replied=replied)


def web(protocol: Protocol = TCP) -> Forwarding:
    return forwarding(*VIP, DEAD, ALIVE, protocol=protocol, name="web", node_port=NODE_PORT)


@pytest.mark.parametrize("protocol", [TCP, SCTP])
@pytest.mark.parametrize("to", [VIP, (HOST, NODE_PORT)])
def test_a_backend_without_replies_is_told_of_after_a_minute_until_it_replies(
    protocol: Protocol, to: SocketAddress
) -> None:
    story = Story(web(protocol))
    story.add(flow(1, ALIVE, replied=True, protocol=protocol), flow(3, replied=True, protocol=protocol))
    assert story.poll(60) == []
    story.add(flow(2, protocol=protocol, to=to))
    assert story.poll(45) == []
    (line,) = story.poll(30)
    assert "backend 10.244.0.1 of web: new flows have had no reply since 2026-01-01T00:01:" in line
    assert "hint: vipctl doctor web" in line
    assert story.poll(600) == [line], "an old connection that is open is no reply"
    story.add(flow(4, replied=True, protocol=protocol))
    assert story.poll() == []
    assert story.poll(300) == [], "the flow that its client has given up does not count again"
    story.add(flow(5, protocol=protocol))
    assert len(story.poll(120)) == 1


def test_a_flow_that_is_answered_late_ends_it() -> None:
    story = Story(web())
    story.add(flow(2))
    assert story.poll(120)
    story.add(flow(2, replied=True))
    assert story.poll() == []


def test_a_refusal_is_a_reply_and_flows_past_the_services_do_not_count() -> None:
    story = Story(web())
    refused = made(("10.10.0.2", 2), VIP, DEAD, protocol=TCP, tcp_state=TCP_CLOSE, replied=True)
    story.add(refused, flow(3, to=("10.96.0.99", 80)), made(("10.10.0.2", 4), DEAD, protocol=TCP))
    story.add(flow(5, ("10.244.0.77", 8080)))
    assert story.poll(300) == []


def test_flows_that_begin_and_are_answered_are_no_silence() -> None:
    story = Story(web())
    for number in range(20):
        story.add(flow(10 + number), flow(9 + number, replied=True))
        assert story.poll() == []


def test_udp_counts_only_where_others_of_the_service_were_answered() -> None:
    story = Story(web(UDP))
    story.add(flow(1, protocol=UDP), flow(2, ALIVE, protocol=UDP))
    assert story.poll(300) == [], "syslog and statsd never reply"
    story.add(flow(2, ALIVE, protocol=UDP, replied=True))
    (line,) = story.poll(60)
    assert "backend 10.244.0.1 of web" in line
    del story.table.entries[2]
    assert story.poll(60) == [line], "it is known that this service replies"
    del story.table.entries[1]
    assert story.poll() == [], "no flow is left to tell it"


def test_a_dead_host_is_one_line_and_so_are_many() -> None:
    services = [forwarding(f"10.96.0.{n}", 80, DEAD, protocol=TCP, name=f"s{n}") for n in range(1, 9)]
    story = Story(*services)
    story.add(*(flow(n, to=(f"10.96.0.{n}", 80)) for n in range(1, 9)))
    (line,) = story.poll(120)
    assert line.startswith("backend 10.244.0.1 of s1, s2, s3 and 5 more: ")
    backends = [(f"10.244.1.{n}", 8080) for n in range(1, 21)]
    story = Story(forwarding(*VIP, *backends, protocol=TCP, name="web"))
    story.add(*(flow(n, backend) for n, backend in enumerate(backends, 1)))
    lines = story.poll(120)
    assert len(lines) == HOSTS_NAMED + 1
    assert lines[-1] == "and 10 more hosts whose backends do not reply"


def test_a_backend_that_takes_no_new_flows_is_left_alone() -> None:
    story = Story(web())
    story.add(flow(2))
    assert story.poll(120)
    story.forwardings = {"web": (forwarding(*VIP, ALIVE, protocol=TCP, name="web", node_port=NODE_PORT),)}
    assert story.poll() == [], "drained, or unhealthy: its status says so"


@pytest.mark.root
@pytest.mark.nightly
@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_status_tells_of_a_backend_that_drops_packets_until_it_takes_them(dataplane: str) -> None:
    drop = ("INPUT", "-p", "tcp", "--dport", "8080", "-j", "DROP")
    with Lab(Wiring(backends=2)) as lab, Daemon(lab.host, dataplane=dataplane) as daemon:
        lab.serve_everywhere(8080)
        first, second = lab.backends
        ports = f"ports: [{{port: 80, target: 8080}}]\n    backends: [{first.ipv4}, {second.ipv4}]\n"
        services = {"web": "10.96.0.10", "api": "10.96.0.11"}
        daemon.declare(
            "".join(f"  - name: {name}\n    address: {vip}\n    {ports}" for name, vip in services.items())
        )

        def told() -> list[str]:
            return [text.partition(":")[0] for text in daemon.status()["warnings"] if "had no reply" in text]

        def told_under_load() -> list[str]:
            for vip in services.values():
                lab.client.send(vip, 80)
            return told()

        second.run("iptables", "-I", *drop)
        daemon.wait_until(told_under_load, [f"backend {second.ipv4} of web, api"], 240)
        second.run("iptables", "-D", *drop)
        daemon.wait_until(told_under_load, [], 60)


def test_without_a_suspicion_answered_flows_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(web())
    story.add(*(flow(n, replied=True) for n in range(1, 100)))
    story.poll(60)
    assert story.table.dumps == 5
    monkeypatch.setattr(unanswered, "MAX_FLOWS", 10)
    monkeypatch.setattr(silent_backends, "MAX_SUSPECTS", 1)
    story.add(*(flow(n, backend) for n, backend in enumerate((DEAD, ALIVE) * 50, 200)))
    assert len(story.poll(120)) == 1
