"""The command line against a fake daemon: `vipctl` runs it in this process, `spawn` in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import vipd
from tests.cli.fake_daemon import FakeDaemon, fake_daemon
from tests.lab import inside
from tests.observe.resident import Ended

ROOT = Path(vipd.__file__).parents[1]
OWN_ENVIRONMENT = ("NO_COLOR", "COLUMNS", "PYTHONUNBUFFERED")
"""Variables of whoever runs the tests that would change what a command line prints, or when."""


Vipctl = Callable[..., Ended]
Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(tmp_path / "vipd.sock") as fake:
        yield fake


@pytest.fixture
def vipctl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Vipctl:
    def call(*arguments: str) -> Ended:
        capsys.readouterr()
        code = inside.vipctl(["--socket", str(tmp_path / "vipd.sock"), *arguments])
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    started: list[subprocess.Popen[bytes]] = []

    def start(
        *arguments: str,
        program: Sequence[str] = (sys.executable, "-m", "vipd.cli.main"),
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        inherited = {key: value for key, value in os.environ.items() if key not in OWN_ENVIRONMENT}
        process = subprocess.Popen(
            [*program, *arguments],
            env=inherited
            | {"PYTHONPATH": str(ROOT), "VIPD_SOCKET": str(tmp_path / "vipd.sock"), "TERM": "xterm"}
            | environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()
