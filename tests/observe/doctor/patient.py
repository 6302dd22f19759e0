"""A host of the lab with a daemon, a doctor that is asked about it, and the means to harm and mend it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.dataplanes import IPTABLES
from tests.faults.equipment import FailingTools
from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.observe.resident import Resident

SERVICES = """
  - name: web
    address: [10.96.0.10, "fd00:96::10"]
    ports: [{port: 80, target: 8080, node_port: 30080}]
    backends: [10.244.0.11, 10.244.0.12, "fd00:244::11"]
  - name: own
    address: 10.96.0.11
    ports: [{port: 80, target: 8080}]
    backends: [10.244.0.11]
"""
BINARIES = Path(sys.executable).parent
FINE = ("ok", "unchecked")


@dataclass
class Doctor:
    """`vipctl doctor` in some namespace."""

    node: Node
    socket: Path
    apart: bool = False
    """In a mount namespace of its own."""
    code: int = 0
    """The exit code of the last question."""

    def __post_init__(self) -> None:
        self._vipctl = Resident(self.node, self.apart)

    def ask(self, *words: str, target: str = "") -> list[dict[str, Any]]:
        self.code, text = self.run("doctor", *filter(None, [target]), "-o", "json", *words)
        found: list[dict[str, Any]] = json.loads(text)["diagnosis"]["findings"]
        return found

    def faults(self, *words: str, target: str = "") -> dict[str, dict[str, Any]]:
        """What is not in order, by id; several of one id leave the last."""
        return {f["id"]: f for f in self.ask(*words, target=target) if f["severity"] not in FINE}

    def run(self, *words: str) -> tuple[int, str]:
        """Exit code and output of a vipctl command line."""
        return self._vipctl.run("--socket", str(self.socket), *words)[:2]

    @property
    def pid(self) -> int:
        return self._vipctl.started().pid

    def end(self) -> None:
        self._vipctl.end()


@dataclass
class Patient:
    """The host, and who looks after it."""

    lab: Lab
    daemon: Daemon
    doctor: Doctor
    tools: FailingTools

    @property
    def host(self) -> Node:
        return self.daemon.host

    def shell(self, *commands: str) -> None:
        """Run commands on the host as an operator would paste them; AssertionError when one fails."""
        for command in commands:
            self.host.run("sh", "-c", command)

    def faults(self, *words: str, target: str = "") -> dict[str, dict[str, Any]]:
        return self.doctor.faults(*words, target=target)

    def repair(self, finding: dict[str, Any]) -> None:
        """Run what a finding says."""
        assert finding["mend"], f"{finding['id']} names no command"
        self.shell(*finding["mend"])

    @contextmanager
    def declared(self, declaration: str, name: str = "more.yaml") -> Iterator[None]:
        """For a while, one more file of services."""
        self.daemon.write(declaration, name)
        self.reload()
        try:
            yield
        finally:
            (self.daemon.services_dir / name).unlink(missing_ok=True)
            self.reload()

    def reload(self) -> None:
        """Make the daemon read everything anew; it may complain."""
        self.doctor.run("reload")


@contextmanager
def patient_in(lab: Lab, directory: Path, **settings: object) -> Iterator[Patient]:
    """A daemon on the lab's host whose iptables-restore can be made to fail, and a doctor beside it."""
    tools = FailingTools(directory, IPTABLES)
    path = f"{directory}:{BINARIES}:{os.environ['PATH']}"
    daemon = Daemon(lab.host, SERVICES, **settings)
    daemon.host = lab.host.with_environment(PATH=path, VIPD_SOCKET=str(daemon.socket))
    with daemon:
        doctor = Doctor(daemon.host, daemon.socket)
        try:
            yield Patient(lab, daemon, doctor, tools)
        finally:
            doctor.end()
