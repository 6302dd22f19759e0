"""All that vipd touches outside fails while it runs: nothing else stops, status names it, the log is not
flooded, and once nothing fails all is in sync without help."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.dataplanes import Equipment
from tests.faults.equipment import resident
from tests.faults.outside import ELSEWHERE, GROUPS, Thing
from tests.lab.daemon import Daemon
from tests.lab.flow import Process, finish
from tests.lab.topology import Lab
from tests.sources.etcd.members import install

pytestmark = [pytest.mark.root, pytest.mark.slow]

PROJECT = Path(__file__).parents[2]
RECOVERY_SECONDS = 120.0
"""The longest pause between two tries is 60 s."""
SLOWER = 4
"""So many times the fault-free time may a change take, on a machine that others use too."""
ETCD_URL = "http://127.0.0.1:2379"
"""In the lab's host, whose loopback is its own."""
NIGHTLY_SECONDS = 180.0
"""So long each fails at night."""
CHANGE_SECONDS = 3.0
LINES_A_CHANGE = 8
"""What the log says of services, rules and problems when two files change."""
LINES_A_THING = 12
"""What may be said of one that fails all the time."""
MOST_GROWN = 2_000
"""KiB of memory meanwhile."""
WATCHED = """\
  - name: watched
    address: 10.96.7.{number}
    load_balancer_addresses: [203.0.113.7]
    announce: routes
    ports: [80/tcp]
    backends: [10.244.0.{number}]
    traffic_policy: {{external: local}}
    health_port: {port}
  - name: balanced
    address: 10.96.7.2
    ports: [8080/tcp]
    backends: [10.244.0.11, 10.244.0.12]
    balance: least-connections
    check: {{type: http, path: /{number}, interval: 500ms, timeout: 400ms}}
  - {{name: sticky, address: 10.96.7.6, ports: [80/tcp], backends: ['10.244.0.11:8080'], affinity: 10m}}
  - {{name: named, address: 10.96.7.5, ports: [80/tcp], backends: ['dns:web.internal:8080']}}
  - name: run
    address: 10.96.7.3
    ports: [80/tcp]
    backends: [10.244.0.11]
    check: {{type: exec, command: [/bin/true, x{number}], user: nobody, interval: 60s}}
"""


class SupervisedDaemon(Daemon):
    module = "tests.faults.supervised_vipd"
    number = watched = 20

    def fail(self, things: Sequence[Thing] = (), error: str = "") -> None:
        """These fail from now on, each as its row says or with this error, and no others."""
        lines = [f"{error or thing.error} {self.pattern(thing)}\n" for thing in things]
        new = self.directory / ".faults"
        new.write_text("".join(lines))
        new.rename(self.directory / "faults")

    def pattern(self, thing: Thing) -> str:
        touched = thing.touched.replace("DIR", re.escape(str(self.directory))).replace("PID", "[0-9]+")
        return re.sub("^vipd", "(python|vipd)", touched)

    def touch(self) -> None:
        self.number = self.watched = self.number + 1
        self.write(WATCHED.format(number=self.number, port=31000 + self.number), "watched.yaml")

    def adds(self) -> float:
        """Add a service by vipctl; how many seconds until it is in the kernel."""
        self.number += 1
        began = time.monotonic()
        self.vipctl("add", f"10.96.8.{self.number}:80/tcp", "10.244.0.11")
        return time.monotonic() - began

    def declares(self) -> float:
        """Add a service by a file; how many seconds until it is in the kernel."""
        self.number += 1
        began, address = time.monotonic(), f"10.96.9.{self.number}"
        self.write(
            f"  - {{name: other, address: {address}, ports: [80], backends: [10.244.0.11]}}\n", "o.yaml"
        )
        self.wait_until(lambda: self.endpoints(f"{address}:80/tcp"), ["10.244.0.11:80"])
        self.wait_in_sync()
        return time.monotonic() - began

    def puts(self, number: int) -> None:
        value = f"{{address: 10.96.7.9, ports: 80, backends: [10.244.9.{number}]}}"
        put = ["etcdctl", "--endpoints", ETCD_URL, "put", "/vipd/v1/services/followed", value]
        self.host.run("env", "ETCDCTL_API=3", *put)

    def unnamed(self, things: Sequence[Thing]) -> list[str]:
        status = self.status()
        reported = json.dumps(
            [status.get(key) for key in ("warnings", "problems", "message", "sources", "quarantined")]
        )
        return [t.name for t in things if t.culprit and not re.search(t.culprit, reported)]

    def recovers(self, things: Sequence[Thing]) -> None:
        self.fail()
        nothing_named = [thing.name for thing in things if thing.culprit]
        self.wait_until(lambda: self.unnamed(things), nothing_named, RECOVERY_SECONDS)
        self.wait_in_sync(RECOVERY_SECONDS)


