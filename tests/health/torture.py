"""A vipd that asks many backends, and nothing else: the parent kills it as it pleases.

    torture.py FILE PORT NUMBER

Says its verdicts before it has asked anybody, and again for each line that comes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from vipd.health.checker import HealthChecker
from vipd.model.check import HttpProbe, TcpProbe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

TIMING = Timing(interval=0.3, timeout=0.3, rise=2, fall=2)


def address(number: int) -> str:
    """Of a backend."""
    return f"127.77.0.{number + 1}"


def targets(port: int, count: int) -> dict[str, CheckTarget]:
    """By name: each backend is asked by TCP, and every tenth also by HTTP, which none of them speaks."""
    found = {
        f"tcp {n}": CheckTarget(address(n), port, Protocol.TCP, TcpProbe(), TIMING) for n in range(count)
    }
    slower = Timing(interval=0.3, timeout=0.3, rise=2, fall=4)
    for number in range(0, count, 10):
        found[f"tcp4 {number}"] = CheckTarget(address(number), port, Protocol.TCP, TcpProbe(), slower)
        found[f"http {number}"] = CheckTarget(address(number), port, Protocol.TCP, HttpProbe(), TIMING)
    return found


async def main(file: Path, port: int, count: int) -> None:
    """Ask until standard input ends, or somebody ends this."""
    asked, health = targets(port, count), HealthChecker(file)
    for name, target in asked.items():
        health.follow(f"service of {name}", [target])

    def say() -> None:
        verdicts = {name: health.status(target) for name, target in asked.items()}
        print(
            json.dumps({name: [v.counts_healthy, v.state, v.reason] for name, v in verdicts.items()}),
            flush=True,
        )

    say()
    task = asyncio.create_task(health.run())
    while await asyncio.to_thread(sys.stdin.readline):
        say()
    task.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
