"""Sends a datagram, and waits for an answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

from vipd.health.probes.base import ProbeContext
from vipd.health.result import ProbeResult
from vipd.model.check import UdpProbe

MOST_ANSWER = 65535


async def probe_udp(asking: ProbeContext) -> ProbeResult:
    """Probe a target that has a UdpProbe. Raises OSError for a network error, including ICMP errors."""
    probe = cast("UdpProbe", asking.target.probe)
    loop = asyncio.get_running_loop()
    began = loop.time()
    asking.doing = "while waiting for the answer"
    with connected(asking.target.address, asking.target.port) as connection:
        connection.send(probe.send)
        if probe.expect is None:
            patience = asking.target.timing.timeout
            asking.timeout_result = ProbeResult(True, f"not refused within {patience:g} s", patience)
        answer = await loop.sock_recv(connection, MOST_ANSWER)
    seconds = loop.time() - began
    if probe.expect is None or answer.startswith(probe.expect):
        return ProbeResult.success(seconds)
    return ProbeResult.failure(f"the answer begins with {answer[: max(len(probe.expect), 8)]!r}", seconds)


@contextlib.contextmanager
def connected(address: str, port: int) -> Iterator[socket.socket]:
    """A UDP socket for one server: it receives only its answers and its ICMP errors. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    with socket.socket(family, kind) as connection:
        connection.connect((address, port))
        yield connection
