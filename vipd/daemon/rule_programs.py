"""Runs the programs that read and write rules: their time limits, and their heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from vipd.host.observer import Observers
from vipd.host.process import STALL_SECONDS, TIMEOUT_SECONDS, ProgramResult, Runner, Started, run

BYTES_PER_SECOND = 250_000
"""Minimum speed for rules. nft 1.0.6 and Linux 6.18 took 3 MB a second: this is a host ten times slower."""


def rule_programs(started: Started, observers: Observers, limit: float = TIMEOUT_SECONDS) -> Runner:
    """A runner that kills a program that does not end within `limit` seconds plus the time that its input
    needs; and one that is idle for STALL_SECONDS, so that status soon names it.

    While it processes a large input it sends heartbeats, the last one at least `limit`
    before its end. Each processed block of rules sends one, too: a large load has many.
    """

    async def run_and_beat(argv: Sequence[str], stdin: str) -> ProgramResult:
        more = len(stdin) / BYTES_PER_SECOND
        beating = asyncio.create_task(_send_heartbeats(observers, more), name="beat")
        try:
            finished = await run(argv, stdin, started, limit + more, STALL_SECONDS)
        finally:
            beating.cancel()
        if stdin:
            observers.heartbeat()
        return finished

    return run_and_beat


async def _send_heartbeats(observers: Observers, seconds: float) -> None:
    """Beat for so long, and not at its beginning."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while (left := end - clock()) > 0:
        await asyncio.sleep(min(observers.heartbeat_seconds, left))
        observers.heartbeat()
