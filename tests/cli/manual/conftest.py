"""What is made of the program, a `vipctl` to be typed, and a daemon that knows a few services."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import vipd
from tests.cli.documents import WEB, one
from tests.cli.fake_daemon import FakeDaemon, fake_daemon
from tests.lab.inside import Output

ROOT = Path(vipd.__file__).parents[1]
NEW_YEAR = "1767225600"
"""Of 2026, in seconds since 1970."""

_STUB = f"""#!/bin/sh
export PYTHONPATH={ROOT}
for word; do
    [ "$word" = complete ] && echo >>"$CALLS" && exec {sys.executable} -c "$PATIENTLY" "$@"
done
printf 'TYPED'; printf '<%s>' "$@"; echo END
"""
"""Shows its words; what shells ask is answered by the real one. CALLS gets a line each time."""

_PATIENTLY = """\
import sys
from vipd.cli import completion
from vipd.cli.main import run
completion.TIMEOUT_SECONDS = 60.0
sys.exit(run(sys.argv[1:]))
"""
"""The real one, on a machine that may be too busy for the fake daemon to answer in two seconds."""


@dataclass(frozen=True)
class InstalledManual:
    """A directory with all that was made, and a program `vipctl` first on PATH."""

    path: Path
    made: Path
    daemon: FakeDaemon

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.path / "home"),
            "TERM": "dumb",
            "LC_ALL": "C.UTF-8",
            "VIPD_SOCKET": str(self.daemon.socket),
            "CALLS": str(self.path / "calls"),
            "PATIENTLY": _PATIENTLY,
            "COLUMNS": "200",
        }

    def calls(self) -> int:
        """How often a shell has asked."""
        calls = self.path / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


def run(module: str, *arguments: str, date: str = "") -> Output:
    """`python -m` with a module, in this process; `date`: SOURCE_DATE_EPOCH."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", date)
        patch.setattr(sys, "argv", [module, *arguments])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                runpy.run_module(module, run_name="__main__")
            except SystemExit as end:
                code = int(end.code or 0)
    return Output(code, out.getvalue(), errors.getvalue())


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m vipd.cli.manual` writes."""
    directory = tmp_path_factory.mktemp("manual")
    assert run("vipd.cli.manual", str(directory), date=NEW_YEAR).code == 0
    return directory


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, made: Path) -> Iterator[InstalledManual]:
    path = tmp_path_factory.mktemp("installed")
    (path / "home").mkdir()
    (path / "home" / "web.yaml").touch()
    (path / "home" / "declared").mkdir()
    (path / "bin").mkdir()
    stub = path / "bin" / "vipctl"
    stub.write_text(_STUB)
    stub.chmod(0o755)
    with fake_daemon(path / "vipd.sock") as daemon:
        answer(daemon)
        yield InstalledManual(path, made, daemon)


def service(
    name: str, *frontends: str, owner: str = "cli", backends: tuple[object, ...] = ()
) -> dict[str, Any]:
    """A ServiceView that differs from others in what completion looks at."""
    forwardings = [WEB["forwardings"][0] | {"frontends": [frontend]} for frontend in frontends]
    spec = {"name": name, "backends": list(backends)}
    return WEB | {"name": name, "owner": owner, "spec": spec, "forwardings": forwardings}


SERVICES = (
    service(
        "dns",
        "10.96.0.10:53/udp",
        "[fd00:96::10]:53/udp",
        backends=("10.244.0.5", {"address": "10.244.2.21", "port": 5353, "weight": 2}, "fd00:244::5"),
    ),
    service(
        "shop/web", "10.96.0.20:443/tcp", owner="file:/etc/vipd/services.d/web.yaml", backends=("10.244.9.9",)
    ),
    service("10.96.0.30:80/tcp", "10.96.0.30:80/tcp"),
)


def answer(daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/services", {"services": list(SERVICES)})
    for view in SERVICES:
        daemon.answer(f"GET /v1/services/{view['name']}", one(view))
