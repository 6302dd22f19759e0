"""Starts the programs that read and write the kernel's state: a fixed argv, no shell, text in and out.

Programs of checks and of `notify` run as another user: `unprivileged.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
"""Added to PATH: a service or a plain user's shell may lack the sbin directories that contain iptables."""


TIMEOUT_SECONDS = 60.0
"""How long a program may run unless its caller sets a limit. With 10,000 services the longest took 1.7 s: a
restore that deletes 2,000 chains."""


STALL_SECONDS = 10.0
"""A program that works on rules counts as hanging after this time without CPU usage. It waits for the
lock of other programs no longer than LOCK_WAIT_SECONDS."""
_SAMPLE_SECONDS = 1.0
_LEAST_SHARE = 0.005
"""Of a CPU. A script that only waits uses less."""
_KILLED_SECONDS = 5.0
"""How long to wait for the end of killed processes: one that hangs in the kernel does not end."""


class ProgramTimeoutError(Exception):
    """A program ran, or was idle, for longer than allowed and was killed: which, and how long."""

    def __init__(self, program: str, seconds: float, *, idle: bool = False) -> None:
        did = f"did nothing for {seconds:.0f} s" if idle else f"did not end within {seconds:.0f} s"
        super().__init__(f"{program} {did} and was killed")
        self.program, self.seconds = program, seconds


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The outcome of a program."""

    exit_code: int
    stdout: str
    stderr: str


Runner = Callable[[Sequence[str], str], Awaitable[ProgramResult]]
"""Runs a program with some standard input. Raises FileNotFoundError when there is no such program, and
ProgramTimeoutError when it does not end."""


Started = Callable[[int], AbstractContextManager[object]]
"""Entered with a program's pid while that program runs."""


async def run(
    argv: Sequence[str],
    stdin: str = "",
    started: Started = nullcontext,
    timeout: float = TIMEOUT_SECONDS,
    stall: float | None = None,
) -> ProgramResult:
    """Run a program to its end. It is killed with all its descendants when the call is cancelled, and after
    `timeout` seconds, or `stall` seconds without CPU usage; then ProgramTimeoutError is raised."""
    process = await _start(argv, {**os.environ, "PATH": _path(), "LC_ALL": "C"})
    watching: asyncio.Task[bool] | None = None
    with started(process.pid):
        try:
            async with asyncio.timeout(timeout) as end:
                if stall:
                    watching = asyncio.create_task(_end_when_stalled(process.pid, stall, end))
                output, errors = await process.communicate(stdin.encode())
        except TimeoutError:
            await _kill(process)
            idle = watching is not None and watching.done() and watching.result()
            raise ProgramTimeoutError(argv[0], stall if idle and stall else timeout, idle=idle) from None
        except BaseException:
            await _kill(process)
            raise
        finally:
            if watching:
                watching.cancel()
    return ProgramResult(
        process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace")
    )


def identity(program: str) -> object:
    """A value that changes when the program's file is replaced; None: there is none."""
    found = shutil.which(program, path=_path())
    try:
        status = Path(found).stat() if found else None
    except OSError:
        return None
    return (found, status.st_dev, status.st_ino, status.st_mtime_ns) if status else None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"


async def _end_when_stalled(pid: int, seconds: float, end: asyncio.Timeout) -> bool:
    """Expire a timeout once a process and all its descendants have used no CPU time for this many seconds;
    returns False if that cannot be measured here."""
    samples = deque[float](maxlen=max(round(seconds / _SAMPLE_SECONDS), 1) + 1)
    while True:
        used = _cpu_seconds(pid)
        if used is None:
            return False
        samples.append(used)
        if len(samples) == samples.maxlen and used - samples[0] < _LEAST_SHARE * seconds:
            end.reschedule(asyncio.get_running_loop().time())
            return True
        await asyncio.sleep(_SAMPLE_SECONDS)


def _cpu_seconds(pid: int) -> float | None:
    """CPU time of a process and all its descendants, 0 if it has ended; None if this kernel lists no
    children."""
    directory = Path(f"/proc/{pid}")
    try:
        ticks = directory.joinpath("stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0  # its orphans may hold its pipes open
    try:
        children = directory.joinpath(f"task/{pid}/children").read_text().split()
    except OSError:
        return 0.0 if not directory.exists() else None
    below = [_cpu_seconds(int(child)) or 0.0 for child in children]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") + sum(below)


async def _start(argv: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a program as the leader of a new process group."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            process_group=0,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # If the start itself were cancelled, asyncio would kill only the program; its children would survive.
        await _kill(await starting)
        raise


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a program that leads its own group, and the group: its children may hold its pipes open,
    also when the program itself has ended. While one of them exists the number is not reused."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILLED_SECONDS):
            await process.wait()
    # A process that has left the group may hold its pipes, and asyncio has no other way to close them.
    process._transport.close()  # type: ignore[attr-defined]  # of CPython's
    await asyncio.sleep(0)
