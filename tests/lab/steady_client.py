"""A client that connects to one address all the time, one connection after the other.

As a program it prints READY after its first attempt, and when its standard input closes one JSON line:
`{"answered": 1234, "failed": {"TimeoutError": ["17:18:08.512"]}}`, with the times at which attempts began.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from tests.lab.flow import finish, read_line
from tests.lab.node import Node

PAUSE_SECONDS = 0.006
TIMEOUT_SECONDS = 10.0


@contextmanager
def steady_client(node: Node, address: str, port: int) -> Iterator[dict[str, Any]]:
    """Have a node connect for as long as the block lasts, which starts after the first attempt. The mapping
    holds `answered`, a number, and `failed`, times of day by failure, when it ends."""
    process = node.start(sys.executable, "-m", __name__, address, str(port))
    outcome: dict[str, Any] = {}
    try:
        said = read_line(process)
        assert said == "READY", f"the client in {node.namespace} ended (stderr says why): {said!r}"
        yield outcome
        assert process.stdin is not None
        process.stdin.close()
        outcome |= json.loads(read_line(process) or "{}")
    finally:
        finish(process)


def connect_once(address: str, port: int, timeout: float = TIMEOUT_SECONDS) -> str:
    """Empty when a backend answered within so many seconds, else the failure."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as flow:
        flow.settimeout(timeout)
        # Reset on close: many thousand closed connections would use up the source ports.
        flow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            flow.connect((address, port))
            flow.sendall(b"hello\n")
            return "" if flow.recv(200) else "closed"
        except OSError as error:
            return type(error).__name__


def main() -> None:
    address, port = sys.argv[1], int(sys.argv[2])
    answered = 0
    failed: dict[str, list[str]] = {}
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        began = datetime.now(UTC)
        if failure := connect_once(address, port):
            failed.setdefault(failure, []).append(f"{began:%H:%M:%S.%f}")
        else:
            answered += 1
        if answered + sum(map(len, failed.values())) == 1:
            print("READY", flush=True)
    print(json.dumps({"answered": answered, "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
