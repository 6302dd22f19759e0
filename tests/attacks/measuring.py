"""What a bystander sees: how long its changes take to be in the kernel, how late failures of its backends are
seen, how long `/healthz` takes, and how much memory vipd and its children have.

Packets decide: a change counts when a client is answered through it, a failure when a client is refused.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.flow import Process, read_line
from tests.lab.node import Node

HEALTH_PORT = 10256
LIMIT_SECONDS = 15.0
POLL_SECONDS = 0.02
HEALTHZ_SECONDS = 0.04
PAUSE_SECONDS = 0.3
MIB = 2**20


@dataclass
class Figures:
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By what the bystander did, how long each took to be seen."""
    healthz: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    pace: list[float] = field(default_factory=list)
    """By how much whatever else uses the processors slowed down a short computation, many times."""

    def worst(self, what: str) -> float:
        return max(self.seconds.get(what, ()), default=0.0)

    def slowness(self) -> float:
        """How many times as long as on an idle machine a computation took."""
        return max(1.0, sum(self.pace) / len(self.pace)) if self.pace else 1.0

    def healthz_p99(self) -> float:
        """The time that one in a hundred answers exceeded."""
        ordered = sorted(self.healthz)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else 0.0


def greeting(vip: str, port: int) -> str:
    """The line that a server greets with; empty if none does in a moment."""
    with contextlib.suppress(OSError), socket.socket() as end:
        end.settimeout(0.2)
        end.connect((vip, port))
        return end.recv(100).decode().strip()
    return ""


def refused(vip: str, port: int) -> bool:
    with socket.socket() as end:
        end.setblocking(False)
        code = end.connect_ex((vip, port))
        if code == errno.EINPROGRESS:
            select.select([], [end], [], 0.2)
            code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return code == errno.ECONNREFUSED


class Measurement:
    """Threads that do all of a bystander's changes at the same time, again and again."""

    def __init__(
        self,
        client: Node,
        host: Node,
        ways: Mapping[str, Callable[[], Callable[[], bool]]],
        pid: int,
        pace: Process,
    ) -> None:
        self._client, self._host, self._ways, self._pid, self._pace = client, host, ways, pid, pace
        self._end = threading.Event()
        self._changed = threading.Event()
        self.figures = Figures()
        self.faults: list[BaseException] = []

    def run(self, seconds: float, begin: Callable[[], None]) -> Figures:
        """Measure while `begin` runs, for so long after it, and until each change that has begun is seen."""
        changing = [threading.Thread(target=self._contain, args=(self._change, what)) for what in self._ways]
        watching = [
            threading.Thread(target=self._contain, args=(self._healthz,)),
            threading.Thread(target=self._contain, args=(self._memory,)),
        ]
        for thread in (*changing, *watching):
            thread.start()
        try:
            begin()
            self._end.wait(seconds)
        finally:
            self._end.set()
        for thread in changing:
            thread.join()
        self._changed.set()
        for thread in watching:
            thread.join()
        if self.faults:
            raise self.faults[0]
        return self.figures

    def _contain(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self.faults.append(error)
            self._end.set()

    def _change(self, what: str) -> None:
        times = self.figures.seconds.setdefault(what, [])
        with self._client.entered():
            while not self._end.is_set() or not times:
                began = time.monotonic()
                seen = self._ways[what]()
                while not seen() and time.monotonic() - began < LIMIT_SECONDS:
                    time.sleep(POLL_SECONDS)
                times.append(time.monotonic() - began)
                self._end.wait(PAUSE_SECONDS)

    def _healthz(self) -> None:
        with self._client.entered():
            while not self._changed.wait(HEALTHZ_SECONDS):
                began = time.monotonic()
                connection = http.client.HTTPConnection(self._host.ipv4, HEALTH_PORT, timeout=LIMIT_SECONDS)
                with contextlib.suppress(OSError, http.client.HTTPException):
                    connection.request("GET", "/healthz")
                    connection.getresponse().read()
                connection.close()
                self.figures.healthz.append(time.monotonic() - began)

    def _memory(self) -> None:
        while not self._changed.wait(0.1):
            while line := read_line(self._pace, 0):
                self.figures.pace.append(float(line))
            self.figures.memory.append(memory_of(self._pid))


def memory_of(pid: int, parent: str = "") -> int:
    """Bytes of a process and all its descendants that are in memory."""
    with contextlib.suppress(OSError, IndexError):
        size, resident, _ = Path(f"/proc/{pid}/statm").read_text().split(maxsplit=2)
        if size == parent:
            return 0  # a child that runs no program yet, with the memory of its parent
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = " ".join((task / "children").read_text() for task in tasks).split()
        return int(resident) * 4096 + sum(memory_of(int(child), size) for child in children)
    return 0
