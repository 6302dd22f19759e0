"""Clients that take all connections they can, where there are few descriptors: files are read, dead backends
leave, programs run, and the log stays small."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.dataplanes import Equipment
from tests.lab.daemon import Daemon
from tests.lab.flow import finish
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

DESCRIPTORS = 128
CONNECTIONS = 400
PORT = 9000
MOST_LOGGED = 20_000


@dataclass
class NarrowNode(Node):
    def inside(self, argv: Any) -> list[str]:
        return super().inside(["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}", *argv])


@pytest.mark.nightly(each_time="nftables")
def test_idle_clients_keep_vipd_from_nothing(lab: Lab, equipment: Equipment) -> None:
    good, dying = lab.backends
    server = dying.serve(tcp=[PORT])
    host, backends = lab.host, [backend_text(good), f"{dying.ipv4}:{PORT}"]
    check = "check: {type: tcp, interval: 1s, timeout: 1s, fall: 2}"
    declared = f"- {{name: asked, address: 10.96.11.1, ports: [80/tcp], backends: {backends}, {check}}}"
    node = NarrowNode(host.namespace, "", "", "")
    with Daemon(node, declared, **equipment.settings) as daemon, contextlib.ExitStack() as clients:
        daemon.wait_until(lambda: sorted(daemon.endpoints("asked")), sorted(backends))
        for _ in range(CONNECTIONS):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(daemon.socket))
        late = f"- {{name: late, address: 10.96.11.2, ports: [80/tcp], backends: ['{backends[0]}']}}"
        daemon.write(late, "late.yaml")
        finish(server)
        daemon.wait_until(lambda: lab.client.send("10.96.11.2", 80, timeout=1).failures.total(), 0)
        daemon.wait_until(lambda: lab.client.send("10.96.11.1", 80, count=20, timeout=1).failures.total(), 0)
        daemon.wait_until(lambda: "is unhealthy: connection refused" in daemon.log, True)
        lab.client.send("10.96.11.1", 80, count=40).all_answered()
        assert "Traceback" not in daemon.log
        assert len(daemon.log) < MOST_LOGGED
