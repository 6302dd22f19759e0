"""Connects to one address all the time until its standard input closes; then prints what became of it.

Stand-alone program, standard library only. One JSON line: `{"answered": 1234, "failed": {"timeout": 1}}`.
"""

from __future__ import annotations

import collections
import json
import select
import socket
import struct
import sys

PAUSE_SECONDS = 0.004
TIMEOUT_SECONDS = 10.0


def connect_once(address: str, port: int) -> str:
    """Empty when a backend answered, else the failure."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as flow:
        flow.settimeout(TIMEOUT_SECONDS)
        # Reset on close: many thousand closed connections would use up the source ports.
        flow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            flow.connect((address, port))
            flow.sendall(b"hello\n")
            return "" if flow.recv(200) else "closed"
        except OSError as error:
            return type(error).__name__


def main() -> None:
    """Connect until standard input closes."""
    address, port = sys.argv[1], int(sys.argv[2])
    outcomes: collections.Counter[str] = collections.Counter()
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        outcomes[connect_once(address, port)] += 1
    print(json.dumps({"answered": outcomes.pop("", 0), "failed": dict(outcomes)}), flush=True)


if __name__ == "__main__":
    main()
