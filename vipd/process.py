"""The one place where vipd starts other programs: a fixed argv, no shell, text in and out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
"""Added to PATH: a service or a plain user's shell may lack the sbin directories where iptables lives."""


LIMIT_SECONDS = 60.0
"""How long a program may run unless its caller says otherwise. With 10,000 services the longest took 1.7 s: a
restore that deletes 2,000 chains."""


class ProgramTimeoutError(Exception):
    """A program ran for longer than it may, and was killed: which, and how long."""

    def __init__(self, program: str, seconds: float) -> None:
        super().__init__(f"{program} did not end within {seconds:.0f} s and was killed")
        self.program, self.seconds = program, seconds


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended."""

    code: int
    output: str
    errors: str


Runner = Callable[[Sequence[str], str], Awaitable[Finished]]
"""Runs a program with some standard input. Raises FileNotFoundError when there is no such program, and
ProgramTimeoutError when it does not end."""


Started = Callable[[int], AbstractContextManager[object]]
"""Entered with a program's pid while that program runs."""


async def run(
    argv: Sequence[str], stdin: str = "", started: Started = nullcontext, limit: float = LIMIT_SECONDS
) -> Finished:
    """Run a program to its end. A cancelled call kills it with whatever it has started, and so do more than
    `limit` seconds; then ProgramTimeoutError is raised."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}", "LC_ALL": "C"}
    process = await _start(argv, environment)
    with started(process.pid):
        try:
            async with asyncio.timeout(limit):
                output, errors = await process.communicate(stdin.encode())
        except TimeoutError:
            await _kill(process)
            raise ProgramTimeoutError(argv[0], limit) from None
        except asyncio.CancelledError:
            await _kill(process)
            raise
    return Finished(process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace"))


async def _start(argv: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a program at the head of a group of its own."""
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
        # Cancelled itself, it would kill the program alone; what that has started meanwhile would live on.
        await _kill(await starting)
        raise


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a program that leads its own group, and the group: what it has started may hold its pipes open."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
