"""Eight clients that connect to one address until standard input closes; then prints the outcome.

    many_clients.py ADDRESS PORT SECONDS     SECONDS: after which an attempt has failed

As a program, one JSON line: `{"answered": 1234, "slow": 2, "failed": {}}`.
"""

from __future__ import annotations

import collections
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.lab.flow import finish
from tests.lab.node import Node
from tests.lab.steady_client import connect_once

CLIENTS = 8
PAUSE_SECONDS = 0.02
SLOW_SECONDS = 0.5
"""An answer that takes longer had a packet lost on the way: the kernel sends it again after a second."""
TIMEOUT_SECONDS = 3.0


@contextmanager
def many_clients(node: Node, address: str, timeout: float = TIMEOUT_SECONDS) -> Iterator[dict[str, Any]]:
    """New connections all the time; afterwards what came of them."""
    process = node.start(sys.executable, "-m", __name__, address, "80", str(timeout))
    outcome: dict[str, Any] = {}
    try:
        yield outcome
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        outcome.update(json.loads(process.stdout.readline()))
    finally:
        finish(process)


def main() -> None:
    address, port, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    outcomes: collections.Counter[str] = collections.Counter()
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(PAUSE_SECONDS):
            began = time.monotonic()
            outcome = connect_once(address, port, timeout)
            slow = not outcome and time.monotonic() - began > SLOW_SECONDS
            outcomes["slow" if slow else outcome] += 1

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    slow, quick = outcomes.pop("slow", 0), outcomes.pop("", 0)
    print(json.dumps({"answered": slow + quick, "slow": slow, "failed": dict(outcomes)}), flush=True)


if __name__ == "__main__":
    main()
