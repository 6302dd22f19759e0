"""Health checks at work: who is not fit gets no new flow, and what it had is let go."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.flow import Process, finish, read_line
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.lab.waiting import wait_until
from tests.packets.services import ENOUGH, SERVED_PORT

pytestmark = [pytest.mark.root, pytest.mark.nightly(each_time="nftables")]

SERVER = Path(__file__).with_name("unsteady_server.py")
PORT = 9000
INTERVAL = 1.0
FALL = 3
CHECK = f"interval: {INTERVAL}s, timeout: {INTERVAL}s, rise: 1, fall: {FALL}"
"""A busy machine may answer late, and that must not be taken for a change of state."""
HASTY_CHECK = "interval: 500ms, timeout: 500ms, rise: 1, fall: 2"


class Unsteady:
    """A server on one backend that obeys: serve, hang, fail, weigh N, or die."""

    def __init__(self, node: Node) -> None:
        self.node, self.name, self.address = node, node.name, node.address(4)
        self._process: Process | None = None
        self.start()

    def start(self) -> None:
        self._process = self.node.start(sys.executable, "-I", str(SERVER), self.name, self.address, str(PORT))
        assert read_line(self._process) == "ready"

    def obey(self, *order: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(order) + "\n")
        self._process.stdin.flush()
        assert read_line(self._process) == "done"

    def die(self) -> None:
        if self._process is not None:
            self._process.kill()
            finish(self._process)
            self._process = None


@pytest.fixture(scope="module")
def servers(lab: Lab) -> Iterator[list[Unsteady]]:
    running = [Unsteady(node) for node in lab.backends]
    yield running
    for server in running:
        server.die()


@pytest.fixture
def steady(servers: list[Unsteady]) -> Iterator[list[Unsteady]]:
    yield servers
    for server in servers:
        server.die()
        server.start()


@contextmanager
def declared(daemon: Daemon, servers: list[Unsteady], rest: str, backends: str = "") -> Iterator[str]:
    """A service on TCP and UDP of these servers; its address."""
    named = backends or ", ".join(server.address for server in servers)
    ports = f"[{{port: 80, target: {PORT}}}, {{port: 80, protocol: udp, target: {PORT}}}]"
    daemon.declare(
        f"  - {{name: checked, address: 10.96.8.8, ports: {ports}, backends: [{named}], {rest}}}\n"
    )
    yield "10.96.8.8"
    daemon.declare("  []\n")


def until(condition: Callable[[], object], shown: Callable[[], object] = lambda: "") -> float:
    return wait_until(condition, lambda: f"it did not come about: {shown()}")


def ready(daemon: Daemon) -> int:
    return int(daemon.get("services/checked")["service"]["status"]["ready"])


def until_ready(daemon: Daemon, count: int) -> None:
    """Wait until so many backends are ready, and then until the kernel has it, too, a moment later."""
    until(lambda: ready(daemon) == count)
    daemon.wait_in_sync()


def until_answered_by(lab: Lab, vip: str, *servers: Unsteady) -> None:
    """Wait until new flows are answered by these servers, and by no others. On a busy machine a healthy one
    may be thought unfit for a moment."""
    until(lambda: set(lab.client.send(vip, 80, count=ENOUGH).backends) == {server.name for server in servers})


def answered(lab: Lab, vip: str, count: int = 60, protocol: str = "tcp") -> Counter[str]:
    return lab.client.send(vip, 80, protocol, count=count).all_answered().backends


@pytest.mark.nightly(each_time="nftables")
@pytest.mark.parametrize("check", ["tcp", "http"])
def test_who_dies_leaves_in_time_and_comes_back(
    lab: Lab, daemon: Daemon, steady: list[Unsteady], check: str
) -> None:
    with declared(daemon, steady, f"check: {{type: {check}, {CHECK}}}") as vip:
        until_answered_by(lab, vip, *steady)
        steady[0].die()
        seconds = until(lambda: ready(daemon) == 2)
        print(f"a dead backend left after {seconds:.2f} s; fall x interval is {FALL * INTERVAL} s")
        daemon.wait_in_sync()
        assert steady[0].name not in answered(lab, vip)
        until_answered_by(lab, vip, *steady[1:])
        described = daemon.vipctl("describe", "checked").stdout
        assert "unhealthy: connection refused" in described
        steady[0].start()
        until_answered_by(lab, vip, *steady)
        assert ready(daemon) == 3


@pytest.mark.parametrize("order", ["hang", "fail"])
def test_who_hangs_or_fails_leaves(lab: Lab, daemon: Daemon, steady: list[Unsteady], order: str) -> None:
    with declared(daemon, steady, f"check: {{type: http, {HASTY_CHECK}}}") as vip:
        steady[1].obey(order)
        until_ready(daemon, 2)
        assert steady[1].name not in answered(lab, vip)
        until_answered_by(lab, vip, steady[0], steady[2])
        assert {"hang": "timeout after", "fail": "status 500"}[order] in daemon.vipctl(
            "describe", "checked"
        ).stdout


@pytest.mark.nightly(each_time="nftables")
def test_udp_flows_move_and_pins_are_released(lab: Lab, daemon: Daemon, steady: list[Unsteady]) -> None:
    affinity = "affinity: {by: client-ip, timeout: 10m}"
    with declared(daemon, steady, f"check: {{type: tcp, {CHECK}}}, {affinity}") as vip:
        with lab.client.open(vip, 80, "udp") as flow:
            first = flow.ask().backend
            (gone,) = [server for server in steady if server.name == first]
            gone.die()
            until(lambda: ready(daemon) == 2)
            deadline = time.monotonic() + 60
            while not (moved := str(getattr(flow.try_ask(2), "backend", ""))) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert moved
            assert moved != first
        assert first not in answered(lab, vip, 20, "udp")


def test_fallbacks_when_all_are_unhealthy(lab: Lab, daemon: Daemon, steady: list[Unsteady]) -> None:
    for server in steady:
        server.obey("fail")
    check = f"check: {{type: http, {CHECK}}}"
    with declared(daemon, steady, f"{check}, fallback: keep") as vip:
        until(lambda: "all serve" in str(daemon.get("services/checked")["service"]["status"]["message"]))
        daemon.wait_in_sync()
        assert len(answered(lab, vip)) == 3
        assert "degraded, 3 unhealthy" in daemon.vipctl("list", "checked").stdout
        (warning,) = [w for w in daemon.get("status")["warnings"] if "fallback: keep" in w]
        assert warning.startswith("service checked: no backend is healthy")
    with declared(daemon, steady, check) as vip:
        assert not [w for w in daemon.get("status")["warnings"] if "fallback: keep" in w]
        until_ready(daemon, 0)
        lab.client.send(vip, 80, count=3).all_failed("refused")
    with declared(daemon, steady[:2], f"{check}, fallback: {{backends: [{steady[2].address}]}}") as vip:
        # A fallback is asked as backends are: it serves as soon as it is fit to.
        until(lambda: "1 of the fallback unhealthy" in str(daemon.get("services/checked")))
        daemon.wait_in_sync()
        lab.client.send(vip, 80, count=3).all_failed("refused")
        steady[2].obey("serve")
        until_answered_by(lab, vip, steady[2])


def test_a_backup_serves_only_while_no_other_can(lab: Lab, daemon: Daemon, steady: list[Unsteady]) -> None:
    backends = f"{steady[0].address}, {{address: {steady[1].address}, backup: true}}"
    with declared(daemon, steady, f"check: {{type: tcp, {CHECK}}}", backends) as vip:
        assert set(answered(lab, vip, 20)) == {steady[0].name}
        steady[0].die()
        until(
            lambda: ready(daemon) == 1 and set(lab.client.send(vip, 80, count=5).backends) == {steady[1].name}
        )


@pytest.mark.nightly(each_time="nftables")
def test_a_backend_says_its_weight_and_starts_slowly(
    lab: Lab, daemon: Daemon, steady: list[Unsteady]
) -> None:
    def weights() -> list[int]:
        (tcp, _) = daemon.get("services/checked")["service"]["forwardings"]
        return [e["weight"] for e in sorted(tcp["endpoints"], key=lambda e: str(e["address"]))]

    def shares_told() -> list[float]:
        (tcp, _) = daemon.get("services/checked")["service"]["forwardings"]
        return [e["share"] for e in sorted(tcp["endpoints"], key=lambda e: str(e["address"])) if e["ready"]]

    # A path of its own: what the tests before did to these backends is flapping, if they are asked alike.
    asked = "path: /weights, interval: 2s, timeout: 2s, rise: 1, fall: 3"
    check = f"check: {{type: http, {asked}}}, weight_from: check, slow_start: 15s"
    with declared(daemon, steady, check) as vip:
        steady[0].obey("weigh", "3")
        # Shares too: a backend that the test before has ended, this one too, may still start slowly.
        until(
            lambda: weights() == [3, 1, 1] and len(shares_told()) == 3 and 0.59 < shares_told()[0] < 0.61,
            shown=lambda: daemon.get("services/checked"),
        )
        daemon.wait_in_sync()
        shares = answered(lab, vip, 1500)
        # Its part is 0.6, and the limits are almost eight standard deviations away.
        assert 0.5 < shares[steady[0].name] / 1500 < 0.7
        steady[0].obey("weigh", "0")
        until(lambda: steady[0].name not in answered(lab, vip, 20))
        steady[0].obey("weigh", "1")
        until(lambda: weights() == [1, 1, 1])
        # Once only: who dies and comes back three times within a minute is held down for flapping.
        steady[1].die()
        until(lambda: ready(daemon) == 2)
        steady[1].start()
        until(lambda: len(now := shares_told()) == 3 and 0 < now[1] < now[2])
        assert weights() == [1, 1, 1], "of those who never left, too"


@pytest.mark.nightly(each_time="nftables")
def test_a_dead_backend_leaves_over_ipv6(lab: Lab, daemon: Daemon) -> None:
    backends = ", ".join(f'"{node.ipv6}"' for node in lab.backends)
    ports = f"[{{port: 80, target: {SERVED_PORT}}}]"
    daemon.declare(
        f'  - {{name: six, address: "fd00:96::88", ports: {ports}, backends: [{backends}],'
        f" check: {{type: tcp, {CHECK}}}}}\n"
    )

    def answering() -> set[str]:
        result = lab.client.send("fd00:96::88", 80, count=ENOUGH, timeout=2)
        return set() if result.failures else set(result.backends)

    until(lambda: answering() == {"b1", "b2", "b3"})
    refuse = (
        "table ip6 refusing { chain input { type filter hook input priority 0; tcp dport 8080 reject; }; }"
    )
    lab.backends[0].run("nft", refuse)
    try:
        until(lambda: answering() == {"b2", "b3"})
    finally:
        lab.backends[0].run("nft", "delete", "table", "ip6", "refusing")
    until(lambda: answering() == {"b1", "b2", "b3"})
    daemon.declare("  []\n")


def test_a_check_that_cannot_work_here_is_refused_with_its_line(daemon: Daemon) -> None:
    text = "  - name: other\n    address: 10.96.8.9\n    ports: 80\n    backends: [10.0.0.1]\n"
    daemon.write(text + "    check: {type: exec, command: [/nonexistent/check]}\n", "exec.yaml")
    refused = daemon.vipctl("reload", check=False)
    assert refused.returncode == 1
    assert "exec.yaml:3" in refused.stderr
    assert "/nonexistent/check: no such file" in refused.stderr
    added = daemon.vipctl("apply", "-f", str(daemon.services_dir / "exec.yaml"), check=False)
    assert "not allowed here" in added.stderr
    (daemon.services_dir / "exec.yaml").unlink()
    daemon.reload()