@pytest.fixture(scope="module")
def etcd(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    install()
    process = lab.host.start(
        *("etcd", "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--listen-client-urls", ETCD_URL),
        *("--advertise-client-urls", ETCD_URL, "--log-level", "error"),
    )
    yield process
    finish(process)


@pytest.fixture(scope="module")
def daemon(lab: Lab, equipment: Equipment, etcd: Process) -> Iterator[SupervisedDaemon]:
    made = SupervisedDaemon(
        lab.host,
        **equipment.settings,
        etcd={"endpoints": [ETCD_URL]},
        announce_addresses=["203.0.113.0/24"],
        dns_servers="127.0.0.1:5353",
        notify=["/bin/true"],
        health_address="127.0.0.1:9101",
        metrics_address="127.0.0.1:9102",
        status_page="127.0.0.1:9103",
    )
    made.host = lab.host.with_environment(NOTIFY_SOCKET=str(made.directory / "notify"))
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(made.directory / "notify"))
    reading = threading.Thread(target=lambda: [None for _ in iter(lambda: manager.recv(4096), b"")])
    reading.start()
    with made as running:
        running.touch()
        running.puts(1)
        running.wait_until(lambda: running.endpoints("followed"), ["10.244.9.1:80"])
        running.wait_in_sync()
        yield running
    manager.shutdown(socket.SHUT_RD)  # what it reads then is empty
    reading.join()
    manager.close()


@contextmanager
def as_soon_as_ever(
    daemon: SupervisedDaemon, change: Callable[[], float], more: float = 1.0
) -> Iterator[None]:
    """From the block on a change takes about as long as before it: the quickest of three counts, and the
    daemon is measured again afterwards, for a machine that others use is slow for seconds."""
    without = max(change() for _ in range(3))
    yield
    if (took := min(change() for _ in range(3))) > SLOWER * without + more:
        daemon.fail()
        without = max(without, *(change() for _ in range(3)))
        assert took <= SLOWER * without + more, daemon.log[-3000:]


def foreign_change(daemon: Daemon, equipment: Equipment) -> None:
    """Somebody touches vipd's rules: else nobody reads them."""
    kind = {"iptables": "jump deleted", "nftables": "rule ahead of ours"}[equipment.dataplane]
    daemon.host.run("sh", "-c", equipment.foreign_changes[kind])


CHANGES = {"adds", "declares"}
HOLDS_UP = {
    "file": set(),
    "directory": {"declares"},
    "store": {"adds"},
    "programs": CHANGES,
    "threads": CHANGES,
    "descriptors": CHANGES,
    "processes": CHANGES,
    "stalls": {"declares"},
}
"""The changes that cannot land, or only later, while a group fails; all others land as soon as ever."""


