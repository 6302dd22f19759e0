"""5,000 backends that are asked by TCP: what a check takes of the processor."""

from __future__ import annotations

import socket
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.health.servers import checked, seen
from tests.lab.inside import probed
from vipd.model.service import Backend

BACKENDS = 5000
RESET = b"\1\0\0\0\0\0\0\0"
TIMES_A_CONNECT = 25
"""So much of the processor a check may take, compared with a bare connect and its end: it takes four times as
much, and more where other programs have the caches."""


@pytest.mark.nightly
def test_five_thousand_backends_are_asked_on_one_core() -> None:
    """The kernel takes the handshakes; nobody has to accept, since none is completed."""
    with socket.create_server(("0.0.0.0", 0), backlog=8192) as listener:
        port = listener.getsockname()[1]
        service = checked("tcp", port)
        services = [
            replace(
                service, backends=(Backend(f"127.{1 + n // 62_500}.{n // 250 % 250}.{1 + n % 250}", port),)
            )
            for n in range(BACKENDS)
        ]
        bare = cost_of_a_connect(port)
        began = time.process_time()
        verdicts = probed(*services)
        cost = (time.process_time() - began) / BACKENDS
    print(f"a check takes {cost * 1e6:.0f} µs; a bare connect takes {bare * 1e6:.0f} µs")
    assert Counter(map(seen, verdicts)) == {"good": BACKENDS}
    assert cost < TIMES_A_CONNECT * bare


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
