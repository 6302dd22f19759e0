"""What can be told of legacy tables, whose traces come by the kernel's log."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.lab.flow import finish, read_line
from tests.lab.node import Node
from tests.observe.explain.probe_lab import ROOT
from tests.observe.live_trace.conftest import LOGGER
from vipd.observe.live_trace import legacy as legacy_log

pytestmark = pytest.mark.root

HOLD = """
import sys
from vipd.observe.live_trace.legacy import _bind
from vipd.host.netlink_socket import open_netlink
held = open_netlink()
_bind(held)
print("READY", flush=True)
sys.stdin.read()
"""


def sent(host: Node) -> tuple[str, str]:
    """What `trace --send` prints of a connection to this host that nobody takes, and what it complains of."""
    command = ("-m", "vipd.cli.main", "--socket", "/nowhere", "trace", "--send", "127.0.0.1:9/tcp")
    ended = host.run(sys.executable, *command, timeout=60.0)
    return ended.stdout, ended.stderr


def test_a_log_that_somebody_else_takes(host: Node, legacy: str) -> None:
    """Then only what becomes of the packet can be told, and why that is all."""
    end = "kernel:   goes on unchanged; connection refused"
    out, err = sent(host)
    assert out.splitlines()[1:4] == ["  nat (legacy), hook output", "    OUTPUT    -j ACCEPT", end]
    assert "legacy" not in err
    holder = host.start("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", HOLD)
    assert read_line(holder, 60.0) == "READY"
    out, err = sent(host)
    assert out.splitlines()[1] == end
    assert (
        "cannot read the traces of legacy iptables: Operation not permitted; perhaps another program" in err
    )
    finish(holder)
    assert host.sysctl(LOGGER) == legacy


def test_a_legacy_policy(host: Node, legacy: str) -> None:
    host.run("iptables-legacy", "-P", "INPUT", "DROP")
    try:
        out, _ = sent(host)
    finally:
        host.run("iptables-legacy", "-P", "INPUT", "ACCEPT")
    lines = out.splitlines()
    assert [line.split() for line in lines[-4:-1]] == [
        ["filter", "(legacy),", "hook", "input"],
        ["INPUT", "policy", "DROP"],
        ["kernel:", "is", "dropped"],
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_child_that_has_done_nothing_yet_puts_the_logger_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """On a busy machine a signal came before the child ignored it, and the logger stayed."""
    setting = tmp_path / "2"
    setting.write_text("NONE")
    monkeypatch.setattr(os, "setsid", lambda: time.sleep(0.5))
    switched = legacy_log._logger_switched(setting)
    with switched:
        assert setting.read_text() == legacy_log.WANTED
        os.kill(switched._guard, number)
    assert setting.read_text() == "NONE"
