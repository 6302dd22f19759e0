"""What vipd needs from the Python Package Index: the same versions for each Python and machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

GLIBC = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 37)))
"""Wheels for a glibc up to that of Debian 12, 2.36."""

PINS = {"x86_64": "requirements.txt", "aarch64": "requirements-aarch64.txt"}
"""In debian/, for each machine: the exact versions, and the hashes of their wheels."""

NOT_FOR_RUNNING = re.compile(r"\.(pyi|pyx|pxd|pxi|c|h|hash)$|/py\.typed$")
"""What only compilers and type checkers read."""

METADATA = re.compile(r"^[^/]+\.dist-info/(METADATA$|licen[cs]e|NOTICE|COPYING|AUTHORS)", re.I)
"""Of the notes about a package, those that must go with it."""


class WheelError(Exception):
    """A wheel that cannot be had or used: what, and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A Python and a machine that the file is for."""

    python: str
    """As in `3.11`."""
    machine: str
    """As `uname -m` says it."""

    @property
    def abi(self) -> str:
        """As in `cp311`."""
        return f"cp{self.python.replace('.', '')}"

    @property
    def part(self) -> str:
        """Name of the part of the file for it."""
        return f"{self.abi}_{self.machine}"

    @property
    def suffix(self) -> str:
        """How the extension modules of Debian's Python end: it names version, machine and C library."""
        return f".cpython-{self.abi[2:]}-{self.machine}-linux-gnu.so"


def collect(
    project: Path, targets: Sequence[Target], scratch: Path, kept: Path | None = None
) -> dict[Target, dict[str, bytes]]:
    """The files to import from, for each target. Raises WheelError.

    Wheels are taken from `kept`, offline. Where it has none for a target, they are downloaded to it.
    """

    def fetch(target: Target) -> dict[str, bytes]:
        ours, pins = scratch / target.part, project / "debian" / PINS[target.machine]
        source = kept / target.part if kept else None
        if source and source.is_dir():
            _download(target, ours, pins, ["--no-index", f"--find-links={source}"])
        else:
            _download(target, ours, pins)
            if source:
                shutil.copytree(ours, source)
        return {path: data for wheel in sorted(ours.iterdir()) for path, data in _files(wheel).items()}

    with ThreadPoolExecutor() as pool:
        return dict(zip(targets, pool.map(fetch, targets), strict=True))


def _download(target: Target, directory: Path, pins: Path, options: Sequence[str] = ()) -> None:
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--require-hashes"]
    argv += [f"--requirement={pins}", f"--dest={directory}", "--only-binary=:all:", "--implementation=cp"]
    argv += [f"--python-version={target.python}", f"--abi={target.abi}", "--abi=abi3", "--abi=none"]
    argv += [f"--platform={glibc}_{target.machine}" for glibc in GLIBC]
    done = subprocess.run([*argv, *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        faults = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise WheelError(f"no wheels for {target.part}: {' '.join(faults) or done.stderr}")


def _files(wheel: Path) -> dict[str, bytes]:
    """What of a wheel is needed to run and to pass it on, by path on the import path."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        elsewhere = [name for name in names if name.partition("/")[0].endswith(".data")]
        if elsewhere:
            raise WheelError(f"{wheel.name}: installs {elsewhere[0]} outside of the import path")
        return {name: archive.read(name) for name in names if _wanted(name)}


def _wanted(name: str) -> bool:
    if name.partition("/")[0].endswith(".dist-info"):
        return METADATA.match(name) is not None
    return NOT_FOR_RUNNING.search(name) is None
