"""The daemon and the command line from the file: readiness, real packets, and an upgrade while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.flow import Process, finish
from tests.lab.topology import Lab, Wiring
from tests.onefile.built import SYSTEM_PATH, TIMEOUT_SECONDS, Done, FreshHost, altered

pytestmark = [pytest.mark.root, pytest.mark.nightly]

VIP = "10.96.0.10"
PORT = 8080
DECLARATION = """\
apiVersion: vipd/v1
services:
  - {{name: shop/web, address: {vip}, ports: [{port}/tcp], backends: [{backend}]}}
"""


class Unit:
    """The daemon as a unit of Type=notify starts it, with nothing else in its environment."""

    def __init__(self, lab: Lab, host: FreshHost, directory: Path) -> None:
        self.lab, self.host, self.directory = lab, host, directory
        (directory / "services.d").mkdir()
        declaration = DECLARATION.format(vip=VIP, port=PORT, backend=lab.backends[0].ipv4)
        (directory / "services.d" / "web.yaml").write_text(declaration)

    def argv(self, file: Path, program: str, *words: str) -> list[str]:
        """The command line of one of the programs."""
        variables = (f"CACHE_DIRECTORY={self.host.cache}", f"NOTIFY_SOCKET={self.directory / 'notify'}")
        clean = ("env", "-i", f"PATH={SYSTEM_PATH}", *variables)
        return [*clean, str(file), program, *words]

    def vipctl(self, file: Path, *words: str) -> Done:
        """Run the command line from a file."""
        argv = self.argv(file, "vipctl", "--socket", f"{self.directory}/vipd.sock", *words)
        return self.lab.host.run(*argv, timeout=TIMEOUT_SECONDS)

    @contextlib.contextmanager
    def running(self, file: Path) -> Iterator[Process]:
        """The daemon from a file, ready; ended by SIGTERM."""
        paths = ("--services-dir", "services.d"), ("--state-dir", "state"), ("--socket", "vipd.sock")
        options = [word for option, name in paths for word in (option, f"{self.directory}/{name}")]
        with (self.directory / "log").open("w") as log, self._manager() as manager:
            process = self.lab.host.start(*self.argv(file, "vipd", *options), stderr=log)
            try:
                pid = self._ready(manager)
                assert pid == process.pid, "READY=1 came from another process than the unit's main one"
                yield process
                os.kill(process.pid, signal.SIGTERM)
                assert process.wait(TIMEOUT_SECONDS) == 0
            finally:
                finish(process)

    @contextlib.contextmanager
    def _manager(self) -> Iterator[socket.socket]:
        path = self.directory / "notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            manager.settimeout(TIMEOUT_SECONDS)
            manager.bind(str(path))
            yield manager
        path.unlink()

    def _ready(self, manager: socket.socket) -> int:
        """The pid that the kernel says READY=1 came from."""
        credentials = struct.Struct("3i")
        try:
            while True:
                text, extra, _, _ = manager.recvmsg(4096, socket.CMSG_SPACE(credentials.size))
                if "READY=1" in text.decode().splitlines():
                    return int(credentials.unpack(extra[0][2])[0])
        except TimeoutError:
            raise AssertionError((self.directory / "log").read_text()) from None


@pytest.fixture
def unit(host: FreshHost) -> Iterator[Unit]:
    """A unit on a host between a client and a backend that serves."""
    with Lab(Wiring(backends=1)) as lab, tempfile.TemporaryDirectory(prefix="vipd-unit-") as name:
        lab.serve_everywhere(PORT)
        yield Unit(lab, host, Path(name))


def test_daemon_serves_and_is_upgraded_under_the_feet_of_none(unit: Unit) -> None:
    host, old = unit.host, unit.host.file
    new = altered(old, host.directory / "new.pyz", "contents.py", with_another_digest)
    with unit.running(old):
        unit.lab.client.send(VIP, PORT).all_answered()
        assert "shop/web" in unit.vipctl(old, "list").stdout
        (old_tree,) = host.trees
        # The new command line unpacks, while the old daemon still runs from the old tree.
        assert "shop/web" in unit.vipctl(new, "list").stdout
        assert old_tree in host.trees
        assert len(host.trees) == 2
    with unit.running(new):
        assert "shop/web" in unit.vipctl(new, "list").stdout
        assert len(host.trees) == 1
        assert old_tree not in host.trees


def with_another_digest(contents: bytes) -> bytes:
    """The module `contents` of a file that holds something else."""
    lines = [
        b"DIGEST = '0123456789abcdef'" if b"DIGEST = " in line else line for line in contents.splitlines()
    ]
    return b"\n".join(lines) + b"\n"
