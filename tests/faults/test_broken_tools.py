"""A tool that always fails: the old rules serve, nothing accepted is lost, and vipd recovers by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest

from tests.faults.dataplanes import Equipment
from tests.faults.equipment import FailingTools, ToolsOnlyDaemon, as_from_a_cold_start
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

VIP = "10.96.4.1"
IDLE_SECONDS = 10.0
MOST_LOGGED = 20_000


@pytest.fixture(scope="module")
def daemon(lab: Lab, tools: FailingTools, equipment: Equipment) -> Iterator[Daemon]:
    with ToolsOnlyDaemon(tools.equip(lab.host), **equipment.settings) as running:
        running.vipctl("add", f"{VIP}:80/tcp", backend_text(lab.backends[0]), "--name", "old")
        yield running


def failing(lab: Lab, address: str) -> int:
    return lab.client.send(address, 80, timeout=1).failures.total()


def state(daemon: Daemon) -> str:
    try:
        return str(daemon.status()["state"])
    except OSError:
        return "silent"


def grown(tools: FailingTools, since: float) -> bool:
    """Whether some pause between tries was three times as long as the first one. The calls of one try follow
    each other at once."""
    pauses = [b - a for a, b in pairwise(call for call in tools.calls() if call > since) if b - a > 0.3]
    return len(pauses) >= 2 and max(pauses[1:]) > 3 * pauses[0]


@pytest.mark.nightly(each_time="nftables")
def test_old_rules_serve_and_all_is_made_up_for(
    lab: Lab, daemon: Daemon, tools: FailingTools, equipment: Equipment
) -> None:
    second = backend_text(lab.backends[1])
    with tools.being("broken"):
        since = time.clock_gettime(time.CLOCK_BOOTTIME)
        said = daemon.vipctl("add", "10.96.4.2:80/tcp", second, "--name", "new", check=False)
        assert said.returncode == 1
        assert "stored in" in said.stderr
        assert "broken by the test" in said.stderr
        status = daemon.vipctl("status", check=False)
        assert status.returncode == 1
        assert "broken by the test" in status.stdout
        assert daemon.status()["state"] == "failed"
        # No service is to blame for a tool that takes nothing.
        assert "quarantined" not in daemon.vipctl("list").stdout
        assert set(lab.client.send(VIP, 80, count=10).all_answered().backends) == {"b1"}
        daemon.wait_until(partial(grown, tools, since), True)
        # Accepted while broken, both from vipctl and from a file.
        daemon.vipctl("add-backend", "old", second, check=False)
        daemon.write(f"- {{name: filed, address: 10.96.4.3, ports: [80/tcp], backends: ['{second}']}}")
    daemon.wait_in_sync()
    assert set(lab.client.send(VIP, 80, count=30).all_answered().backends) == {"b1", "b2"}
    for address in ("10.96.4.2", "10.96.4.3"):
        daemon.wait_until(partial(failing, lab, address), 0)
    daemon.wait_in_sync()
    as_from_a_cold_start(equipment, daemon)


@pytest.mark.nightly(each_time="iptables")
@pytest.mark.parametrize("fault", ["hanging", "stopped"])
def test_a_tool_that_does_not_end_is_made_up_for_while_a_removal_is_cleared_away(
    lab: Lab, daemon: Daemon, tools: FailingTools, equipment: Equipment, fault: str
) -> None:
    """Or the daemon stands still for longer than a tool may do nothing."""
    pid, second = daemon.status()["pid"], backend_text(lab.backends[1])
    daemon.declare(
        f"- {{name: left, address: 10.96.4.6, ports: [80/tcp], backends: ['{second}']}}", "left.yaml"
    )
    begin, calls = len(daemon.log), len(tools.calls())
    daemon.write("", "left.yaml")
    daemon.wait_until(lambda: daemon.endpoints("left"), [])
    with tools.being("hanging" if fault == "hanging" else "slow"):
        daemon.write(
            f"- {{name: late, address: 10.96.4.7, ports: [80/tcp], backends: ['{second}']}}", "late.yaml"
        )
        if fault == "hanging":
            daemon.wait_until(lambda: "hangs" in daemon.log[begin:], True)
        else:
            daemon.wait_until(lambda: len(tools.calls()) > calls, True)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(IDLE_SECONDS + 1)
            os.kill(pid, signal.SIGCONT)
    daemon.wait_until(lambda: daemon.endpoints("late"), [second])
    daemon.wait_in_sync()
    as_from_a_cold_start(equipment, daemon)
    assert daemon.status()["pid"] == pid
    assert "Traceback" not in daemon.log[begin:]
    assert len(daemon.log) - begin < MOST_LOGGED
    for address in (VIP, "10.96.4.7"):
        lab.client.send(address, 80, count=10).all_answered()
    daemon.declare("", "late.yaml")


@pytest.mark.nightly(each_time="iptables")
def test_broken_at_the_start_it_recovers_too(
    lab: Lab, daemon: Daemon, tools: FailingTools, equipment: Equipment
) -> None:
    daemon.stop()
    before = equipment.rules_of(lab.host)
    try:
        with tools.being("broken"):
            daemon.write("- {name: filed, address: 10.96.4.5, ports: [80/tcp], backends: [10.244.0.11:8080]}")
            with pytest.raises(AssertionError, match="vipd is silent"):
                daemon.start(timeout=0)
            daemon.wait_until(partial(state, daemon), "failed")
            assert equipment.rules_of(lab.host) == before
            lab.client.send(VIP, 80, count=10).all_answered()
    finally:
        daemon.wait_in_sync()
    lab.client.send("10.96.4.5", 80, count=5).all_answered()
    as_from_a_cold_start(equipment, daemon)
