"""Every seam of `seams.py` fails in every way: the daemon lives, another service's change lands as soon as
ever, status names the culprit, and once nothing fails all is in sync without help."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dataplanes import Equipment
from tests.faults.faulty_vipd import TIMEOUT_SECONDS
from tests.faults.seams import (
    BESIDE,
    DISK,
    ELSEWHERE,
    ETCD,
    FILES,
    MEANINGLESS,
    MODES,
    NO_SEAM,
    PROGRAMS,
    REQUESTS,
    RETURNS,
    SEAMS,
    Seam,
)
from tests.lab.daemon import Daemon, UnixConnection
from tests.lab.flow import finish
from tests.lab.topology import Lab
from tests.sources.etcd.members import install
from vipd.observe.metrics.scrape import PATH as METRICS_PATH

pytestmark = [pytest.mark.root, pytest.mark.slow]

PROJECT = Path(__file__).parents[2]
RECOVERY_SECONDS = 90.0
SLOWER = 4
"""So many times the fault-free time may a change take, on a machine that others use too."""
LATER_SECONDS = 1.0
"""And so much more."""
ETCD_URL = "http://127.0.0.1:2379"
"""In the lab's host, whose loopback is its own."""
TOUCHING = {"iptables": "jump deleted", "nftables": "rule ahead of ours"}
DECLARED = """\
  - name: watched
    address: 10.96.7.1
    external_addresses: [203.0.113.7]
    ports: [80/tcp]
    backends: [10.244.0.{number}]
    traffic_policy: {{external: local}}
    health_port: {port}
  - name: asked
    address: 10.96.7.2
    ports: [8080/tcp]
    backends: [10.244.0.11]
    balance: least-connections
    check: {{type: http, path: /{number}, interval: 500ms, timeout: 400ms}}
"""
ASKED = """\
  - name: run
    address: 10.96.7.3
    ports: [80/tcp]
    backends: [10.244.0.11]
    check: {{type: exec, command: [/bin/true, x{number}], user: nobody, interval: 60s}}
"""

OUTSIDE = frozenset(
    [
        "socket",
        "subprocess",
        "pwd",
        "grp",
        "ssl",
        "pyroute2",
        "aiohttp",
        "watchfiles",
        "os",
        "resource",
        "fcntl",
        "time",
        "signal",
        "tempfile",
        "shutil",
        "threading",
        "ctypes",
        "iptc",
    ]
)
"""Modules of the library and of packages by which the outside is met."""
MEETINGS = frozenset(
    [
        "read_text",
        "write_text",
        "read_bytes",
        "write_bytes",
        "iterdir",
        "unlink",
        "mkdir",
        "stat",
        "open",
        "exists",
        "create_subprocess_exec",
        "open_connection",
        "create_connection",
        "create_datagram_endpoint",
        "create_server",
        "read_regular",
    ]
)
"""Names of methods and functions by which it is met."""
BESIDE_THE_DAEMON = (
    *(
        "vipd.__main__",
        "vipd.cli",
        "vipd.cli.manual",
        "vipd.observe.bench",
        "vipd.observe.doctor",
        "vipd.observe.live_trace",
    ),
    *("vipd.observe.rule_tree", "vipd.observe.simulator", "vipd.sources.etcd.registration"),
)
"""Programs of their own, which end with what they are asked."""


