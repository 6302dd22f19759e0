"""Locks of a start, with what happens between two calls of the system: no two holders, and true words."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vipd.host import preflight as start
from vipd.host.preflight import StartError, locked_inodes, state_lock
from vipd.host.settings.settings import Settings

PREFIX = "STARTT"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /run/vipd."""
    monkeypatch.setattr(start, "RUNTIME_DIR", tmp_path / "run")
    return tmp_path / "run"


def settings(tmp_path: Path, state: str = "state") -> Settings:
    return Settings(state_dir=tmp_path / state, chain_prefix=PREFIX)


def refused(tmp_path: Path, state: str = "state") -> StartError:
    with pytest.raises(StartError) as raised, state_lock(settings(tmp_path, state)):
        pass
    return raised.value


def test_a_lock_that_is_exchanged_meanwhile_is_not_removed(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder ends, and the next one begins, between its opening and its locking."""
    flock, old = fcntl.flock, runtime / "netns-7-VIPD.lock"
    runtime.mkdir(0o755)
    old.touch()

    def late(descriptor: int, operation: int) -> None:
        if os.fstat(descriptor).st_ino == old.stat().st_ino:
            old.unlink()
            old.write_text("of the next one\n")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with state_lock(settings(tmp_path)):
        assert old.read_text() == "of the next one\n"


def test_who_looks_whether_a_lock_is_held_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, refusals = fcntl.flock, [1, 1]

    def busy(descriptor: int, operation: int) -> None:
        if "netns-" in Path(f"/proc/self/fd/{descriptor}").readlink().name and refusals:
            refusals.pop()
            raise BlockingIOError
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", busy)
    with state_lock(settings(tmp_path)):
        assert not refusals


def test_an_end_at_the_same_moment_leaves_no_two_holders(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was removed between its opening and its locking."""
    flock, removed = fcntl.flock, list[Path]()

    def late(descriptor: int, operation: int) -> None:
        if runtime.exists() and not removed and (found := list(runtime.iterdir())):
            removed.extend(found)
            found[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with state_lock(settings(tmp_path)):
        assert removed == list(runtime.iterdir())
        monkeypatch.undo()
        monkeypatch.setattr(start, "RUNTIME_DIR", runtime)
        assert "another vipd writes" in str(refused(tmp_path, "other"))


def test_other_errors_of_locking_are_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        error = refused(tmp_path)
    assert "another vipd" not in str(error)
    assert f"lock cannot be locked: No locks available; hint: {tmp_path / 'state'} must be" in str(error)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vipd.host.preflight.os.write", full)
    with state_lock(settings(tmp_path)):
        assert "another vipd runs" in str(refused(tmp_path)), "it is held without its pid in it"
    assert "cannot be written: No space left on device; hint: df" in caplog.text


def test_a_lock_for_which_several_wait_is_seen(tmp_path: Path) -> None:
    """The kernel indents those who wait behind others: as it does for /run/xtables.lock on a busy host."""
    file = tmp_path / "lock"
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), int(sys.argv[2]))"
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = []
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_SH):
            waiting.append(subprocess.Popen([sys.executable, "-c", program, str(file), str(kind)]))
            while sum(f":{file.stat().st_ino} " in line for line in locks()) <= len(waiting):
                time.sleep(0.01)
        assert any(re.match(r"\d+:  +->", line) for line in locks()), "one of them waits behind another"
        assert file.stat().st_ino in locked_inodes(Path("/proc"))
    assert [process.wait(30) for process in waiting] == [0, 0, 0]


def locks() -> list[str]:
    return Path("/proc/locks").read_text().splitlines()
