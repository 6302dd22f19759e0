from __future__ import annotations

import os
from pathlib import Path

import pytest

from vipd.host.durable import write_durably


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["x.yaml"], "nothing is left aside"
    assert path.stat().st_mode & 0o777 == 0o640


def test_content_is_synced_before_the_rename_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace

    def told_fsync(descriptor: int) -> None:
        events.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "content")  # noqa: PTH112
        fsync(descriptor)

    def told_replace(*names: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        events.append("rename")
        replace(*names, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(os, "replace", told_replace)
    write_durably(tmp_path / "x", b"data")
    assert events == ["content", "rename", "directory"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_durably(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"


def test_what_an_earlier_crash_left_aside_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".x.new").write_bytes(b"half of something much longer than the new content")
    write_durably(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    for _ in range(5):
        write_durably(tmp_path / "x", b"data")
    opened = Path("/proc/self/fd")
    # Of this directory alone: what other tests have left open may go at any moment.
    assert [name for fd in opened.iterdir() if (name := target(fd)).startswith(str(tmp_path))] == []


def target(descriptor: Path) -> str:
    """What a descriptor leads to; the one that lists the others is gone already."""
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""
