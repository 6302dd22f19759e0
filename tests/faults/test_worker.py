"""The worker process, which reads what backends and name servers answer: it may be killed, hang, or be
flooded, and neither a verdict nor the daemon suffers. It has no rights and ends with the daemon."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.dataplanes import NFTABLES
from tests.health.test_endless import CHUNKED, ENDLESS, OK
from tests.lab.daemon import Daemon
from tests.lab.name_server import NEEDED, NameServer
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.lab.waiting import wait_until
from tests.packets.test_checks import Unsteady

pytestmark = pytest.mark.root

PORT = 9000
HOSTILE_PORT = 9001
HOSTILE_CHECKS = 30
FAULTS = {
    signal.SIGKILL: "the worker process was killed by SIGKILL",
    signal.SIGSTOP: "the worker process did not answer for",
}
"""What status says after each signal."""


@pytest.fixture(scope="module")
def servers(lab: Lab) -> Iterator[list[Unsteady]]:
    running = [Unsteady(node) for node in lab.backends]
    yield running
    for server in running:
        server.die()


@pytest.fixture(scope="module")
def daemon(lab: Lab, servers: list[Unsteady]) -> Iterator[Daemon]:
    named = ", ".join(f"{server.address}:{PORT}" for server in servers)
    check = "{type: http, interval: 500ms, timeout: 400ms, rise: 1, fall: 2}"
    text = (
        f"  - {{name: checked, address: 10.96.12.1, ports: [80/tcp], backends: [{named}], check: {check}}}\n"
    )
    with Daemon(lab.host, text, dns_servers=NameServer.place, **NFTABLES.settings) as running:
        running.wait_until(lambda: healths(running), {"healthy"})
        yield running


def healths(daemon: Daemon) -> set[str]:
    view = daemon.get("services/checked")["service"]
    return {endpoint["health"] for forwarding in view["forwardings"] for endpoint in forwarding["endpoints"]}


def ready(daemon: Daemon) -> int:
    return int(daemon.get("services/checked")["service"]["status"]["ready"])


def worker(daemon: Daemon) -> int:
    """The pid of the daemon's worker process; 0 if there is none. It is the child of one of its threads."""
    for listed in Path(f"/proc/{daemon.status()['pid']}/task").glob("*/children"):
        for pid in listed.read_text().split():
            with contextlib.suppress(FileNotFoundError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "vipd-worker":
                    return int(pid)
    return 0


def told(daemon: Daemon) -> str:
    return "\n".join(daemon.status()["warnings"])


def processor_seconds(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("number", FAULTS)
def test_a_worker_that_dies_or_hangs_is_replaced_and_blamed_on_no_backend(
    daemon: Daemon, servers: list[Unsteady], number: signal.Signals
) -> None:
    before, logged = worker(daemon), len(daemon.log)
    os.kill(before, number)
    daemon.wait_until(lambda: FAULTS[number] in told(daemon), True)
    daemon.wait_until(lambda: worker(daemon) not in (0, before), True)
    daemon.wait_until(lambda: "the worker process" in told(daemon), False)
    assert healths(daemon) == {"healthy"}
    assert "unhealthy" not in daemon.log[logged:]
    servers[0].die()
    daemon.wait_until(lambda: ready(daemon), 1)
    servers[0].start()
    daemon.wait_until(lambda: ready(daemon), 2)


def test_the_worker_has_no_rights_and_little_memory(daemon: Daemon) -> None:
    status = Path(f"/proc/{worker(daemon)}/status").read_text()
    rights = dict(re.findall(r"^(Cap\w+|NoNewPrivs|Seccomp):\s+(\w+)$", status, re.MULTILINE))
    assert (rights.pop("NoNewPrivs"), rights.pop("Seccomp")) == ("1", "2")
    assert {name: int(value, 16) for name, value in rights.items()} == dict.fromkeys(rights, 0)
    assert {"CapEff", "CapPrm", "CapBnd"} <= rights.keys()
    limits = Path(f"/proc/{worker(daemon)}/limits").read_text()
    assert re.search(r"^Max data size +268435456 +268435456 ", limits, re.MULTILINE)
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)
    assert (Path(f"/proc/{worker(daemon)}/fd/1")).readlink() == Path("/dev/null")
    environment = Path(f"/proc/{worker(daemon)}/environ").read_bytes()
    assert b"PATH=" not in environment, "it may have passwords"


@NEEDED
def test_names_are_looked_up_by_the_worker(lab: Lab, daemon: Daemon, tmp_path: Path) -> None:
    server = NameServer(lab.host, tmp_path)
    server.addresses("web.internal", [lab.backends[0].ipv4])
    try:
        named = "{name: named, address: 10.96.12.2, ports: [80/tcp], backends: ['dns:web.internal:8080']}"
        daemon.write(f"  - {named}\n", "named.yaml")
        daemon.wait_until(lambda: daemon.endpoints("named"), [f"{lab.backends[0].ipv4}:8080"])
    finally:
        daemon.declare("", "named.yaml")
        server.die()


@contextlib.contextmanager
def hostile(node: Node) -> Iterator[None]:
    """A port of a node that begins answers of each endless kind, and goes on until it is hung up on."""
    kinds = itertools.cycle([*ENDLESS.values(), (CHUNKED, b"1\r\nx\r\n"), (OK + b"\r\n", b"x")])
    with node.entered():
        listener = socket.create_server(("", HOSTILE_PORT), backlog=256)

    def answer(connection: socket.socket, begin: bytes, more: bytes) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            connection.recv(4096)
            connection.sendall(begin)
            while True:
                connection.sendall(more * 1000)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                arguments = (listener.accept()[0], *next(kinds))
                threading.Thread(target=answer, args=arguments, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_hostile_answers_cost_the_worker_and_not_the_daemon(
    lab: Lab, daemon: Daemon, servers: list[Unsteady]
) -> None:
    """Thirty checks ten times a second of a backend that never stops to answer. Another backend that dies is
    seen."""
    check = "type: http, body: 'never (there|here)', interval: 100ms, timeout: 100ms"
    text = "".join(
        f"  - {{name: h{n}, address: 10.96.13.{n + 1}, ports: [80/tcp],"
        f" backends: ['{lab.backends[1].ipv4}:{HOSTILE_PORT}'], check: {{{check}, path: /{n}}}}}\n"
        for n in range(HOSTILE_CHECKS)
    )
    with hostile(lab.backends[1]):
        daemon.declare(text, "hostile.yaml")
        daemon.wait_until(lambda: daemon.get("services/h0")["service"]["status"]["ready"], 0)
        processes = daemon.status()["pid"], worker(daemon)
        before = [processor_seconds(pid) for pid in processes]
        servers[0].die()
        daemon.wait_until(lambda: ready(daemon), 1)
        wait_until(lambda: processor_seconds(processes[1]) - before[1] > 0.4, "the worker works")
        took = [processor_seconds(pid) - began for pid, began in zip(processes, before, strict=True)]
        print(f"daemon and worker: {took} s of processor time")
        assert took[0] < took[1] / 2
        assert worker(daemon) == processes[1], "it is not killed for it"
    servers[0].start()
    daemon.declare("", "hostile.yaml")
    daemon.wait_until(lambda: ready(daemon), 2)


def test_the_worker_ends_with_the_daemon(daemon: Daemon) -> None:
    pid = worker(daemon)
    os.kill(pid, signal.SIGSTOP)
    daemon.kill()
    wait_until(lambda: not runs(pid), "the worker ends")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
