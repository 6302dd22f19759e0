"""The file, built once, and a host that has never seen it for each test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.onefile.built import PROJECT, Host, build, copy_sources


def memory() -> str | None:
    """A file system in memory, if there is one to run programs from: each host unpacks 40 MB."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    fit = not status.f_flag & os.ST_NOEXEC and status.f_bavail * status.f_frsize > 1 << 30
    return "/dev/shm" if fit else None


@pytest.fixture(scope="session")
def readable() -> Iterator[Path]:
    """A directory that other users can read too, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="vipd-onefile-", dir=memory()) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@dataclass(frozen=True)
class Build:
    """One build, and what went into it."""

    file: Path
    sources: Path
    wheels: Path


@pytest.fixture(scope="session")
def made(readable: Path) -> Build:
    """The first build."""
    sources = copy_sources(PROJECT, readable / "sources")
    made = Build(readable / "vipd.pyz", sources, readable / "wheels")
    build(made.sources, made.file, made.wheels)
    return made


@pytest.fixture(scope="session")
def onefile(made: Build) -> Path:
    """The program as one file."""
    return made.file


@pytest.fixture
def host(onefile: Path, readable: Path) -> Iterator[Host]:
    """A host where nothing is unpacked."""
    with tempfile.TemporaryDirectory(prefix="host-", dir=readable) as name:
        Path(name).chmod(0o755)
        yield Host(onefile, Path(name))


@pytest.fixture(scope="session")
def warm(onefile: Path, readable: Path) -> Host:
    """A host where the file has been unpacked, for tests that change nothing."""
    directory = readable / "warm"
    directory.mkdir(mode=0o755)
    host = Host(onefile, directory)
    done = host.run("--unpack")
    assert done.returncode == 0, done.stderr
    return host
