"""Declarations in a directory of files, the last good version of each kept aside.

A file is read when its content changes. A file with problems, or one that cannot be read, keeps its last
accepted version, also over a restart: a copy stands in `state_dir/accepted`. A file that is gone is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import watchfiles

from vipd.catalog import NOTHING, Unit
from vipd.declaration.native import parse_declaration
from vipd.declaration.problems import Declaration, Problem
from vipd.durable import write_durably

SUFFIXES = {".yaml", ".yml", ".json"}
WATCH_STEP_MILLISECONDS = 50
WATCH_DEBOUNCE_MILLISECONDS = 300
"""At most this long a burst of saves is gathered; a single save is seen after one step."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One file as last read."""

    text: str
    declaration: Declaration


class FileSource:
    """The files of one directory. `scan` reads what changed; `changes` tells when to."""

    name = "files"

    def __init__(self, directory: Path, kept: Path) -> None:
        self._directory = directory
        self._kept = kept
        self._read: dict[str, _Read] = {}
        self._accepted: dict[str, _Read] = _load_kept(kept)
        self._faults: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """The directory."""
        return str(self._directory)

    def units(self) -> Mapping[str, Unit]:
        """One unit a file, named `file:PATH`."""
        return {
            f"file:{path}": Unit(read.declaration, accepted.declaration if accepted else NOTHING)
            for path, read in self._read.items()
            for accepted in [self._accepted.get(path)]
        }

    def faults(self) -> tuple[str, ...]:
        """Set while the directory cannot be read."""
        return self._faults

    def scan(self) -> bool:
        """Read the directory anew; whether anything is different. The same text is not parsed again."""
        try:
            paths = sorted(p for p in self._directory.iterdir() if _is_declaration(p))
            self._faults = ()
        except OSError as error:
            return self._away(error)
        before = self._read
        self._read = {str(path): self._parse(path) for path in paths}
        return self._read != before

    def accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Keep a copy of each file whose present text serves; drop the copies of files that are gone."""
        for path, read in self._read.items():
            if chosen.get(f"file:{path}") is read.declaration and self._accepted.get(path) is not read:
                self._keep(path, read)
        for path in set(self._accepted) - set(self._read):
            del self._accepted[path]
            with contextlib.suppress(OSError):
                _copy_of(self._kept, path).unlink()

    async def changes(self) -> AsyncIterator[None]:
        """Yields whenever something in the directory moves. Watches the directory, never a file: a save that
        renames over a file would end a watch on it (measured, ecosystem.md 0.7)."""
        while True:
            watched = _nearest_directory(self._directory)
            async for _ in watchfiles.awatch(
                watched,
                step=WATCH_STEP_MILLISECONDS,
                debounce=WATCH_DEBOUNCE_MILLISECONDS,
                recursive=False,
                watch_filter=None,
                ignore_permission_denied=True,
            ):
                yield
                if _nearest_directory(self._directory) != watched or not watched.is_dir():
                    break

    def _parse(self, path: Path) -> _Read:
        known = self._read.get(str(path))
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            return _unreadable(path, f"cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            return _unreadable(path, f"is not UTF-8 text (byte {error.start})")
        if known is not None and known.text == text:
            return known
        kept = self._accepted.get(str(path))
        if kept is not None and kept.text == text:
            return kept
        return _Read(text, parse_declaration(text, str(path)))

    def _away(self, error: OSError) -> bool:
        """The directory cannot be read: what was accepted goes on serving."""
        missing = isinstance(error, FileNotFoundError)
        if missing and not self._read and not self._accepted:
            self._faults = (f"{self._directory}: there is no such directory; hint: create it",)
            return False
        self._faults = (
            f"{self._directory}: cannot be read: {error.strerror}; the last good versions go on serving",
        )
        if not self._read:
            self._read = dict(self._accepted)
            return True
        return False

    def _keep(self, path: str, read: _Read) -> None:
        self._accepted[path] = read
        try:
            self._kept.mkdir(parents=True, exist_ok=True, mode=0o750)
            write_durably(_copy_of(self._kept, path), read.text.encode())
        except OSError as error:
            self._faults = (f"{self._kept}: cannot keep a copy of {path}: {error.strerror}",)


def _is_declaration(path: Path) -> bool:
    """Declarations by suffix; hidden names are editors' own files."""
    return path.suffix in SUFFIXES and not path.name.startswith(".") and not path.is_dir()


def _unreadable(path: Path, what: str) -> _Read:
    return _Read("", Declaration(problems=(Problem(str(path), 0, "", what),)))


def _copy_of(kept: Path, path: str) -> Path:
    return kept / quote(path, safe="")


def _load_kept(kept: Path) -> dict[str, _Read]:
    """The accepted copies of an earlier run. One that does not parse any more is of no use and left out."""
    found = {}
    for copy in sorted(kept.iterdir()) if kept.is_dir() else ():
        if copy.name.startswith("."):
            continue
        path = unquote(copy.name)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = copy.read_bytes().decode("utf-8")
            declaration = parse_declaration(text, path)
            if declaration.ok:
                found[path] = _Read(text, declaration)
    return found


def _nearest_directory(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path
