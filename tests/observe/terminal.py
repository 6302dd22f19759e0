"""What a program prints on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence


def on_terminal(argv: Sequence[str], columns: int, *, colours: bool = False) -> str:
    """What a program prints on a terminal of so many columns; it may find problems, but not fail."""
    master, slave = pty.openpty()
    plain = {} if colours else {"NO_COLOR": "1"}
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **plain}
    if colours:
        environment.pop("NO_COLOR", None)
    process = subprocess.Popen(argv, stdout=slave, stderr=slave, stdin=subprocess.DEVNULL, env=environment)
    os.close(slave)
    said = b""
    try:
        while part := _read(master):
            said += part
        assert process.wait(60) in (0, 1), said.decode()
    finally:
        os.close(master)
        if process.poll() is None:
            process.kill()
            process.wait()
    return said.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""
