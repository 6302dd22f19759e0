"""Files of the state directory are replaced whole, or stay as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vipd.host.durable import write_durably


def test_a_file_is_made_and_replaced_whatever_an_earlier_crash_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    (tmp_path / ".x.yaml.new").write_bytes(b"half of something much longer than the new content")
    for content in (b"one", b"two"):
        write_durably(path, content)
        assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["x.yaml"], "nothing is left aside"
    assert path.stat().st_mode & 0o777 == 0o640
    links = [name.readlink() for name in Path("/proc/self/fd").iterdir() if name.is_symlink()]
    assert not [link for link in links if link.is_relative_to(tmp_path)], "no descriptor is left open"


def test_content_is_synced_before_the_rename_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where that fails, the old content stays."""
    events, fsync, replace = list[str](), os.fsync, os.replace
    path = tmp_path / "x"

    def sync(descriptor: int) -> None:
        kind = "directory" if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir() else "content"
        if "full" in events:
            raise OSError(28, "No space left on device")
        events.append(kind)
        fsync(descriptor)

    def rename(*names: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        events.append("rename")
        replace(*names, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_durably(path, b"old")
    assert events == ["content", "rename", "directory"]
    events.append("full")
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
