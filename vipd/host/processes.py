"""Processes of this host, as far as /proc shows them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

_UNIT = re.compile(r"/([^/]+\.service)$", re.MULTILINE)


class Processes:
    """Reads /proc below `root`."""

    def __init__(self, root: Path) -> None:
        self._proc = root / "proc"

    def running(self, names: Collection[str]) -> frozenset[str]:
        """Those of these names that some process has; a process of another namespace counts, too.

        Raises OSError if no processes are visible.
        """
        found = set()
        for process in self._all():
            try:
                found.add((process / "comm").read_text(errors="replace").strip())
            except OSError:
                continue  # it has ended
        return frozenset(found.intersection(names))

    def socket_owners(self, inodes: Collection[str]) -> dict[str, tuple[str, int, str]]:
        """Socket inode -> name, pid and systemd unit of a process that has it open."""
        wanted = {f"socket:[{inode}]": inode for inode in inodes}
        found: dict[str, tuple[str, int, str]] = {}
        with contextlib.suppress(OSError):
            for process in self._all() if wanted else ():
                for link in _links(process / "fd"):
                    if link in wanted:
                        found.setdefault(wanted[link], _described(process))
                if len(found) == len(wanted):
                    break
        return found

    def _all(self) -> Iterator[Path]:
        yield from (path for path in self._proc.iterdir() if path.name.isdigit())


def effective_capabilities() -> int:
    """The capabilities of this process that are in effect, a bit for each; none if that is unknown."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


def _links(directory: Path) -> Iterator[str]:
    try:
        for path in directory.iterdir():
            yield str(path.readlink())
    except OSError:
        return  # it has ended, or belongs to another user


def _described(process: Path) -> tuple[str, int, str]:
    try:
        unit = _UNIT.search((process / "cgroup").read_text(errors="replace"))
        name = (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return "", 0, ""
    return name, int(process.name), unit[1] if unit else ""
