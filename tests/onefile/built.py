"""The built file: copies of it that differ, and calls in an environment with nothing in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

PROJECT = Path(__file__).parents[2]
PINS = ("debian/requirements.txt", "debian/requirements-aarch64.txt")
SOURCES = ("LICENSE", "debian/onefile", "debian/sbom.py", *PINS, "vipd")
"""What the file is built from."""
TIMEOUT_SECONDS = 200.0
NOBODY = 65534
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM_PYTHON = "/usr/bin/python3"

Done = subprocess.CompletedProcess[str]


def copy_sources(project: Path, copy: Path) -> Path:
    """A copy of what the file is built from: nobody edits it between two builds."""
    for name in SOURCES:
        source, target = project / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(
                source, target, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy
            )
        else:
            shutil.copy(source, target)
    return copy


class DownloadError(Exception):
    """A package index did not give what was asked of it, perhaps only this time."""


def bill(file: Path) -> Path:
    """What the builder lists beside a file: what is in it."""
    return file.with_name(f"{file.name}.cdx.json")


def build(
    project: Path, out: Path, wheels: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Build the file; raises AssertionError with what the builder said when that fails, or DownloadError."""
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    argv = ["bash", str(project / "debian/onefile/build.sh"), "--wheels", str(wheels), str(out)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=400, check=False)
    said = f"build.sh: exit {done.returncode}: {done.stdout}{done.stderr}"
    if "error: no wheels for" in done.stderr:
        raise DownloadError(said)
    assert done.returncode == 0, said


def altered(file: Path, copy: Path, entry: str, change: Callable[[bytes], bytes]) -> Path:
    """A copy of the file with one entry of the archive changed, fit to be run."""
    with file.open("rb") as source, zipfile.ZipFile(source) as old, copy.open("wb") as out:
        source.seek(0)
        out.write(source.readline())
        with zipfile.ZipFile(out, "w") as new:
            for info in old.infolist():
                data = old.read(info)
                new.writestr(info, change(data) if info.filename == entry else data)
    copy.chmod(0o755)
    return copy


@dataclass(frozen=True)
class FreshHost:
    """Directories of a host that has never seen the file: one for what it unpacks, and one for the rest."""

    file: Path
    directory: Path
    """Others may read it; nothing is in it yet."""

    @property
    def cache(self) -> Path:
        """What CACHE_DIRECTORY names in every call, unless the call overrides it."""
        return self.directory / "cache"

    @property
    def trees(self) -> list[Path]:
        """What is unpacked there."""
        return [path for path in self.cache.glob("[!.]*") if path.is_dir()]

    @property
    def lib(self) -> Path:
        """The modules of the only tree."""
        (tree,) = self.trees
        return tree / "lib"

    def link(self, name: str) -> Path:
        """A symbolic link to the file by another name."""
        link = self.directory / name
        link.symlink_to(self.file)
        return link

    def give(self, name: str, owner: int = 0, mode: int = 0o755) -> Path:
        """A new directory of some owner."""
        path = self.directory / name
        path.mkdir()
        shutil.chown(path, owner, owner)
        path.chmod(mode)
        return path

    def run(self, *words: str, user: int | None = None, **environment: str | Path) -> Done:
        """Run the file. Its environment is what is given, and CACHE_DIRECTORY unless given as ""."""
        environment.setdefault("CACHE_DIRECTORY", self.cache)
        return self.command(str(self.file), *words, user=user, **environment)

    def command(self, *argv: str, user: int | None = None, **environment: str | Path) -> Done:
        """Run any program, with nothing else in the environment."""
        given = {name: str(value) for name, value in environment.items() if str(value)}
        groups: list[int] | None = None if user is None else []
        return subprocess.run(
            argv,
            env=given,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            cwd="/",
            user=user,
            group=user,
            extra_groups=groups,
        )

    def in_mounts(self, mounts: str, *words: str, **environment: str | Path) -> Done:
        """Run the file where some file systems, made by shell commands, hide those of the machine."""
        script = f'set -e\n{mounts}\nset +e\n"$@"'
        environment["PATH"] = SYSTEM_PATH
        argv = ("unshare", "--mount", "sh", "-c", script, "sh", str(self.file), *words)
        return self.command(*argv, user=None, **environment)
