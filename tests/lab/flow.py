"""Processes of the lab with pipes, and one kept-open flow on top of such a process."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys

from tests.lab.traffic import Answer

COMMAND_SECONDS = 120.0
"""Time limit of a command that should be quick. Longer than any time limit of vipd and vipctl, so that their
own error message is seen first."""

Process = subprocess.Popen[str]


class Flow:
    """One kept-open flow of the client program; a context manager that closes it."""

    def __init__(self, process: Process, timeout: float) -> None:
        self._process = process
        self._timeout = timeout + COMMAND_SECONDS
        self.connected = self._outcome() == "connected"

    def ask(self) -> Answer:
        """Send one line over the flow; returns the answer. Raises AssertionError when there is none."""
        outcome = self.try_ask()
        assert isinstance(outcome, Answer), f"the flow failed: {outcome}"
        return outcome

    def try_ask(self, timeout: float = 0.0) -> Answer | str:
        """Send one line; returns the answer, or the failure (`timeout`, `refused`, `ECONNRESET`, ...).

        `timeout` is in seconds; 0 means the flow's own.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{timeout} hello\n")
        self._process.stdin.flush()
        outcome = self._outcome()
        return Answer.parse(outcome) if " " in outcome else outcome

    def _outcome(self) -> str:
        outcome = json.loads(read_line(self._process, self._timeout) or '{"failure": "ended"}')
        return str(outcome.get("answer") or outcome["failure"])

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        finish(self._process)


def client_argv(work: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.lab.client", work, *options]


def client_options(to: str, port: int, **options: object) -> list[str]:
    """Options of the client program; those that are empty or zero are left out."""
    argv = ["--to", to, "--port", str(port)]
    for name, value in options.items():
        argv += [f"--{name.replace('_', '-')}", str(value)] if value else []
    return argv


def read_line(process: Process, timeout: float = COMMAND_SECONDS) -> str:
    """The next line of a process's output; empty when it has ended or `timeout` seconds have passed."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    return process.stdout.readline().strip() if ready else ""


def finish(process: Process) -> None:
    """Close a process's pipes and end it: by end of input, else by SIGKILL after a second."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(COMMAND_SECONDS)
