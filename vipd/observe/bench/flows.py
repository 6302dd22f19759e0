"""The two ends of the connections that are counted. Stand-alone program, standard library only.

    flows.py PARENT serve ADDRESS PORT      answers each connection with one byte
    flows.py PARENT connect                 for each line `ADDRESS PORT COUNT` makes so many connections, one
                                            after the other, and prints how many seconds they took, or
                                            `failed: why`
PARENT is the pid of the starting process. Both print READY when they are, and end when their standard input
closes or their parent ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time

TIMEOUT_SECONDS = 3.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Make the kernel end this process when its parent ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent has ended already")


def serve(address: str, port: int) -> None:
    """Answer one connection after the other."""
    with socket.create_server((address, port), backlog=128) as listener:
        _say("READY")
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        sys.stdin.read()


def connect() -> None:
    """Run the command in each line."""
    _say("READY")
    for line in sys.stdin:
        address, port, count = line.split()
        try:
            _say(str(seconds_for(address, int(port), int(count))))
        except OSError as error:
            _say(f"failed: {error}")


def seconds_for(address: str, port: int, count: int) -> float:
    """Duration of this many connections and answers, one after the other. Raises OSError."""
    began = time.perf_counter()
    for _ in range(count):
        with socket.socket() as made:
            made.settimeout(TIMEOUT_SECONDS)
            # A reset leaves no port behind that waits: any number can follow.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            made.connect((address, port))
            if not made.recv(1):
                raise ConnectionAbortedError("closed without an answer")
    return time.perf_counter() - began


def _answer(listener: socket.socket) -> None:
    while True:
        made, _ = listener.accept()
        with made:
            try:
                made.sendall(b"x")
                made.recv(1)
            except OSError:
                continue  # its reset


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[1]))
    try:
        if sys.argv[2] == "serve":
            serve(sys.argv[3], int(sys.argv[4]))
        else:
            connect()
    except KeyboardInterrupt:
        sys.exit(130)
