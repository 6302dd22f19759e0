"""Files that survive a crash at any moment: written aside, synced, renamed over, and the directory synced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 256 * 2**20
"""Of any file that is read."""
MOST_ASIDE = 9
"""Copies of one file that are kept aside."""


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, also for a directory, a pipe, which would block, or a
    file of more than `most` bytes."""
    return read_open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), most)


def read_open(descriptor: int, most: int) -> bytes:
    """The same of an open file, which is closed then."""
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(0, "is a directory")
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "is not a regular file")
        data = file.read(most + 1) if found.st_size <= most else b""
        if max(found.st_size, len(data)) > most:
            size = f"{most >> 20} MiB" if most >= 2**20 else f"{most} bytes"
            raise OSError(0, f"is larger than {size}")
        return data


def keep_aside(path: Path, stays: bool = False) -> str:
    """Rename what is in the place of a file that cannot be used, so that a new one does not replace it: to
    `NAME.unreadable`, then `NAME.unreadable-2`. If it `stays`, it gets that name beside its own.

    What became of it, in words; never raises.
    """
    names = [f"{path.name}.unreadable", *(f"{path.name}.unreadable-{n}" for n in range(2, MOST_ASIDE + 1))]
    for name in names:
        aside = path.with_name(name)
        try:
            if os.path.lexists(aside):
                if not (stays and aside.samefile(path)):
                    continue
            elif stays:
                aside.hardlink_to(path)
            else:
                path.rename(aside)
        except OSError as error:
            return f"it cannot be kept aside: {why(error)}"
        return f"it is kept as {aside}"
    return f"it is not kept aside, as there are {MOST_ASIDE} such files already"


def why(error: Exception) -> str:
    """What went wrong with a file, without its name."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def write_durably(path: Path, data: bytes, mode: int = 0o640) -> None:
    """Replace a file by `data`; afterwards a power cut leaves the old content or the new, never a mix.

    Raises OSError; then the old content still stands.
    """
    write_aside(path, data, mode, sync=True)
    sync_directory(path.parent)


def write_aside(path: Path, data: bytes, mode: int = 0o640, sync: bool = False) -> None:
    """Replace a file in one step, of which a power cut may bring the old content back. Raises OSError."""
    aside = path.with_name(f".{path.name}.new")
    # A pipe in its place would block.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(aside, flags, mode)
    with open(descriptor, "wb", closefd=True) as file:  # noqa: PTH123 (a descriptor, not a path)
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    aside.replace(path)


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