def meets_the_outside(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and OUTSIDE & {alias.name.split(".")[0] for alias in node.names}:
            return True
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OUTSIDE:
            return True
        if isinstance(node, ast.Attribute) and node.attr in MEETINGS:
            return True
    return False


def test_every_module_that_meets_the_outside_has_a_row() -> None:
    listed = {module for seam in SEAMS for module in seam.modules}
    listed |= {module for modules in ELSEWHERE.values() for module in modules} | NO_SEAM.keys()
    known = {
        ".".join(path.relative_to(PROJECT).with_suffix("").parts): path
        for path in sorted((PROJECT / "vipd").rglob("*.py"))
    }
    daemon = {name: path for name, path in known.items() if not name.startswith(BESIDE_THE_DAEMON)}
    assert [name for name, path in daemon.items() if meets_the_outside(path) and name not in listed] == []
    assert sorted(listed - known.keys()) == [], "rows of modules that are no more"
    assert [name for name in ELSEWHERE if not (PROJECT / name).exists()] == []


def test_every_mode_that_means_no_fault_is_listed_with_its_reason() -> None:
    assert MEANINGLESS.keys() == {(seam.name, mode) for seam in SEAMS for mode in seam.quiet}
    assert all(MEANINGLESS.values())


def modes(*each_time: str) -> list[Any]:
    """Every mode; those that are not tried each time only at night. test_days.py tries `unexpected`."""
    return [pytest.param(mode, marks=() if mode in each_time else pytest.mark.nightly) for mode in MODES]


numbers = iter(range(1, 200))
further_numbers = iter(range(1000, 20000))
"""Of services that only show how long a change takes."""


class FaultyDaemon(Daemon):
    """A daemon with seams that fail when told to."""

    module = "tests.faults.faulty_vipd"

    def fail(self, mode: str, *seams: Seam) -> None:
        """These fail from now on, in this way, and no others."""
        (self.directory / "faults").write_text("".join(f"{mode} {seam.name}\n" for seam in seams))

    def touch(self, number: int) -> None:
        """Declare something else, so that seams are passed."""
        self.write(DECLARED.format(number=20 + number, port=31000 + number), "watched.yaml")
        self.write(ASKED.format(number=number), "asked.yaml")

    def adds(self, number: int) -> float:
        """Add a service by vipctl; how many seconds until it is in the kernel."""
        began = time.monotonic()
        address = f"10.{96 + number // 240}.8.{number % 240}"
        added = self.vipctl("add", f"{address}:80/tcp", "10.244.0.11", check=False)
        assert added.returncode == 0, (added.stderr, self.log)
        return time.monotonic() - began

    def declares(self, number: int) -> float:
        """Add a service by a file; how many seconds until it is in the kernel."""
        began, service = time.monotonic(), f"10.{96 + number // 240}.9.{number % 240}"
        declared = f"  - {{name: other, address: {service}, ports: [80], backends: [10.244.0.11]}}\n"
        self.write(declared, "o.yaml")
        self.wait_until(lambda: self.endpoints(f"{service}:80/tcp"), ["10.244.0.11:80"])
        self.wait_in_sync()
        return time.monotonic() - began

    def puts(self, number: int) -> None:
        """Write the service that etcd declares."""
        value = f"{{address: 10.96.7.9, ports: 80, backends: [10.244.9.{number}]}}"
        put = ["etcdctl", "--endpoints", ETCD_URL, "put", "/vipd/v1/services/followed", value]
        self.host.run("env", "ETCDCTL_API=3", *put)

    def asks(self, path: str) -> int:
        """The code of the API's answer to a GET."""
        connection = UnixConnection(self.socket)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def reported_faults(self) -> str:
        """What status says is wrong."""
        status = self.status()
        return json.dumps(
            [status.get(key) for key in ("warnings", "problems", "message", "sources", "quarantined")]
        )

    def silent(self, seams: tuple[Seam, ...], mode: str) -> list[str]:
        """The culprits that status does not name."""
        told = self.reported_faults()
        return [seam.name for seam in seams if mode not in seam.quiet and not re.search(seam.culprit, told)]

    def recovers(self, seams: tuple[Seam, ...]) -> None:
        """All is in sync, and no culprit named, once nothing fails any more; without help."""
        self.fail("")
        self.wait_until(
            lambda: [s.name for s in seams if re.search(s.culprit, self.reported_faults())],
            [],
            RECOVERY_SECONDS,
        )
        self.wait_in_sync(RECOVERY_SECONDS)


class Yardstick:
    """Compares how long a change takes beside a fault with the same change on the same daemon without it.

    A machine that others use is slow for seconds: the quickest of three changes counts, and the daemon is
    measured again once nothing fails."""

    def __init__(self, daemon: FaultyDaemon) -> None:
        self._daemon = daemon
        self._without = self._measured()
        self._slow: list[tuple[str, float, float]] = []

    def _measured(self) -> dict[str, float]:
        ways = (self._daemon.adds, self._daemon.declares)
        return {way.__name__: max(way(next(further_numbers)) for _ in range(3)) for way in ways}

    def change(self, way: Callable[[int], float], mode: str, number: int | None = None) -> None:
        """Make a change while a seam fails. What takes its time to fail may hold up the step at work and the
        step of the change, once each."""
        beside = LATER_SECONDS + (2 * TIMEOUT_SECONDS if mode == "timeout" else 0.0)
        took = way(next(further_numbers) if number is None else number)
        for _ in range(2):
            if took > SLOWER * self._without[way.__name__] + beside:
                took = min(took, way(next(further_numbers)))
        print(f"{way.__name__}: {took:.2f} s, and {self._without[way.__name__]:.2f} s while nothing fails")
        if took > SLOWER * self._without[way.__name__] + beside:
            self._slow.append((way.__name__, took, beside))

    def judge(self) -> None:
        """Once nothing fails: fail if a change took long that does not take long without the fault."""
        slow, self._slow = self._slow, []
        without = self._measured() if slow else {}
        assert [each for each in slow if each[1] > SLOWER * without[each[0]] + each[2]] == [], (
            without,
            self._daemon.log[-3000:],
        )


@pytest.fixture(scope="module")
def daemon(
    lab: Lab, equipment: Equipment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyDaemon]:
    install()
    process = lab.host.start(
        *("etcd", "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--listen-client-urls", ETCD_URL),
        *("--advertise-client-urls", ETCD_URL, "--log-level", "error"),
    )
    try:
        with FaultyDaemon(lab.host, **equipment.settings, etcd={"endpoints": [ETCD_URL]}) as running:
            running.touch(0)
            running.reload()
            running.puts(1)
            running.wait_until(lambda: running.endpoints("followed"), ["10.244.9.1:80"])
            yield running
    finally:
        finish(process)


@pytest.fixture(scope="module")
def yardstick(daemon: FaultyDaemon) -> Yardstick:
    return Yardstick(daemon)


@pytest.mark.nightly(each_time="nftables-unexpected")
@pytest.mark.parametrize("mode", modes("oserror"))
def test_what_fails_beside_holds_up_nobody_and_is_named(
    daemon: FaultyDaemon, equipment: Equipment, yardstick: Yardstick, mode: str
) -> None:
    seams, pid = (*FILES, *BESIDE), daemon.status()["pid"]
    number, again, logged = next(numbers), next(numbers), daemon.log.count("Traceback")
    daemon.fail(mode, *BESIDE)
    daemon.touch(number)
    yardstick.change(daemon.adds, mode, number)
    kind_of_change = equipment.foreign_changes[TOUCHING[equipment.dataplane]]
    named = ended(lambda: touched_and_told(daemon, kind_of_change, BESIDE, mode), RECOVERY_SECONDS)
    assert named, daemon.silent(BESIDE, mode)
    # Only now: no seam is passed for what stands in a file that cannot be read.
    daemon.fail(mode, *seams)
    daemon.touch(again)
    yardstick.change(daemon.adds, mode, again)
    daemon.wait_until(lambda: daemon.silent(seams, mode), [])
    assert daemon.log.count("Traceback") - logged <= 2 * len(seams), "each is logged once"
    daemon.recovers(seams)
    yardstick.judge()
    assert daemon.endpoints("watched")[:1] == [f"10.244.0.{20 + again}:80"], (
        "as the file says that could not be read"
    )
    assert daemon.status()["pid"] == pid


@pytest.mark.parametrize("mode", modes("oserror", "timeout"))
def test_a_disk_that_fails_holds_up_no_file(daemon: FaultyDaemon, yardstick: Yardstick, mode: str) -> None:
    number, pid = next(numbers), daemon.status()["pid"]
    daemon.fail(mode, *DISK)
    added = daemon.vipctl("add", f"10.96.8.{number}:80/tcp", "10.244.0.11", check=False)
    assert (added.returncode == 0) == (mode in RETURNS), "what is not on disk is not accepted"
    yardstick.change(daemon.declares, mode, number)
    daemon.wait_until(lambda: daemon.silent(DISK, mode), [])
    daemon.recovers(DISK)
    yardstick.judge()
    daemon.adds(next(numbers))  # the fault of a request is named until such a request is answered
    assert daemon.status()["pid"] == pid


@pytest.mark.parametrize("mode", modes("oserror", "timeout"))
def test_programs_that_fail_are_named_and_made_up_for(
    daemon: FaultyDaemon, yardstick: Yardstick, mode: str
) -> None:
    number, pid = next(numbers), daemon.status()["pid"]
    daemon.fail(mode, *PROGRAMS)
    service = f"10.96.9.{number}"
    daemon.write(f"  - {{name: other, address: {service}, ports: [80], backends: [10.244.0.11]}}\n", "o.yaml")
    daemon.wait_until(lambda: daemon.silent(PROGRAMS, mode) or daemon.status()["state"] == "in-sync", False)
    daemon.recovers(PROGRAMS)
    assert daemon.endpoints(f"{service}:80/tcp") == ["10.244.0.11:80"]
    yardstick.change(daemon.declares, "")
    yardstick.judge()
    assert daemon.status()["pid"] == pid


@pytest.mark.parametrize("mode", modes("oserror"))
@pytest.mark.parametrize("seam", ETCD, ids=lambda seam: str(seam.name))
def test_an_etcd_that_fails_is_named_and_holds_up_nothing_else(
    daemon: FaultyDaemon, yardstick: Yardstick, seam: Seam, mode: str
) -> None:
    number, pid, logged = next(numbers), daemon.status()["pid"], daemon.log.count("Traceback")
    known = daemon.endpoints("followed")
    daemon.fail(mode, seam)
    daemon.puts(number)
    yardstick.change(daemon.adds, mode, number)
    yardstick.change(daemon.declares, mode, number)
    daemon.wait_until(lambda: daemon.silent((seam,), mode), [])
    assert daemon.endpoints("followed") in (known, [f"10.244.9.{number}:80"]), "it serves on"
    assert daemon.log.count("Traceback") - logged <= 2, "it is logged once"
    daemon.recovers((seam,))
    yardstick.judge()
    daemon.wait_until(lambda: daemon.endpoints("followed"), [f"10.244.9.{number}:80"])
    assert daemon.status()["pid"] == pid


@pytest.mark.parametrize("mode", modes("oserror"))
def test_requests_that_fail_are_answered_so_and_hold_up_nothing_else(
    daemon: FaultyDaemon, yardstick: Yardstick, mode: str
) -> None:
    number, pid, logged = next(numbers), daemon.status()["pid"], daemon.log.count("Traceback")
    add = ("add", f"10.96.8.{number}:80/tcp", "10.244.0.11")
    daemon.fail(mode, *REQUESTS)
    for _ in range(3):
        assert daemon.vipctl(*add, check=False).returncode != 0
        assert daemon.asks(METRICS_PATH) == 500
    yardstick.change(daemon.declares, mode, number)
    daemon.wait_until(lambda: daemon.silent(REQUESTS, mode), [])
    assert daemon.log.count("Traceback") - logged <= 2 * len(REQUESTS), "each is logged once"
    daemon.fail("")
    daemon.vipctl(*add)
    assert daemon.asks(METRICS_PATH) == 200
    daemon.recovers(REQUESTS)
    yardstick.judge()
    assert daemon.status()["pid"] == pid


@pytest.mark.nightly(each_time="iptables")
def test_a_reload_in_the_middle_of_a_step_holds_up_no_end(daemon: FaultyDaemon) -> None:
    """Last: it ends the daemon, and starts it again."""
    daemon.fail("timeout", *PROGRAMS)
    daemon.touch(next(numbers))
    daemon.wait_until(lambda: daemon.status()["state"] != "in-sync", True)
    pid = daemon.status()["pid"]
    os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert ended(lambda: not runs(pid)), daemon.log
    print(f"ended after {time.monotonic() - began:.1f} s")
    daemon.fail("")
    daemon.kill()
    daemon.start()


def touched_and_told(daemon: FaultyDaemon, kind_of_change: str, seams: tuple[Seam, ...], mode: str) -> bool:
    """Whether status names every culprit, soon after somebody has touched vipd's rules: else nobody reads."""
    daemon.host.run("sh", "-c", kind_of_change)
    return ended(lambda: not daemon.silent(seams, mode), 5.0)


def runs(pid: int) -> bool:
    """Whether a process has not ended; its parent may not have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def ended(question: Callable[[], bool], patience: float = 30.0) -> bool:
    """Whether it becomes true; half of the time that the unit gives to a stop."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if question():
            return True
        time.sleep(0.05)
    return False
