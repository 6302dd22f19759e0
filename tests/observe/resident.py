"""A vipctl that stays in its network namespace: each question is saved the start of an interpreter.

Run as a program it reads command lines as JSON, one a line, and prints exit code, output and errors as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.lab.flow import Process, finish, read_line
from tests.lab.inside import vipctl
from tests.lab.node import Node

PATIENCE_SECONDS = 120.0
"""For one question: vipctl asks many programs."""


class Ended(NamedTuple):
    """How a command line ended."""

    code: int
    out: str
    err: str


@dataclass
class Resident:
    """Such a process in a node; it starts with the first question."""

    node: Node
    apart: bool = False
    """In a mount namespace of its own."""
    _process: Process | None = field(default=None, repr=False)

    def run(self, *words: str) -> Ended:
        """Run vipctl."""
        process = self.started()
        assert process.stdin
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        return Ended(*json.loads(read_line(process, PATIENCE_SECONDS)))

    def started(self) -> Process:
        """The process."""
        if self._process is None:
            prefix = ("unshare", "--mount") if self.apart else ()
            self._process = self.node.start(*prefix, sys.executable, "-m", "tests.observe.resident")
        return self._process

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            finish(self._process)
            self._process = None


def main() -> None:
    """Answer until standard input ends."""
    for line in sys.stdin:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = vipctl(json.loads(line))
        print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)


if __name__ == "__main__":
    main()
