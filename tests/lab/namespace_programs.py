"""Programs in network namespaces, run as vipd runs those that read and write rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from vipd.host.process import ProgramResult, run


async def run_in_namespace(
    namespace: str,
    argv: Sequence[str],
    stdin: str,
    started: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> ProgramResult:
    """Run a program in a network namespace. FileNotFoundError when there is none. `ip netns exec` becomes
    that program, so that its pid is the one of which `started` is told."""
    finished = await run(["ip", "netns", "exec", namespace, *argv], stdin, started)
    if finished.exit_code == 255 and "No such file" in finished.stderr:
        raise FileNotFoundError(argv[0])
    return finished
