"""Many daemons follow one etcd through many changes, and end with the same rules, which are those declared.

VIPD_FLEET=1000 makes as many changes; without it there are fewer, to save time.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random

import pytest

from tests.fleet.network import FleetLab
from tests.lab.daemon import Daemon

HOSTS = 20
CHANGES = int(os.environ.get("VIPD_FLEET", "100"))
PROBES = 20 if CHANGES >= 1000 else 10
SERVICES = 40
TIMEOUT_SECONDS = 240.0
FLEET_SERVICE = "address: {vip}\nports: 80\nbackends: [{backends}]\n"


class Declared:
    """What etcd holds, and a walk through changes of it."""

    def __init__(self, lab: FleetLab) -> None:
        self._lab, self._random = lab, Random(7)
        self.services: dict[str, tuple[str, frozenset[str]]] = {}
        self.revision = 0

    def fill(self) -> None:
        """The first services, before any daemon knows of them."""
        for number in range(1, SERVICES + 1):
            self.put(number)

    def put(self, number: int) -> None:
        """Write one service with two backends of its own."""
        name, vip = f"s{number:03}", f"10.96.{number // 250}.{number % 250 + 1}"
        backends = frozenset(
            f"10.244.{self._random.randrange(200)}.{n}" for n in self._random.sample(range(1, 250), 2)
        )
        value = FLEET_SERVICE.format(vip=vip, backends=", ".join(sorted(backends)))
        self.revision = self._lab.etcd.put(f"/vipd/v1/services/{name}", value)
        self.services[name] = (vip, backends)

    def change(self, step: int) -> None:
        """One of: another service, one less, or one with other backends."""
        kind = self._random.random()
        if kind < 0.2 and len(self.services) > SERVICES // 2:
            name = self._random.choice(sorted(self.services))
            self.revision = self._lab.etcd.delete(f"/vipd/v1/services/{name}")
            del self.services[name]
        elif kind < 0.4:
            self.put(SERVICES + step)
        else:
            self.put(int(self._random.choice(sorted(self.services))[1:]))


@contextmanager
def fleet(lab: FleetLab) -> Iterator[Sequence[Daemon]]:
    """A running daemon on each host."""
    with ExitStack() as stack:
        daemons = [lab.daemon(host, max_removal="100%") for host in lab.hosts]
        stack.callback(lambda: everywhere(daemons, Daemon._close))
        everywhere(daemons, lambda daemon: daemon.start(TIMEOUT_SECONDS))
        yield daemons


def everywhere(daemons: Sequence[Daemon], do: Callable[[Daemon], object]) -> list[object]:
    with ThreadPoolExecutor(len(daemons)) as pool:
        return list(pool.map(do, daemons))


def wait_for_revision(daemons: Sequence[Daemon], revision: int) -> None:
    """Return once every host has this revision in its kernel."""

    def there(daemon: Daemon) -> bool:
        status = daemon.status()
        return bool(status["etcd"]["last_change"] >= revision and status["state"] == "in-sync")

    for daemon in daemons:
        daemon.wait_until(partial(there, daemon), True, TIMEOUT_SECONDS)


def rules(daemon: Daemon) -> dict[str, list[str]]:
    """The rules of vipd in the nat table by chain, without counters."""
    found: dict[str, list[str]] = {}
    for line in daemon.host.run("iptables-save", "-t", "nat").stdout.splitlines():
        if line.startswith("-A "):
            found.setdefault(line.split()[1], []).append(line)
        elif line.startswith(":"):
            found.setdefault(line[1:].split()[0], [])
    return found


def reached(installed: dict[str, list[str]]) -> dict[str, frozenset[str]]:
    """From the rules: the backends of each virtual IP."""
    services = {}
    for lines in installed.values():
        for line in lines:
            if (vip := re.search(r"-d (10\.96\.\S+)/32 .*-j (VIPD-SVC-\S+)", line)) is not None:
                services[vip[1]] = frozenset(
                    backend
                    for hop in installed[vip[2]]
                    if (endpoint := re.search(r"-j (VIPD-SEP-\S+)", hop))
                    for backend in re.findall(r"--to-destination (\S+):80", "\n".join(installed[endpoint[1]]))
                )
    return services


def timing_text(name: str, seconds: Sequence[float]) -> str:
    ordered = sorted(1000 * each for each in seconds)
    middle, last = statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return f"{name}: median {middle:.0f} ms, p99 {last:.0f} ms ({len(ordered)} samples)"


@pytest.mark.nightly
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_ends_equal_and_as_declared(tmp_path_factory: pytest.TempPathFactory) -> None:
    with FleetLab(tmp_path_factory.mktemp("fleet"), HOSTS) as lab, lab.hub.entered():
        declared = Declared(lab)
        declared.fill()
        began = time.monotonic()
        with fleet(lab) as daemons:
            wait_for_revision(daemons, declared.revision)
            print(f"{HOSTS} daemons started and in sync after {time.monotonic() - began:.1f} s")
            _walk(declared, daemons)
            _probe(declared, daemons)
            wait_for_revision(daemons, declared.revision)
            _compare(declared, daemons)


def _walk(declared: Declared, daemons: Sequence[Daemon]) -> None:
    began = time.monotonic()
    for step in range(1, CHANGES + 1):
        declared.change(step)
    written = time.monotonic()
    wait_for_revision(daemons, declared.revision)
    took = time.monotonic() - written
    print(
        f"{CHANGES} changes written in {written - began:.1f} s; all hosts in sync {took:.1f} s after the last"
    )


def _probe(declared: Declared, daemons: Sequence[Daemon]) -> None:
    seconds = []
    for probe in range(PROBES):
        put = time.monotonic()
        declared.put(2000 + probe)
        wait_for_revision(daemons, declared.revision)
        seconds.append(time.monotonic() - put)
    print(timing_text(f"from put to the rules of all {len(daemons)} hosts", seconds))


def _compare(declared: Declared, daemons: Sequence[Daemon]) -> None:
    wanted, one = dict(declared.services.values()), daemons[0]
    # What nothing leads to any more may be cleared away a moment after a change.
    one.wait_until(lambda: reached(rules(one)), wanted, TIMEOUT_SECONDS)
    first = rules(one)
    for daemon in daemons[1:]:
        daemon.wait_until(partial(rules, daemon), first, TIMEOUT_SECONDS)
    names = {daemon.host.name for daemon in daemons}
    one.wait_until(lambda: {host["name"] for host in one.get("fleet")["hosts"]}, names, TIMEOUT_SECONDS)
    assert reached(rules(one)) == wanted
