"""The file, built once, and a host that has never seen it for each test."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.onefile.built import PINS, PROJECT, DownloadError, FreshHost, bill, build, copy_sources


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test builds the file, or waits for another process that downloads what it is made of."""
    for item in items:
        if item.nodeid.startswith("tests/onefile/"):
            item.add_marker(pytest.mark.timeout(900))


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
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheels are kept, downloaded by the first process that needs them: for all runs, as
    tests/system/prepare.sh keeps its packages, until other ones are pinned. Without root, for this run."""
    if os.geteuid():
        own = tmp_path_factory.getbasetemp()
        return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "wheels"
    cache = Path(os.environ.get("VIPD_TEST_CACHE", "/var/cache/vipd-tests"))
    cache.mkdir(parents=True, exist_ok=True)
    pins = b"".join((PROJECT / pinned).read_bytes() for pinned in PINS)
    return cache / f"wheels-{hashlib.sha256(pins).hexdigest()[:16]}"


@pytest.fixture(scope="session")
def made(readable: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The first build; other processes of this run copy it."""
    made = Build(readable / "vipd.pyz", copy_sources(PROJECT, readable / "sources"), wheels)
    whole, base = wheels.with_suffix(".whole"), tmp_path_factory.getbasetemp()
    copy = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / made.file.name
    with wheels.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if copy.exists():
            for file in (copy, bill(copy)):
                shutil.copy(file, readable)
            return made
        if not whole.exists():
            for old in wheels.parent.glob("wheels*"):
                if old.is_dir():
                    shutil.rmtree(old)
        patiently_built(made)
        whole.touch()
        for file in (made.file, bill(made.file)):
            shutil.copy(file, copy.parent)
    return made


def patiently_built(made: Build) -> None:
    """Build, again if wheels could not be downloaded."""
    for pause in (5, 20, 60):
        try:
            return build(made.sources, made.file, made.wheels)
        except DownloadError as error:
            print(f"{error}\nagain in {pause} s")
            shutil.rmtree(made.wheels, ignore_errors=True)
            time.sleep(pause)
    return build(made.sources, made.file, made.wheels)


@pytest.fixture(scope="session")
def onefile(made: Build) -> Path:
    """The program as one file."""
    return made.file


@pytest.fixture
def host(onefile: Path, readable: Path) -> Iterator[FreshHost]:
    """A host where nothing is unpacked."""
    with tempfile.TemporaryDirectory(prefix="host-", dir=readable) as name:
        Path(name).chmod(0o755)
        yield FreshHost(onefile, Path(name))


@pytest.fixture(scope="session")
def warm(onefile: Path, readable: Path) -> FreshHost:
    """A host where the file has been unpacked, for tests that change nothing."""
    directory = readable / "warm"
    directory.mkdir(mode=0o755)
    host = FreshHost(onefile, directory)
    done = host.run("--unpack")
    assert done.returncode == 0, done.stderr
    return host
