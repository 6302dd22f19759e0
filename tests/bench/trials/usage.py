"""Measures the cost of a piece of work: time, processor time, memory, and input for other programs."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vipd.host.process import ProgramResult, run

SAMPLE_SECONDS = 0.005
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of one piece of work."""

    seconds: float
    """Elapsed time."""
    cpu: float
    """Seconds of processor time, in user space and in the kernel, of this process and of those it ran."""
    sent: int
    """Bytes that those programs were given to read."""
    programs: int
    """Number of programs run."""
    program_mib: float
    """Largest memory of one of them, sampled every few milliseconds. 0: none was run."""


class Meter:
    """Measures pieces of work one after the other. Programs count that are run by its `run`."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        """Seconds after which a program is killed."""
        self._sent = self._programs = 0
        self._program_kib = 0

    async def run(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        """Run a program, as `vipd.host.process.Runner` promises."""
        self._programs += 1
        self._sent += len(stdin.encode())
        return await run(argv, stdin, self._watched, self.limit)

    @contextmanager
    def measured(self, into: list[Usage]) -> Iterator[None]:
        """Append the cost of the block, if it succeeds."""
        self._sent = self._programs = self._program_kib = 0
        began, cpu = time.perf_counter(), _cpu_seconds()
        yield
        seconds, spent = time.perf_counter() - began, _cpu_seconds() - cpu
        into.append(Usage(seconds, spent, self._sent, self._programs, self._program_kib / _KIB))

    @contextmanager
    def _watched(self, pid: int) -> Iterator[None]:
        # The peak in the resource usage of a finished program starts with its parent's, so it is of no use.
        watching = asyncio.get_running_loop().create_task(self._watch(pid))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, pid: int) -> None:
        while kib := peak_kib(str(pid)):
            self._program_kib = max(self._program_kib, kib)
            await asyncio.sleep(SAMPLE_SECONDS)


def peak_kib(pid: str) -> int:
    """The largest memory that a process has had, in KiB; 0 when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def _cpu_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
