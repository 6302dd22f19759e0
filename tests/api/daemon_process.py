"""`python -m vipd` as a process in a network namespace of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import yaml

from tests.lab import unprivileged
from tests.lab.daemon import Asked, UnixConnection
from tests.lab.flow import Process, finish
from tests.lab.fork_server import fork_server
from tests.lab.node import Node
from tests.model.samples import HEAD
from tests.sources.host import namespace

PATIENCE_SECONDS = 60.0
"""For what takes a second, on a machine that does much else."""


class ConfiguredHost(Asked):
    """A namespace, and a directory with settings and declarations."""

    def __init__(self, namespace: str, root: Path) -> None:
        self.namespace, self.root = namespace, root
        self._node = Node(namespace, "host", "", "")
        self.services_dir = root / "services.d"
        self.services_dir.mkdir()
        self.state_dir = root / "state"
        self.socket = root / "vipd.sock"
        self.config = root / "vipd.yaml"
        self.settings: dict[str, object] = {
            "services_dir": str(self.services_dir),
            "state_dir": str(self.state_dir),
            "socket": str(self.socket),
        }
        self.process: Process | None = None

    def declare(self, name: str, *blocks: str) -> None:
        """Write a file of declarations, in one step as an editor does: it is never seen half written."""
        self.write(name, HEAD + "".join(blocks))

    def write(self, name: str, text: str) -> None:
        """Replace a file of the declarations' directory in one step."""
        new = self.services_dir / f".{name}.new"
        new.write_text(text)
        new.rename(self.services_dir / name)

    def argv(self, *arguments: str, module: str = "vipd") -> list[str]:
        """The command line of a program of vipd in the namespace."""
        return ["ip", "netns", "exec", self.namespace, sys.executable, "-m", module, *arguments]

    def run(
        self, *arguments: str, module: str = "vipd", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of vipd to its end."""
        self._write_config()
        inside = self.argv(*arguments, module=module)[4:]
        node = self._node.with_environment(**environment)
        return node.run(*inside, check=False, timeout=PATIENCE_SECONDS)

    def vipd_as_nobody(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the daemon's program in the namespace without any privilege."""
        self._write_config()
        argv = unprivileged.command("vipd", "--config", str(self.config), *arguments)
        return fork_server("vipd").run(self.namespace, argv, None, PATIENCE_SECONDS, {})

    def vipd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the daemon's program with this host's settings to its end."""
        return self.run("--config", str(self.config), *arguments)

    def cleanup(self) -> subprocess.CompletedProcess[str]:
        """Run vipctl cleanup."""
        return self.run("cleanup", "--state-dir", str(self.state_dir), module="vipd.cli.main")

    def tool(self, *argv: str) -> str:
        """What a program says in the namespace."""
        return self._node.run(*argv, timeout=PATIENCE_SECONDS).stdout

    def rules(self) -> str:
        """The IPv4 nat table."""
        return self.tool("iptables-save", "-t", "nat")

    def start(self) -> None:
        """Start the daemon; returns once it says that it is in sync."""
        self.begin()
        self.wait_for(lambda: self.get("status")["state"] == "in-sync")

    def begin(self) -> None:
        """Start the daemon without waiting."""
        self._write_config()
        with (self.root / "log").open("a") as log:
            inside = self.argv("--config", str(self.config))[4:]
            self.process = self._node.start(*inside, stdout=log, stderr=log)

    def wait_for(self, condition: Any) -> None:
        """Return once a condition holds; AssertionError with the log when it does not."""
        end, pause = time.monotonic() + PATIENCE_SECONDS, 0.02
        while time.monotonic() < end:
            with contextlib.suppress(OSError, HTTPException, KeyError):
                if condition():
                    return
            assert self.process is None or self.process.poll() is None, f"vipd ended:\n{self.log()}"
            time.sleep(pause)
            pause = min(1.25 * pause, 0.1)
        raise AssertionError(f"not in time; the log:\n{self.log()}")

    def log(self) -> str:
        """What the daemon said."""
        return (self.root / "log").read_text()

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit code."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        try:
            return process.wait(PATIENCE_SECONDS)
        finally:
            finish(process)

    def hold(self) -> UnixConnection:
        """A connection that stays open after a request; the caller closes it."""
        connection = UnixConnection(self.socket)
        connection.request("GET", "/v1/version")
        connection.getresponse().read()
        return connection

    def names(self) -> set[str]:
        """The services that it serves."""
        return {service["name"] for service in self.get("services")["services"]}

    def _write_config(self) -> None:
        self.config.write_text(yaml.safe_dump(self.settings))


@contextlib.contextmanager
def host() -> Iterator[ConfiguredHost]:
    """A fresh namespace; it and whatever runs in it end with the context."""
    with namespace() as node, tempfile.TemporaryDirectory(prefix="vipd-daemon-") as directory:
        made = ConfiguredHost(node.namespace, Path(directory))
        try:
            yield made
        finally:
            if made.process is not None:
                made.end(signal.SIGKILL)
