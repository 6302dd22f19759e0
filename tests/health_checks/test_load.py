"""5,000 backends, each asked over TCP every 5 seconds: 1,000 connections a second."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter

from tests.health_checks.servers import run
from vipd.checks import TcpProbe, Timing
from vipd.health.door import Health
from vipd.health.state import State
from vipd.health.targets import Target
from vipd.model import Protocol

Found = tuple[State, str]

BACKENDS = 5000
SECONDS = 8.0
"""All are asked within the first five."""


def test_five_thousand_backends_are_asked_on_one_core() -> None:
    """The kernel takes the handshakes; nobody has to accept, since none is completed."""
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        targets = [
            Target(
                f"127.{1 + n // 62_500}.{n // 250 % 250}.{1 + n % 250}",
                port,
                Protocol.TCP,
                TcpProbe(),
                Timing(rise=1),
            )
            for n in range(BACKENDS)
        ]
        verdicts, lags, cpu = run(watch(targets, listener))
    lags.sort()
    print(f"{BACKENDS} backends: {dict(verdicts)}")
    print(f"{cpu / SECONDS:.1%} of a core; loop late by {lags[len(lags) // 2] * 1000:.1f} ms (median)")
    print(f"late by {lags[-1] * 1000:.0f} ms at worst")
    assert verdicts == {(State.HEALTHY, "answered"): BACKENDS}
    assert cpu / SECONDS < 0.6
    assert lags[len(lags) // 2] < 0.05


async def watch(targets: list[Target], listener: socket.socket) -> tuple[Counter[Found], list[float], float]:
    """The verdicts at the end, how late the loop was, and the seconds of processor time."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)

    def accept() -> None:
        with contextlib.suppress(OSError):
            listener.accept()[0].close()

    loop.add_reader(listener.fileno(), accept)
    health, lags = Health(), []
    for number, target in enumerate(targets):
        health.follow(f"s{number}", [target])
    task = asyncio.create_task(health.run())
    cpu, end = time.process_time(), loop.time() + SECONDS
    while loop.time() < end:
        before = loop.time()
        await asyncio.sleep(0.05)
        lags.append(loop.time() - before - 0.05)
    used = time.process_time() - cpu
    counts: Counter[Found] = Counter()
    for _, verdict in health.verdicts():
        counts[verdict.state, verdict.reason.partition(" in ")[0]] += 1
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    loop.remove_reader(listener.fileno())
    return counts, lags, used
