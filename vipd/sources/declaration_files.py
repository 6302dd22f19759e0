"""The files of a directory of declarations: their list, whether one has changed, and its text."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from vipd.declaration.problems import printable
from vipd.model import limits

SUFFIXES = {".yaml", ".yml", ".json"}


class Signature(NamedTuple):
    """Changes whenever a file's content does."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    user: int = 0
    """Its owner."""


def list_files(directory: Path, before: Collection[str]) -> tuple[list[Path], tuple[str, ...]]:
    """The files to read, and problems with their number. Those whose names were known `before` come
    first. Raises OSError."""
    known, others, more = list[Path](), list[Path](), 0
    with os.scandir(directory) as entries:
        for entry in entries:
            path = directory / entry.name
            if not _is_declaration(path):
                continue
            if printable(str(path)) in before:
                known.append(path)
            elif len(others) <= limits.FILES:
                others.append(path)
            else:
                more += 1
    room = max(0, limits.FILES - len(known))
    others.sort()
    read, left_out = [*sorted(known), *others[:room]], others[room:]
    if not left_out:
        return read, ()
    what = f"{len(left_out) + more} files are not read, such as {printable(left_out[0].name)}"
    hint = "write several services into one file"
    return read, (f"{directory}: {what}: {limits.FILES} are the most; hint: {hint}",)


def _is_declaration(path: Path) -> bool:
    """Declarations by suffix; hidden names are editors' own files. A directory with such a name is a problem:
    its author expects that it is read."""
    return path.suffix in SUFFIXES and not path.name.startswith(".")


def signature_of(path: Path) -> Signature:
    """The signature of a file, or of the target of a link. Raises OSError."""
    found = path.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return Signature(found.st_dev, found.st_ino, found.st_size, *times, found.st_uid)
