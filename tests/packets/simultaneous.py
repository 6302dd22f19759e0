"""Two first flows of each of N clients at the same moment, from two processors: `N VIP PORT`.

Clients are 10.77.0.1 and on; routes to them are for the caller to make. Prints a line for each: who answered
the one flow, and who the other.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import sys
from mmap import mmap

IP_FREEBIND = 15
PER_NETWORK = 250
TIMEOUT_SECONDS = 5.0
TRIALS = 12


class Lockstep:
    """Two processes that go on together; they spin, because a sleeper wakes too late."""

    def __init__(self, own: int, shared: mmap) -> None:
        self._own, self._shared = own, shared

    def meet(self, step: int) -> None:
        """Return as soon as the other one is here, too."""
        struct.pack_into("q", self._shared, 8 * self._own, step)
        while struct.unpack_from("q", self._shared, 8 * (1 - self._own))[0] < step:
            pass


def answers(number: int, receiver: tuple[str, int], processor: int, lockstep: Lockstep) -> list[str]:
    os.sched_setaffinity(0, {processor})
    found = []
    for each in range(1, number + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flow:
            flow.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
            flow.bind((f"10.77.{each // PER_NETWORK}.{each % PER_NETWORK + 1}", 0))
            flow.settimeout(TIMEOUT_SECONDS)
            flow.connect(receiver)
            lockstep.meet(each)
            found.append(answer(flow))
    return found


def answer(flow: socket.socket) -> str:
    """Who answers this flow. A datagram may get lost where nobody comes to take it."""
    for _ in range(TRIALS):
        flow.send(b"hello\n")
        try:
            return flow.recv(200).split()[0].decode()
        except TimeoutError:
            continue
    raise TimeoutError(f"no answer to {TRIALS} datagrams")


def main() -> None:
    number, receiver = int(sys.argv[1]), (sys.argv[2], int(sys.argv[3]))
    first, second = sorted(os.sched_getaffinity(0))[:2]
    shared = mmap(-1, 16)
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    other = fork.Process(
        target=lambda: sending.send(answers(number, receiver, second, Lockstep(1, shared))), daemon=True
    )
    other.start()
    for one, another in zip(
        answers(number, receiver, first, Lockstep(0, shared)), receiving.recv(), strict=True
    ):
        print(one, another)


if __name__ == "__main__":
    main()
