"""The package, built once, and a machine of a Debian release for each module."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.topology import Lab, Wiring
from tests.system.machine import Machine

RELEASES = ("bookworm", "trixie")
PREPARE = Path(__file__).parent / "prepare.sh"
CANNOT = 3
"""Exit code of prepare.sh where this machine cannot boot others."""
SERVED_PORT = 8080


@dataclass(frozen=True)
class Prepared:
    roots: dict[str, Path]
    package: Path


@pytest.fixture(scope="session")
def prepared() -> Prepared:
    """Root directories and the package; skips, saying why, where machines cannot be booted."""
    done = subprocess.run(
        ["bash", str(PREPARE), *RELEASES], capture_output=True, text=True, timeout=1700, check=False
    )
    if done.returncode == CANNOT:
        pytest.skip(f"NO SYSTEM TESTS: {done.stderr.strip()}")
    assert done.returncode == 0, f"prepare.sh: exit {done.returncode}: {done.stderr}"
    made = dict(
        line.split(maxsplit=1) for line in done.stdout.splitlines() if not line.startswith("==>") and line
    )
    return Prepared({release: Path(made[release]) for release in RELEASES}, Path(made["package"]))


@pytest.fixture(scope="module", params=[pytest.param("bookworm", marks=pytest.mark.nightly), "trixie"])
def machine(request: pytest.FixtureRequest, prepared: Prepared) -> Iterator[Machine]:
    """A machine just booted, that has never seen vipd, between a client and two backends that serve."""
    with Lab(Wiring(backends=2, host_route=False)) as lab:
        lab.serve_everywhere(SERVED_PORT)
        built = Machine(request.param, prepared.roots[request.param], lab)
        try:
            built.start()
            yield built
        finally:
            built.delete()


def install_vipd(machine: Machine, package: Path) -> None:
    machine.offer(package)
    machine.apt("install", "--no-install-recommends", "vipd")


def serve_web(machine: Machine, package: Path, vip: str) -> None:
    install_vipd(machine, package)
    machine.run("systemctl", "enable", "--now", "vipd")
    backends = [f"{backend.ipv4}:{SERVED_PORT}" for backend in machine.lab.backends]
    machine.run("vipctl", "add", f"{vip}:80/tcp", *backends, "--name", "web")
