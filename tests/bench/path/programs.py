"""The programs in C that make load and serve it: compiling and running them, and their CPU."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.flow import read_line
from tests.lab.node import Node

SOURCES = Path(__file__).parent
PROCESSES = max(2, os.cpu_count() or 1)
"""Processes that make load, and as many that serve it: none of them is a core's limit alone."""
FLIGHTS = 16
"""Connections, or requests, that each process has open at a time."""
TRIES = 3
"""Runs in which at least one thing must get done: a busy machine may give a short one no time at all."""
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Ports:
    closing: int = 8080
    echo: int = 8081
    throughput: int = 5201
    udp_echo: int = 8082
    udp_sink: int = 8083

    @property
    def tcp(self) -> tuple[int, ...]:
        return self.closing, self.echo, self.throughput

    @property
    def udp(self) -> tuple[int, ...]:
        return self.udp_echo, self.udp_sink


PORTS = Ports()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run of the load generator. Times are in microseconds."""

    done: int
    failed: int
    seconds: float
    cpu: float
    answer_p50: float

    @property
    def rate(self) -> float:
        return self.done / self.seconds

    @property
    def healthy(self) -> bool:
        return self.done > 0 and self.failed <= self.done / 100


class Programs:
    """The programs in a directory of the caller's, compiled unless they are there."""

    def __init__(self, directory: Path) -> None:
        self._load, self._serve = directory / "load", directory / "serve"
        for program in (self._load, self._serve):
            if program.exists():
                continue
            source = SOURCES / f"{program.name}.c"
            argv = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(source)]
            subprocess.run(argv, check=True, timeout=120)

    def serve(self, node: Node) -> None:
        ports = (PORTS.closing, PORTS.echo, *PORTS.udp)
        said = read_line(node.start(str(self._serve), str(PROCESSES), *map(str, ports)))
        assert said == "READY", f"the server in {node.namespace} did not start (stderr says why): {said!r}"
        node.start("iperf3", "--server", "--port", str(PORTS.throughput), "--logfile", "/dev/null")

    def load(
        self, node: Node, mode: str, to: str, port: int, seconds: float, *, alone: bool = False
    ) -> Outcome:
        """Keep the path busy for some seconds; `alone`: one thing after the other. AssertionError unless
        nearly all went well."""
        many = (1, 1) if alone else (PROCESSES, FLIGHTS)
        for _ in range(TRIES):
            outcome = self._run(node, mode, to, port, seconds, *many)
            if outcome.done:
                break
        assert outcome.healthy, f"load {mode} to {to}:{port}: {outcome}"
        return outcome

    def flood(
        self, node: Node, to: str, port: int, datagrams: int, sources: Iterable[str], flows: int
    ) -> Outcome:
        """Send datagrams from `flows` ports of each source in turn. AssertionError unless they go."""
        outcome = self._run(node, "flood", to, port, datagrams, ",".join(sources), flows)
        assert outcome.healthy, f"flood to {to}:{port}: {outcome}"
        return outcome

    def _run(self, node: Node, *arguments: object) -> Outcome:
        said = node.run(str(self._load), *map(str, arguments), timeout=60).stdout
        return Outcome(**json.loads(said))


@dataclass(frozen=True, slots=True)
class CpuClock:
    """The CPU time that some processes have taken, with the kernel's work for packets on their account.

    A packet's way through all namespaces of a lab is work of a softirq, which runs on the account of whoever
    it interrupts, mostly the process that sent the packet. Kernels that account for softirqs apart, as most
    distributions' do, have them in /proc/stat for the whole machine; there a busy neighbour adds his own.
    """

    pids: tuple[int, ...]

    def seconds(self) -> float:
        return sum(map(_cpu_of, self.pids)) + softirq_seconds()


def pids_of(*nodes: Node) -> tuple[int, ...]:
    return tuple(int(pid) for n in nodes for pid in _ip_netns_pids(n).split())


def softirq_seconds() -> float:
    """What softirqs have taken so far, if this kernel keeps that apart from processes' time; else 0."""
    if not SOFTIRQS_APART:
        return 0.0
    words = Path("/proc/stat").read_text().splitlines()[0].split()
    return (int(words[6]) + int(words[7])) / os.sysconf("SC_CLK_TCK")


def throughput(node: Node, to: str, seconds: float) -> float:
    """Bits per second of one iperf3 stream; raises AssertionError when it does not run."""
    timing = ("--time", f"{max(1, round(seconds))}", "--connect-timeout", "2000")
    argv = ("iperf3", "--client", to, "--port", str(PORTS.throughput), "--json", *timing)
    for _ in range(20):  # the server may not listen yet, or still be busy with the run before
        done = node.run(*argv, check=False, timeout=60)
        if done.returncode == 0:
            return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"])
        time.sleep(0.1)
    raise AssertionError(f"iperf3 to {to}: {done.stdout[-300:]} {done.stderr}")


def _ip_netns_pids(node: Node) -> str:
    argv = ["ip", "netns", "pids", node.namespace]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout


def _cpu_of(pid: int) -> float:
    # The number of another process's CPU clock, as clock_getcpuclockid(3) makes it; /proc has 10 ms steps.
    return time.clock_gettime((~pid << 3) | 2)


def _kernel_configuration() -> str:
    packed, plain = Path("/proc/config.gz"), Path(f"/boot/config-{os.uname().release}")
    if packed.exists():
        return gzip.decompress(packed.read_bytes()).decode()
    return plain.read_text() if plain.exists() else ""


SOFTIRQS_APART = "CONFIG_IRQ_TIME_ACCOUNTING=y" in _kernel_configuration()
"""Whether this kernel keeps softirqs' time apart from processes'."""
