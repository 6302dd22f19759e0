"""`vipctl trace` in a node, while packets come."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs

from tests.cli.fake_daemon import FakeDaemon, Request, fake_daemon
from tests.lab.flow import Process, finish, read_line
from tests.lab.node import Node
from tests.observe.explain.asking import Json

PATIENCE = 60.0
NOBODY = "/nowhere"
"""A socket at which no daemon answers."""


def begun(node: Node, socket: object, *words: str) -> Process:
    """A trace that waits for packets; what it says before that is read. Its errors come by the same pipe."""
    command = (sys.executable, "-m", "vipd.cli.main", "--socket", str(socket), "trace", *words)
    process = node.start(*command, stderr=subprocess.STDOUT)
    said = read_line(process, PATIENCE)
    if "waiting for" not in said:
        assert "no prediction" in said, said
        # It comes with the line before, so that there may be nothing left to wait for.
        assert process.stdout is not None
        assert "waiting for" in process.stdout.readline()
    return process


@contextlib.contextmanager
def waiting(node: Node, socket: object, *words: str) -> Iterator[Process]:
    """Such a trace, which ends with the block."""
    process = begun(node, socket, *words)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        finish(process)


def rest(process: Process) -> str:
    """What it says until its end."""
    assert process.stdout is not None
    said = process.stdout.read()
    process.wait(PATIENCE)
    return str(said)


def documents(process: Process, seconds: float) -> Iterator[Json]:
    """The lines of JSON that it prints; after so many seconds it is killed."""
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            assert line.startswith("{"), line
            yield json.loads(line)
    finally:
        timer.cancel()


def traces(ended: Any) -> list[Json]:
    """What was printed with -o json."""
    found: list[Json] = json.loads(ended.stdout)["traces"]
    return found


class Predicting(FakeDaemon):
    """A daemon that says what a test has it say, by source and target of a packet."""

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self.predictions: dict[tuple[str, str], Json] = {}
        self.prefix = "VIPD"

    def handle(self, request: Request) -> tuple[int, Json | None]:
        whole: Json = {"apiVersion": "vipd/v1"}
        if request.path == "/v1/status":
            return 200, whole | {"settings": {"chain_prefix": self.prefix}}
        if request.path != "/v1/explain":
            return super().handle(request)
        query = {name: values[0] for name, values in parse_qs(request.query).items()}
        source = query["from"]
        if source != "local" and (source.startswith("[") or source.count(":") == 1):
            source = source.rpartition(":")[0].strip("[]")
        known = self.predictions.get((source, query["target"])) or self.predictions.get(("", query["target"]))
        return (200, whole | {"explanation": known}) if known else super().handle(request)


@contextlib.contextmanager
def predicting() -> Iterator[Predicting]:
    """Such a daemon."""
    with TemporaryDirectory(prefix="vipd-") as directory:
        daemon = Predicting(Path(directory) / "vipd.sock")
        with fake_daemon(daemon.socket, daemon):
            yield daemon
