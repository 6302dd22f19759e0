"""The real daemon in a lab's host namespace, with its own directories, and vipctl beside it."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import quote

import yaml

from tests.lab.flow import Process, finish
from tests.lab.inside import vipctl
from tests.lab.node import Node
from tests.lab.waiting import SOON_SECONDS, wait_until

START_SECONDS = 90.0
STOP_SECONDS = 60.0
LOCAL_VERBS = {
    *("check", "render", "explain", "cleanup", "doctor", "register", "rules", "trace", "bench"),
    *("edit", "top"),
}
"""They look at the host, or at the terminal. The others ask the daemon, from this process in a tenth of the
time."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket. Does not use vipd's own client, which is itself under test."""

    def __init__(self, path: Path) -> None:
        super().__init__("vipd", timeout=START_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Asked:
    """A daemon that answers on a socket."""

    socket: Path

    def get(self, what: str) -> dict[str, Any]:
        return self.ask("GET", what)[1]

    def ask(self, method: str, what: str, body: object = None) -> tuple[int, dict[str, Any]]:
        connection = UnixConnection(self.socket)
        try:
            connection.request(method, f"/v1/{what}", None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


class Daemon(Asked):
    """`python -m vipd` in a namespace. A context manager: ready on entry; ended, rules left, on exit."""

    module = "vipd"

    def __init__(self, host: Node, declaration: str = "", **settings: object) -> None:
        self.host = host
        # Not the test's own directory: a socket's path must be shorter than 108 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="vipd-lab-")
        self.directory = Path(self._directory.name)
        self.services_dir = self.directory / "services.d"
        self.services_dir.mkdir()
        self.state_dir = self.directory / "state"
        self.socket = self.directory / "vipd.sock"
        self.config = self.directory / "vipd.yaml"
        self._process: Process | None = None
        self._log: IO[str] | None = None
        paths = {
            "services_dir": str(self.services_dir),
            "state_dir": str(self.state_dir),
            "socket": str(self.socket),
        }
        self.config.write_text(yaml.safe_dump({**paths, **settings}))
        if declaration:
            self.write(declaration)

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    def write(self, declaration: str, name: str = "services.yaml") -> None:
        """Replace one file of declarations by these `services:`, in one step as an editor does."""
        new = self.services_dir / f".{name}.new"
        # Nothing behind `services:` may be an accident: what was declared would be held.
        services = f"services:\n{declaration}" if declaration else "services: []\n"
        new.write_text(f"apiVersion: vipd/v1\n{services}")
        new.rename(self.services_dir / name)

    def declare(self, declaration: str, name: str = "services.yaml") -> None:
        """Replace one file of declarations; returns once its rules are in the kernel."""
        self.write(declaration, name)
        self.reload()
        self.wait_in_sync()

    def reload(self) -> None:
        """Have it read its files again; returns once they are in the kernel, AssertionError otherwise."""
        code, answer = self.ask("POST", "reload")
        assert (code, answer.get("applied")) == (200, True), answer

    def start(self, timeout: float = START_SECONDS) -> None:
        """Start the daemon; returns once the rules are in the kernel, AssertionError after `timeout`."""
        assert self._process is None, "the daemon runs already"
        self._log = (self.directory / "log").open("a")
        self._process = self.host.start(
            sys.executable, "-m", self.module, "--config", str(self.config), stderr=self._log
        )
        self.wait_in_sync(timeout)

    def stop(self) -> None:
        """End it by SIGTERM; raises AssertionError unless it exits with 0."""
        assert self._end(signal.SIGTERM) == 0, f"vipd did not stop well; its log:\n{self.log}"

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it by a signal: SIGKILL, or one of a fault in its memory."""
        self._end(number)

    def wait_for_end(self) -> int:
        return self._end(None)

    def wait_in_sync(self, timeout: float = START_SECONDS) -> None:
        """Return once status is `in-sync`; raises AssertionError after `timeout` seconds."""
        state = "silent"

        def in_sync() -> bool:
            nonlocal state
            assert self._process is None or self._process.poll() is None, f"vipd ended; its log:\n{self.log}"
            try:
                state = self.status()["state"]
            except OSError:
                state = "silent"
            return state == "in-sync"

        wait_until(in_sync, lambda: f"vipd is {state}; its log:\n{self.log}", timeout)

    def status(self) -> dict[str, Any]:
        return self.get("status")

    def memory(self) -> list[str]:
        return Path(f"/proc/{self.status()['pid']}/status").read_text().splitlines()

    def endpoints(self, target: str) -> list[str]:
        """`ADDR:PORT` of every backend of a service; empty while there is no such service."""
        answer = self.get(f"services/{quote(target, safe='')}")
        forwardings = answer["service"]["forwardings"] if "service" in answer else []
        return [endpoint["endpoint"] for forwarding in forwardings for endpoint in forwarding["endpoints"]]

    def wait_until(
        self, value: Callable[[], object], expected: object, timeout: float = SOON_SECONDS
    ) -> None:
        """Return once `value()` equals `expected`; raises AssertionError with both and the log after
        `timeout` seconds."""
        last: object = None

        def equal() -> bool:
            nonlocal last
            last = value()
            return last == expected

        wait_until(equal, lambda: f"{last!r} is not {expected!r}; the log:\n{self.log}", timeout)

    def vipctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        if LOCAL_VERBS.isdisjoint(arguments) and threading.current_thread() is threading.main_thread():
            return self._vipctl_here(arguments, check)
        command = (sys.executable, "-m", "vipd.cli.main", "--socket", str(self.socket))
        return self.host.run(*command, *arguments, check=check)

    def _vipctl_here(self, arguments: Sequence[str], check: bool) -> subprocess.CompletedProcess[str]:
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = vipctl(["--socket", str(self.socket), *arguments])
        done = subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())
        said = done.stderr or done.stdout
        assert not check or code == 0, f"vipctl {' '.join(arguments)}: exit {code}: {said}"
        return done

    def cleanup(self, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `vipctl cleanup`. It asks no daemon, so it needs the directory of the record."""
        return self.vipctl("cleanup", "--state-dir", str(self.state_dir), *options, check=check)

    def _end(self, number: signal.Signals | None) -> int:
        assert self._process is not None, "the daemon does not run"
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            if number is not None:
                os.kill(process.pid, number)
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finish(process)
        if self._log:
            self._log.close()
        return code

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.log)
        self._close()

    def _close(self) -> None:
        if self._process is not None:
            self._end(signal.SIGTERM)
        self._directory.cleanup()
