"""The daemon as it runs: cold starts, memory and processor time, at rest and under changes, and over time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.extent import Extent
from tests.bench.progress import say
from tests.bench.record import Measurement
from tests.lab.daemon import Daemon, UnixConnection
from tests.lab.node import Node
from tests.lab.topology import Lab, Wiring
from tests.model.samples import many_declared

GROUP = "daemon"
START_SECONDS = 300.0
CHANGES_A_SECOND = 100
CHANGING = 50
"""Files of one service each that the changes are made to, one after the other."""
TICK = os.sysconf("SC_CLK_TCK")
SUBJECTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vipd iptables-nft", {"dataplane": "iptables", "iptables_variant": "nft"}),
    ("vipd nftables", {"dataplane": "nftables"}),
)


def cold_starts(extent: Extent) -> Iterator[Measurement]:
    """From the start of the process to `in-sync`, with all services in one file."""
    for services in extent.daemon_sizes:
        rounds = extent.large_rounds if services >= 1_000 else extent.rounds
        values: dict[str, list[float]] = {name: [] for name, _ in SUBJECTS}
        for number in range(1, rounds + 1):
            say(f"cold start of the daemon with {services}, round {number} of {rounds}")
            for name, settings in SUBJECTS:
                with prepared(services, settings) as daemon:
                    began = time.monotonic()
                    daemon.start(START_SECONDS)
                    values[name].append(time.monotonic() - began)
                    daemon.stop()
                what, note = "start of the daemon until in sync", "asked every 50 ms"
                yield Measurement("programming", what, name, services, "s", tuple(values[name]), note)


def measure(extent: Extent) -> Iterator[Measurement]:
    soaked = extent.daemon_sizes[min(1, len(extent.daemon_sizes) - 1)]
    for services in extent.daemon_sizes:
        for name, settings in SUBJECTS:
            say(f"daemon with {services}, at rest and under changes: {name}")
            with running(services, settings, extent.settling_seconds) as watched:
                for what, unit, value, note in _costs(watched, extent):
                    yield Measurement(GROUP, what, name, services, unit, (value,), note)
                if services == soaked:
                    say(f"soak with {services}, {extent.soak_seconds:.0f} s: {name}")
                    for what, unit, values in _soak(watched, extent.soak_seconds):
                        note = f"{extent.soak_seconds:.0f} s of {CHANGES_A_SECOND} changes a second"
                        yield Measurement(GROUP, what, name, services, unit, values, note)


class Watched:
    """A daemon at work, from outside: what the kernel says of its process, and changes made to it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._pid = int(daemon.status()["pid"])
        self.made = 0

    def resident_mib(self) -> float:
        return self._status("VmRSS") / 1024

    def peak_mib(self) -> float:
        return self._status("VmHWM") / 1024

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self._pid}/fd").iterdir()))

    def cpu_percent(self, seconds: float) -> float:
        """Processor time over the next seconds, of one core, with that of the programs that it ran."""
        began, before = time.monotonic(), self._cpu_seconds()
        time.sleep(seconds)
        return 100 * (self._cpu_seconds() - before) / (time.monotonic() - began)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Meanwhile files are saved, so many a second, each with another backend."""
        ended = threading.Event()
        thread = threading.Thread(target=self._change, args=(ended,), name="changes")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def save(self, number: int) -> None:
        vip, backend = _changed(number)
        text = f"  - {{address: {vip}, ports: 80, backends: [{backend}, 10.244.2.1]}}\n"
        self.daemon.write(text, f"changing-{number % CHANGING}.yaml")

    def wait_for_last(self) -> None:
        vip, backend = _changed(self.made - 1)
        target, endpoint = f"{vip}:80/tcp", f"{backend}:80"
        self.daemon.wait_until(lambda: endpoint in self.daemon.endpoints(target), True, START_SECONDS)
        self.daemon.wait_in_sync(START_SECONDS)

    def writes(self) -> float:
        connection = UnixConnection(self.daemon.socket)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        return next(float(line.split()[1]) for line in lines if line.startswith("vipd_applies_total "))

    def _change(self, ended: threading.Event) -> None:
        began = time.monotonic()
        while not ended.is_set():
            self.save(self.made)
            self.made += 1
            ended.wait(max(0.0, began + self.made / CHANGES_A_SECOND - time.monotonic()))

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        # utime, stime, and those of ended children: fields 14 to 17 of proc(5), of which two are cut off.
        return sum(map(int, fields[11:15])) / TICK


def _changed(number: int) -> tuple[str, str]:
    """The service that a change is made to, and its new backend."""
    return f"10.100.0.{number % CHANGING + 1}", f"10.244.1.{number % 250 + 1}"


class FreshPythonNode(Node):
    """A node whose programs begin with Python's own start and imports: none is forked from another."""

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command line. That it is overridden keeps the fork server out."""
        return super().inside(argv)


@contextmanager
def prepared(services: int, settings: Mapping[str, Any]) -> Iterator[Daemon]:
    with Lab(Wiring(backends=1)) as lab:
        host = lab.host
        node = FreshPythonNode(host.namespace, host.name, host.ipv4, host.ipv6, host.started)
        daemon = Daemon(node, log_level="warning", **settings)
        daemon.write(many_declared(services).partition("services:\n")[2])
        yield daemon


@contextmanager
def running(services: int, settings: Mapping[str, Any], settling: float) -> Iterator[Watched]:
    with prepared(services, settings) as daemon:
        daemon.start(START_SECONDS)
        watched = Watched(daemon)
        for number in range(CHANGING):
            watched.save(number)
        daemon.reload()
        daemon.wait_in_sync(START_SECONDS)
        time.sleep(settling)
        yield watched
        daemon.stop()


def _costs(watched: Watched, extent: Extent) -> Iterator[tuple[str, str, float, str]]:
    yield "memory at rest", "MiB", watched.resident_mib(), ""
    yield "largest memory since its start", "MiB", watched.peak_mib(), "the cold start included"
    yield "processor time at rest", "%", watched.cpu_percent(extent.idle_seconds), ""
    written, began = watched.writes(), time.monotonic()
    with watched.changing():
        busy = watched.cpu_percent(extent.busy_seconds)
    ended = time.monotonic()
    note = f"{watched.made} files in {ended - began:.1f} s"
    yield "processor time under 100 changes a second", "%", busy, note
    watched.wait_for_last()
    now = time.monotonic()
    yield "writes to the kernel meanwhile", "1/s", (watched.writes() - written) / (now - began), ""
    yield "the last of them in the kernel after", "s", now - ended, "asked every 50 ms"


def _soak(watched: Watched, seconds: float) -> Iterator[tuple[str, str, tuple[float, ...]]]:
    """Ten looks over the time, the first before these changes."""
    before = watched.made
    memory, files = [watched.resident_mib()], [float(watched.open_files())]
    with watched.changing():
        for _ in range(9):
            time.sleep(seconds / 9)
            memory.append(watched.resident_mib())
            files.append(float(watched.open_files()))
    watched.wait_for_last()
    yield "memory over time", "MiB", tuple(memory)
    yield "open files over time", "", tuple(files)
    yield "changes made", "", (float(watched.made - before),)
