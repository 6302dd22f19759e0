"""Traces that wait for packets in a node, forked from one process: each is saved the start of an interpreter.

Run as a program it reads one JSON object a line: of each trace the pipe that it writes to, and its target.
Those of the line before end then.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tests.lab.inside import vipctl
from tests.lab.node import Node
from tests.observe.explain.asking import Json


class Tracers:
    """Such a process, which asks the daemon at a socket for predictions."""

    def __init__(self, node: Node, socket: object) -> None:
        self._process = node.start(sys.executable, "-m", "tests.observe.live_trace.tracers", str(socket))

    @contextlib.contextmanager
    def waiting(self, targets: Sequence[str]) -> Iterator[dict[str, IO[str]]]:
        """A trace that waits for packets to each target, and what it prints from then on."""
        with TemporaryDirectory(prefix="vipd-") as directory, contextlib.ExitStack() as stack:
            pipes = {str(Path(directory) / str(number)): target for number, target in enumerate(targets)}
            for pipe in pipes:
                os.mkfifo(pipe)
            self._begin(pipes)
            streams = {target: stack.enter_context(Path(pipe).open()) for pipe, target in pipes.items()}
            for stream in streams.values():
                assert "waiting for" in stream.readline()
            yield streams
            self._begin({})

    def documents(self, stream: IO[str], seconds: float) -> Iterator[Json]:
        """The lines of JSON that one of them prints; after so many seconds all of them are killed."""
        timer = threading.Timer(seconds, self._begin, [{}])
        timer.start()
        try:
            for line in stream:
                assert line.startswith("{"), line
                yield json.loads(line)
        finally:
            timer.cancel()

    def _begin(self, pipes: Mapping[str, str]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(pipes)}\n")
        self._process.stdin.flush()


def main() -> None:
    """Trace until standard input ends."""
    _, socket = sys.argv
    # All that a trace imports is loaded before the first fork.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        vipctl(["--socket", socket, "trace", "--timeout", "1ms", "-o", "json", "192.0.2.1:9/tcp"])
    children: list[int] = []
    for line in sys.stdin:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        children = [_forked(pipe, socket, target) for pipe, target in json.loads(line).items()]


def _forked(pipe: str, socket: str, target: str) -> int:
    child = os.fork()
    if child == 0:
        try:
            output = os.open(pipe, os.O_WRONLY)
            os.dup2(output, sys.stdout.fileno())
            os.dup2(output, sys.stderr.fileno())
            vipctl(["--socket", socket, "trace", "--follow", "-o", "json", target])
        finally:
            os._exit(0)
    return child


if __name__ == "__main__":
    main()
