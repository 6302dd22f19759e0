"""Files that survive a crash at any moment: written aside, synced, renamed over, and the directory synced."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, data: bytes, mode: int = 0o640) -> None:
    """Replace a file by `data`; afterwards a power cut leaves the old content or the new, never a mix.

    Raises OSError; then the old content still stands.
    """
    aside = path.with_name(f".{path.name}.new")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with open(descriptor, "wb", closefd=True) as file:  # noqa: PTH123 (a descriptor, not a path)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Make a directory of vipd's own where it is not there. Raises OSError, whose text says so when it was
    removed while vipd ran: a unit of systemd cannot make it again, and the system's words would mislead."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o750)
    except OSError as error:
        if path.exists():
            raise
        why = f"the directory {path} is gone and cannot be made again ({error.strerror})"
        raise OSError(error.errno, f"{why}; hint: systemctl restart vipd makes it") from None


def sync_directory(path: Path) -> None:
    """Make renames and removals in a directory last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
