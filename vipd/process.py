"""The one place where vipd starts other programs: a fixed argv, no shell, text in and out."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
"""Added to PATH: a service or a plain user's shell may lack the sbin directories where iptables lives."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended."""

    code: int
    output: str
    errors: str


Runner = Callable[[Sequence[str], str], Awaitable[Finished]]
"""Runs a program with some standard input. Raises FileNotFoundError when there is no such program."""


Started = Callable[[int], AbstractContextManager[object]]
"""Entered with a program's pid while that program runs."""


async def run(argv: Sequence[str], stdin: str = "", started: Started = nullcontext) -> Finished:
    """Run a program to its end; a cancelled call ends the program."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}", "LC_ALL": "C"}
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    with started(process.pid):
        try:
            output, errors = await process.communicate(stdin.encode())
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
    return Finished(process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace"))
