"""However tracing ends, nothing of it is left in the kernel."""

from __future__ import annotations

import os
import signal

import pytest

from tests.lab.flow import Process, finish, read_line
from tests.lab.node import Node
from tests.observe.live_trace import tracing
from tests.observe.live_trace.tracing import PATIENCE

pytestmark = pytest.mark.root

TARGET = "10.96.0.10:80/tcp"

ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]


def tables(host: Node) -> str:
    """Every table of nft."""
    return host.run("nft", "list", "tables").stdout.strip()


def begun(host: Node, *options: str) -> Process:
    """A trace that waits for packets."""
    return tracing.begun(host, tracing.NOBODY, *options, TARGET)


@pytest.mark.parametrize("number", ENDS)
def test_the_table_goes_with_its_process(host: Node, number: signal.Signals) -> None:
    process = begun(host)
    assert tables(host) == f"table inet vipd-trace-{process.pid}"
    os.kill(process.pid, number)
    code = process.wait(PATIENCE)
    assert code == (130 if number is signal.SIGINT else -number)
    assert tables(host) == ""
    finish(process)


def test_two_at_a_time_do_not_meet(host: Node) -> None:
    first, second = begun(host), begun(host)
    assert tables(host).count("vipd-trace-") == 2
    first.kill()
    first.wait(PATIENCE)
    assert tables(host) == f"table inet vipd-trace-{second.pid}"
    # Somebody else's flush does not end it, and neither does it keep others from flushing.
    host.run("nft", "flush", "ruleset")
    assert tables(host) == f"table inet vipd-trace-{second.pid}"
    second.kill()
    second.wait(PATIENCE)
    assert tables(host) == ""
    finish(first)
    finish(second)


def test_a_wait_that_ran_out(host: Node) -> None:
    process = begun(host, "--timeout", "1s")
    assert process.wait(PATIENCE) == 5
    assert "no packet of a new flow" in read_line(process)
    assert tables(host) == ""
    finish(process)
