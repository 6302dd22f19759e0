"""A backend with more live flows than its share gets fewer new ones, and one with its maximum none, until
they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import pytest

from tests.lab.daemon import Daemon
from tests.lab.flow import finish, read_line
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.packets.outside import SILENCE
from tests.packets.services import Services, backend_text
from vipd.model.service import Frontend

pytestmark = [pytest.mark.root, pytest.mark.nightly(each_time="nftables")]

HELD = 150
FLOWS = 300
HOLD = """
import socket, sys
held = [socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) for _ in range(int(sys.argv[3]))]
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_flows(client: Node, vip: Frontend) -> Iterator[None]:
    """Connections that stay open within the block."""
    process = client.start(sys.executable, "-I", "-c", HOLD, vip.address, str(vip.port), str(HELD))
    try:
        assert read_line(process) == "open"
        yield
    finally:
        process.kill()
        finish(process)


def share(daemon: Daemon, vip: Frontend, backend: Node) -> float:
    (forwarding,) = daemon.get(f"services/{quote(str(vip), safe='')}")["service"]["forwardings"]
    found = {each["endpoint"]: each["share"] for each in forwarding["endpoints"]}
    return float(found[backend_text(backend)])


def test_live_flows_lower_a_share_until_they_end(lab: Lab, daemon: Daemon, services: Services) -> None:
    busy, *others = lab.backends
    vip = services.add([busy], "--balance", "least-connections")
    with held_flows(lab.client, vip):
        for other in others:
            daemon.vipctl("add-backend", str(vip), backend_text(other))
        daemon.wait_until(lambda: share(daemon, vip, busy) < 0.05, True)
        daemon.wait_in_sync()
        answered = lab.client.send(*vip, count=FLOWS).all_answered().backends
        assert 0 <= answered.get(busy.name, 0) < FLOWS / 8
        assert "of its weight, for its live flows" in daemon.vipctl("describe", str(vip)).stdout
    daemon.wait_until(lambda: share(daemon, vip, busy) > 0.25, True)
    daemon.wait_in_sync()
    answered = lab.client.send(*vip, count=FLOWS).all_answered().backends
    assert answered[busy.name] > FLOWS / 8


def test_a_full_backend_gets_no_flows_until_some_end(lab: Lab, daemon: Daemon, services: Services) -> None:
    full, other = lab.backends[:2]
    vip = services.add([full])
    daemon.vipctl("set", f"{vip}/{backend_text(full)}", "--max-connections", str(HELD))
    with held_flows(lab.client, vip):
        daemon.wait_until(lambda: share(daemon, vip, full), 0.0)
        daemon.wait_in_sync()
        assert lab.client.send(*vip).failures == {"refused": 1}
        told = daemon.vipctl("describe", str(vip)).stdout
        assert "MAX CONN" in told
        assert f"full: it has its {HELD} connections" in told
        daemon.vipctl("add-backend", str(vip), backend_text(other))
        daemon.wait_in_sync()
        assert lab.client.send(*vip, count=20).all_answered().backends == {other.name: 20}
    daemon.wait_until(lambda: share(daemon, vip, full), 0.5)
    daemon.wait_in_sync()
    assert full.name in lab.client.send(*vip, count=100).all_answered().backends


def test_while_all_are_full_new_flows_meet_the_fallback(lab: Lab, daemon: Daemon, services: Services) -> None:
    full, spare = lab.backends[:2]
    vip = services.add([full], "--fallback", "drop")
    daemon.vipctl("set", f"{vip}/{backend_text(full)}", "--max-connections", str(HELD))
    with held_flows(lab.client, vip):
        daemon.wait_until(lambda: share(daemon, vip, full), 0.0)
        daemon.wait_in_sync()
        lab.client.send(*vip, count=2, timeout=SILENCE).all_failed("timeout")
        daemon.vipctl("set", str(vip), "--fallback", "keep")
        daemon.wait_in_sync()
        lab.client.send(*vip, count=2).all_failed("refused")  # `keep` is about health, and no flow too many
        daemon.vipctl("set", str(vip), "--fallback", backend_text(spare))
        daemon.wait_in_sync()
        assert lab.client.send(*vip, count=20).all_answered().backends == {spare.name: 20}
    daemon.wait_until(lambda: share(daemon, vip, full), 1.0)
    daemon.wait_in_sync()
    assert lab.client.send(*vip, count=20).all_answered().backends == {full.name: 20}
