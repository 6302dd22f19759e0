"""Why the daemon does not start, in words that are true."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vipd.host import preflight as start
from vipd.host.preflight import StartError, locked_inodes, namespace_locks, state_lock
from vipd.host.settings.settings import Settings

PREFIX = "STARTT"
NOBODY = 65534


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


@contextmanager
def another(tmp_path: Path, *before: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a state directory of its own, started by some words."""
    program = f"""if True:
        import sys, time
        from pathlib import Path
        from vipd.host import preflight as start
        from vipd.host.settings.settings import Settings
        start.RUNTIME_DIR = Path({str(tmp_path / "run")!r})
        with start.state_lock(Settings(state_dir={str(tmp_path / "other")!r}, chain_prefix={PREFIX!r})):
            print("held", flush=True)
            time.sleep(600)
    """
    argv = [*before, sys.executable, "-c", program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_another_daemon_is_named_where_there_is_one(tmp_path: Path) -> None:
    with state_lock(settings(tmp_path)):
        assert f"another vipd runs on {tmp_path / 'state'} (pid {os.getpid()}); hint: systemctl" in str(
            refused(tmp_path)
        )
    with another(tmp_path) as process:
        told = str(refused(tmp_path))
        assert f"another vipd writes the chains {PREFIX}-*" in told
        assert f"(pid {process.pid}); hint: stop it" in told
        process.send_signal(signal.SIGKILL)
        process.wait()
    with state_lock(settings(tmp_path)):
        pass


def test_no_local_user_can_hold_what_vipd_needs(tmp_path: Path, runtime: Path) -> None:
    """Abstract sockets belong to everybody, and so do files that others can open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        held.bind(f"\0vipd/{PREFIX}")
        with state_lock(settings(tmp_path)):
            locks = [*runtime.iterdir(), tmp_path / "state/lock"]
            assert len(locks) == 2
            assert {path.stat().st_mode & 0o777 for path in locks} == {0o600}
            assert runtime.stat().st_mode & 0o777 == 0o755, "the API's socket is there, too"


def test_a_lock_of_an_older_version_is_closed_to_its_group(tmp_path: Path) -> None:
    path = tmp_path / "state/lock"
    path.parent.mkdir()
    path.touch(0o640)
    with state_lock(settings(tmp_path)):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_each_network_namespace_has_its_own(tmp_path: Path, runtime: Path) -> None:
    with another(tmp_path, "unshare", "--net"), state_lock(settings(tmp_path)):
        assert len(list(runtime.iterdir())) == 2
        assert list(namespace_locks(runtime, Path("/proc"))) == [PREFIX]
    assert len(list(runtime.iterdir())) == 1, "the one that was killed is left"


@pytest.mark.root
def test_locks_that_killed_daemons_left_go_and_those_held_stay(tmp_path: Path, runtime: Path) -> None:
    with contextlib.ExitStack() as kept:
        with another(tmp_path, "unshare", "--net") as killed:
            # While it is open, the next namespace does not get the same number.
            kept.enter_context(Path(f"/proc/{killed.pid}/ns/net").open("rb", buffering=0))
            killed.kill()
            killed.wait()
        (left,) = runtime.iterdir()
        others = [runtime / "vipd.sock", runtime / "netns-x-V.lock"]
        for path in others:
            path.touch()
        (runtime / "netns-7-LINK.lock").symlink_to(others[1])
        (runtime / "netns-7-DIR.lock").mkdir()
        with another(tmp_path, "unshare", "--net"):
            assert not left.exists(), "each start removes them"
            (held,) = set(runtime.glob("netns-[0-9]*-STARTT.lock"))
            others.append(runtime / f"netns-{Path('/proc/self/ns/net').stat().st_ino}-OTHER.lock")
            others[-1].touch()
            with state_lock(settings(tmp_path)):
                assert held.exists()
                assert all(path.exists() for path in others), "no lock, or of this network namespace"


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


def test_of_very_many_locks_a_start_looks_at_some(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "MAX_STALE_LOCKS", 3)
    runtime.mkdir(0o755)
    for number in range(8):
        (runtime / f"netns-{number}-VIPD.lock").touch()
    for left in (5, 2, 0):
        with state_lock(settings(tmp_path)):
            assert len(list(runtime.glob("*-VIPD.lock"))) == left


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


@pytest.mark.parametrize(
    ("free", "files", "inodes", "named"),
    [
        (60 << 20, 100, 10, None),
        (60 << 20, 0, 0, None),
        (40 << 20, 100, 10, "the disk is nearly full: 40960 KiB are left for "),
        (1 << 19, 100, 10, "the disk is full: 512 KiB are left for "),
        (60 << 20, 100, 0, "the disk is full: 61440 KiB are left for "),
    ],
)
def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, files: int, inodes: int, named: str | None
) -> None:
    blocks = free // 4096
    system = os.statvfs_result((4096, 4096, 2 * blocks, blocks + 99, blocks, files, inodes, inodes, 0, 255))
    monkeypatch.setattr("vipd.host.preflight.os.statvfs", lambda _: system)
    found = start.state_faults(tmp_path)
    assert [text.partition(str(tmp_path))[0] for text in found] == ([named] if named else [])
    assert all("; hint: see what takes it: du -xh " in text for text in found)


def test_a_directory_that_everybody_may_write_to_is_refused(tmp_path: Path, runtime: Path) -> None:
    for path in (runtime, tmp_path / "state"):
        path.mkdir(exist_ok=True)
        path.chmod(0o1777)
        told = str(refused(tmp_path))
        assert f"everybody may write to {path}; hint: chmod o-w {path}" in told
        assert told.count("hint:") == 1
        path.chmod(0o755)


@pytest.mark.root
def test_without_a_directory_that_it_can_write_to_vipd_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plain user with CAP_NET_ADMIN, in a namespace of its own, say."""
    for path in (tmp_path, *tmp_path.parents[:3]):  # of pytest, and of each of its workers
        path.chmod(0o755)
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        with state_lock(settings(tmp_path)):
            assert "a second vipd in this network namespace would not be noticed" in caplog.text
    finally:
        os.seteuid(0)


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