LONG = {"threads", "descriptors", "stalls"}
"""Groups that keep a daemon from half a minute of its work."""


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(
            group, marks=pytest.mark.nightly if group in LONG else pytest.mark.nightly(each_time="nftables")
        )
        for group in GROUPS
    ],
)
def test_what_fails_is_named_holds_up_nothing_else_and_is_made_up_for(
    daemon: SupervisedDaemon, equipment: Equipment, etcd: Process, group: str, pytestconfig: pytest.Config
) -> None:
    things = GROUPS[group]
    pid, begin = daemon.status()["pid"], len(daemon.log)
    with contextlib.ExitStack() as changes:
        for name in sorted(CHANGES - HOLDS_UP.get(group, set())):
            changes.enter_context(as_soon_as_ever(daemon, getattr(daemon, name)))
        with failing(daemon, things, etcd if group == "etcd" else None):
            daemon.touch()
            foreign_change(daemon, equipment)
            if group == "store":
                refused = daemon.vipctl("add", "10.96.8.9:80/tcp", "10.244.0.11", check=False)
                assert "cannot be written" in refused.stderr, "who asks is told"
            changes.close()
            daemon.wait_until(lambda: daemon.unnamed(things), [])
            endures(daemon, len(things), NIGHTLY_SECONDS if pytestconfig.getoption("nightly") else 0)
    daemon.recovers(things)
    daemon.puts(daemon.number)
    daemon.wait_until(lambda: daemon.endpoints("followed"), [f"10.244.9.{daemon.number}:80"])
    declared_last = [f"10.244.0.{daemon.watched}:80"]
    daemon.wait_until(lambda: daemon.endpoints("watched"), declared_last, RECOVERY_SECONDS)
    assert daemon.log.count("Traceback", begin) <= 2 * len(things), "each is logged once"
    assert daemon.status()["pid"] == pid


@contextmanager
def failing(daemon: SupervisedDaemon, things: Sequence[Thing], etcd: Process | None) -> Iterator[None]:
    daemon.fail(things)
    daemon.puts(daemon.number)
    if etcd:
        os.kill(etcd.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.fail()
        if etcd:
            os.kill(etcd.pid, signal.SIGCONT)


def endures(daemon: SupervisedDaemon, things: int, seconds: float) -> None:
    """While things fail for so long, neither the log nor memory grows but for what is declared meanwhile."""
    logged, before, changes = daemon.log.count("\n"), resident(daemon), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(CHANGE_SECONDS)
        daemon.touch()
        changes += 1
    lines = daemon.log.count("\n") - logged
    print(f"{changes} changes: {lines} lines, {resident(daemon) - before} KiB")
    assert lines <= LINES_A_CHANGE * changes + LINES_A_THING * things
    assert resident(daemon) - before < MOST_GROWN


def seen(daemon: SupervisedDaemon) -> list[str]:
    """What the daemon and its worker have touched. Programs that PATH leads to are those that there are."""
    lines = (daemon.directory / "touched").read_text().splitlines()
    python = "|".join(map(re.escape, (sys.prefix, str(PROJECT))))
    words = [line.split(" ", 2) for line in lines if line.startswith(("python ", "vipd ", "vipd-worker "))]
    seen = set()
    for comm, verb, what in words:
        if verb != "exec" or Path(what).exists():
            what = re.sub(rf"^({python})\b.*", "PYTHON", what.replace(str(daemon.directory), "DIR"))
            what = re.sub("(?<=[/-])[0-9]+(?=[/-]|$)", "PID", what)
            seen.add(f"{comm.replace('python', 'vipd')} {verb} {what}")
    return sorted(seen)


def test_all_that_is_touched_outside_is_in_the_table(daemon: SupervisedDaemon, equipment: Equipment) -> None:
    daemon.touch()
    daemon.adds()
    daemon.declares()
    daemon.puts(daemon.number)
    groups = [things for name, things in GROUPS.items() if name != "descriptors"]  # its pattern fits all
    things = [t for things in groups for t in things if t.dataplane in ("", equipment.dataplane)]
    patterns = [*(t.touched for t in things), *(each for row in ELSEWHERE.values() for each in row)]
    daemon.wait_until(
        lambda: [p for p in patterns if not any(re.fullmatch(p, line) for line in seen(daemon))], []
    )
    assert [line for line in seen(daemon) if not any(re.fullmatch(p, line) for p in patterns)] == []


def test_whatever_does_not_fail_here_fails_elsewhere() -> None:
    assert [name for name in ELSEWHERE if name.startswith("tests/") and not (PROJECT / name).exists()] == []
