"""A real name server, dnsmasq, in a namespace of the lab: it answers, changes, lies, stalls and dies."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.lab.flow import Process, finish
from tests.lab.node import Node

ADDRESS, PORT = "127.0.0.1", 5353
NEEDED = pytest.mark.skipif(not shutil.which("dnsmasq"), reason="dnsmasq (dnsmasq-base) is not installed")


class NameServer:
    """dnsmasq on an address of a node. What it knows are lines of its configuration."""

    place = f"{ADDRESS}:{PORT}"

    def __init__(self, node: Node, directory: Path, ttl: int = 1, address: str = ADDRESS) -> None:
        self._node, self._ttl, self._address = node, ttl, address
        self._config, self._queries = directory / "dnsmasq.conf", directory / "queries.log"
        self._process: Process | None = None

    def serve(self, *lines: str) -> None:
        """Answer with these records from now on, and with no others."""
        self.die()
        own = ["no-resolv", "no-hosts", "no-daemon", "bind-interfaces", "user=root", "pid-file"]
        own += ["log-queries", f"log-facility={self._queries}", "local=/internal/", "edns-packet-max=512"]
        own += [f"listen-address={self._address}", f"port={PORT}", f"local-ttl={self._ttl}"]
        self._config.write_text("\n".join([*own, *lines]) + "\n")
        self._process = self._node.start("dnsmasq", "--keep-in-foreground", f"--conf-file={self._config}")

    def addresses(self, name: str, addresses: Iterable[str]) -> None:
        self.serve(*(f"host-record={name},{address}" for address in addresses))

    def stall(self) -> None:
        """Take questions, and answer none."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def die(self) -> None:
        """End: the port refuses."""
        if self._process:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            finish(self._process)
            self._process = None

    def queries(self, text: str) -> int:
        """How many questions with this text, such as `query[A] web.internal`, came so far."""
        return self._queries.read_text().count(text) if self._queries.exists() else 0
