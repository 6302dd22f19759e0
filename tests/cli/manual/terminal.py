"""A shell on a pseudo-terminal: keys go in, and what it shows is waited for."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

PATIENCE = 120.0
"""Seconds that a shell on a busy machine may take for an answer."""


class Terminal:
    """What a program shows on its terminal, since the last match."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._shown = ""

    def type(self, keys: str) -> None:
        os.write(self._handle, keys.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for the pattern; what stood before its end is forgotten. Fails with what was shown instead."""
        end = time.monotonic() + PATIENCE
        while True:
            found = re.search(pattern, self._shown)
            if found:
                self._shown = self._shown[found.end() :]
                return found
            ready, _, _ = select.select([self._handle], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise AssertionError(f"{pattern!r} did not come, but {self._shown!r}")
            try:
                self._shown += os.read(self._handle, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                raise AssertionError(f"it ended with {self._shown!r}") from None


@contextmanager
def terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """The program on a terminal of its own, killed when the block ends."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=dict(environment),
    )
    os.close(theirs)
    try:
        yield Terminal(ours)
    finally:
        os.close(ours)  # hangs up: the shell ends, and with it setsid
        with process:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
