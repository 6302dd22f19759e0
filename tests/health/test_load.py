"""5,000 backends, each asked over TCP every 5 seconds: 1,000 connections a second."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter

import pytest

from tests.health.servers import PATIENCE, RESET, run
from vipd.health.checker import HealthChecker
from vipd.health.state import HealthState
from vipd.model.check import TcpProbe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

Found = tuple[HealthState, str]

BACKENDS = 5000
SECONDS = 8.0
"""All are asked within the first five, unless the machine is too busy."""
TIMES_A_CONNECT = 25
"""So much of the processor a check may take, compared with a bare connect and its end: it takes four times as
much, and more where other programs have the caches."""


@pytest.mark.nightly
def test_five_thousand_backends_are_asked_on_one_core() -> None:
    """The kernel takes the handshakes; nobody has to accept, since none is completed."""
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        targets = [
            CheckTarget(
                f"127.{1 + n // 62_500}.{n // 250 % 250}.{1 + n % 250}",
                port,
                Protocol.TCP,
                TcpProbe(),
                Timing(timeout=PATIENCE, rise=1),
            )
            for n in range(BACKENDS)
        ]
        bare = cost_of_a_connect(port)
        verdicts, busy, cpu, asked = run(watch(targets, listener))
    busy.sort()
    print(f"{BACKENDS} backends: {dict(verdicts)}")
    print(f"{asked} checks of {cpu / asked * 1e6:.0f} µs; a bare connect takes {bare * 1e6:.0f} µs")
    print(f"loop late by work of its own: {busy[len(busy) // 2] * 1000:.1f} ms (median)")
    assert verdicts == {(HealthState.HEALTHY, "answered"): BACKENDS}
    assert cpu / asked < TIMES_A_CONNECT * bare
    assert busy[len(busy) // 2] < 0.05


def cost_of_a_connect(port: int) -> float:
    """Seconds of processor time for the least that a check can do, as this machine is now."""
    began = time.process_time()
    for number in range(2000):
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            connection.connect_ex((f"127.9.{number // 200}.{1 + number % 200}", port))
    return (time.process_time() - began) / 2000


async def watch(
    targets: list[CheckTarget], listener: socket.socket
) -> tuple[Counter[Found], list[float], float, int]:
    """The verdicts at the end, how late the loop was by its own work, and the seconds of processor time that
    so many checks took."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)

    def accept() -> None:
        with contextlib.suppress(OSError):
            listener.accept()[0].close()

    loop.add_reader(listener.fileno(), accept)
    health, busy = HealthChecker(), []
    for number, target in enumerate(targets):
        health.follow(f"s{number}", [target])
    task = asyncio.create_task(health.run())
    cpu, end = time.process_time(), loop.time() + SECONDS
    while loop.time() < end or any(v.state is HealthState.UNKNOWN for _, v in health.statuses()):
        before, worked = loop.time(), time.process_time()
        await asyncio.sleep(0.05)
        # What other programs made it wait for is none of its own work.
        busy.append(min(loop.time() - before - 0.05, time.process_time() - worked))
    used = time.process_time() - cpu
    assert health._scheduler is not None
    asked = health._scheduler.probes_started
    counts: Counter[Found] = Counter()
    for _, verdict in health.statuses():
        counts[verdict.state, verdict.reason.partition(" in ")[0]] += 1
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    loop.remove_reader(listener.fileno())
    return counts, busy, used, asked
