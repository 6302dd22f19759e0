"""Why the daemon does not start, in words that are true."""

from __future__ import annotations

import errno
import fcntl
import socket
from pathlib import Path

import pytest

from vipd.settings import Settings
from vipd.start import StartError, state_lock

PREFIX = "STARTT"


def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path / "state", chain_prefix=PREFIX)


def refused(tmp_path: Path) -> StartError:
    with pytest.raises(StartError) as raised, state_lock(settings(tmp_path)):
        pass
    return raised.value


def test_another_daemon_is_named_where_there_is_one(tmp_path: Path) -> None:
    with state_lock(settings(tmp_path)):
        assert "another vipd runs on" in str(refused(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        held.bind(f"\0vipd/{PREFIX}")
        assert f"another vipd writes the chains {PREFIX}-*" in str(refused(tmp_path))
    with state_lock(settings(tmp_path)):
        pass


def test_other_errors_of_binding_are_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        def bind(self, _: object) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("vipd.start.socket.socket", Full)
    error = refused(tmp_path)
    assert "another vipd" not in str(error)
    assert "Cannot allocate memory" in str(error)
    assert error.number == errno.ENOMEM


def test_other_errors_of_locking_are_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        error = refused(tmp_path)
    assert "another vipd" not in str(error)
    assert "lock cannot be locked: No locks available; hint: state_dir must be" in str(error)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("vipd.start.os.write", full)
        error = refused(tmp_path)
    assert "cannot be written: No space left on device; hint: df" in str(error)
