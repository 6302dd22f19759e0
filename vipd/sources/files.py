"""Declarations in a directory of files, with a copy of the last good version of each.

A file is read when it changes. A file with problems, or one that cannot be read, keeps its last accepted
version, also over a restart: a copy is in `state_dir/accepted`. A deleted file serves no longer.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import watchfiles

from vipd.declaration.incremental import parse_incrementally
from vipd.declaration.native import parse_declaration
from vipd.declaration.pieces import Utf8, concatenated, find, first_invalid_utf8
from vipd.declaration.problems import (
    Declaration,
    Problem,
    internal_error,
    internal_problem,
    printable,
    unreadable_problem,
)
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.host.durable import (
    error_text,
    make_directory,
    names_in,
    open_own,
    read_large,
    remove_own,
    write_durably,
)
from vipd.host.followed_links import read_followed
from vipd.host.gc_control import gc_paused
from vipd.model import limits
from vipd.sources.declaration_files import SUFFIXES, Signature, list_files, signature_of

log = logging.getLogger(__name__)

WATCH_STEP_MILLISECONDS = 50
WATCH_DEBOUNCE_MILLISECONDS = 300
"""A burst of saves is gathered for at most this long; a single save is detected after one step."""
POLL_MILLISECONDS = 2000
"""Events can be missed: between a scan and the start of a watch, if the directory itself is exchanged, or
behind a link to another directory. A poll costs one stat a file."""

FRESH_NANOSECONDS = 100_000_000
"""A file changed this recently is read again at the next poll. Before Linux 6.13 file times are those of
the last tick, up to 10 ms ago: a second save within it, of the same size, changes only the text."""

RETRY_SECONDS = 10.0
"""Retry interval of a file whose reading ended in an internal error, although the file is
unchanged."""

LARGE_TEXT = 200_000
"""Bytes above which parsing is a load: some thousand services."""

MAX_NAME_BYTES = 250
"""Bytes in the name of a copy: while it is written the name is longer by five, and must stay below 256."""
_HASHED = "sha256-"

__all__ = ["SUFFIXES", "FileSource"]


@dataclass(frozen=True, slots=True)
class _FileVersion:
    """One file as last read."""

    text: Utf8 | None
    """None if it could not be read."""
    declaration: Declaration


class FileSource:
    """The files of one directory. `scan` reads what changed; `changes` yields when to scan."""

    name = "files"
    writes = True

    def __init__(self, directory: Path, copies: Path) -> None:
        self._directory = directory
        self._copies = copies
        self._read: dict[str, _FileVersion] = {}
        self._signatures: dict[str, Signature] = {}
        self._refused: dict[str, float] = {}
        """Files with problems, and when they were read, on the monotonic clock."""
        self._failed: dict[str, float] = {}
        """Files whose reading ended in an internal error, and when, on the monotonic clock."""
        self._scanning, self._keeping = threading.Lock(), threading.Lock()
        self._bytes_left = limits.DIRECTORY_BYTES
        self._faults: tuple[str, ...] = ()
        self._keeping_faults: dict[str, str] = {}
        self._accepted: dict[str, _FileVersion] = _load_copies(copies)
        self._units: dict[str, Unit] = {}
        self._stale = True
        """The units must be rebuilt."""

    @property
    def location(self) -> str:
        """The directory."""
        return str(self._directory)

    def units(self) -> Mapping[str, Unit]:
        """One unit a file, named `file:PATH`; the same object while nothing of it has changed."""
        if self._stale:
            self._stale = False
            before, self._units = self._units, {}
            for path, read in self._read.items():
                accepted = self._accepted.get(path)
                unit = Unit(read.declaration, accepted.declaration if accepted else EMPTY_DECLARATION)
                known = before.get(f"file:{path}", unit)
                same = known.candidate is unit.candidate and known.accepted is unit.accepted
                self._units[f"file:{path}"] = known if same else unit
        return self._units

    def faults(self) -> tuple[str, ...]:
        """Set while the directory cannot be read, or a copy cannot be kept."""
        return (*self._faults, *self._keeping_faults.values())

    @property
    def copy_failed(self) -> bool:
        """Whether a copy could not be written: the next step retries."""
        return bool(self._keeping_faults)

    def scan(self) -> bool:
        """Scan the directory; returns whether anything changed. Unchanged files are not read again."""
        with self._scanning:
            try:
                paths, self._faults = list_files(self._directory, {*self._read, *self._accepted})
            except OSError as error:
                return self._directory_unreadable(error)
            before, self._bytes_left = self._read, limits.DIRECTORY_BYTES
            self._read = {printable(str(path)): self._read_file(path) for path in paths}
            self._signatures = {
                path: self._signatures[path] for path in self._read if path in self._signatures
            }
            changed = self._read != before
            if changed:  # never False: `accepted` may have set it concurrently
                self._stale = True
            return changed

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Write a copy of each file whose current text serves; delete the copies of deleted files. It blocks
        on the disk; call it in a thread. It does not wait for a scan, whose duration depends on the author of
        a file: every change by anyone waits for these copies."""
        with self._keeping:
            self._update_copies(chosen)

    def _update_copies(self, chosen: Mapping[str, Declaration]) -> None:
        present = self._read  # a scan puts another one in its place
        for path, read in present.items():
            kept = self._accepted.get(path) is read and path not in self._keeping_faults
            if not kept and chosen.get(f"file:{path}") is read.declaration:
                self._save_copy(path, read)
        for path in self._accepted.keys() - present.keys():
            self._stale = True
            del self._accepted[path]
            self._keeping_faults.pop(path, None)
            with contextlib.suppress(OSError):
                remove_own(_copy_of(self._copies, path))

    async def changes(self) -> AsyncIterator[None]:
        """Yields when a scan is worth it. Watches the directory, never a file: a save that renames over a
        file would end a watch on it (measured, ecosystem.md 0.7). Raises OSError where it cannot be
        watched, after having yielded once."""
        while True:
            watched = _nearest_directory(self._directory)
            identity = _identity(watched)
            yield
            try:
                async for _ in watchfiles.awatch(
                    watched,
                    step=WATCH_STEP_MILLISECONDS,
                    debounce=WATCH_DEBOUNCE_MILLISECONDS,
                    rust_timeout=POLL_MILLISECONDS,
                    yield_on_timeout=True,
                    recursive=False,
                    watch_filter=None,
                    ignore_permission_denied=True,
                ):
                    yield
                    if _nearest_directory(self._directory) != watched or _identity(watched) != identity:
                        break
            except OSError as error:
                raise OSError(f"{watched} cannot be watched: {error}; looking every few seconds") from None

    def _read_file(self, path: Path) -> _FileVersion:
        """The current state of a file, parsed again only if its text differs."""
        name = printable(str(path))
        known = self._read.get(name)
        try:
            signature = signature_of(path)
            self._reserve_bytes(signature.size)
            again = self._due(self._failed, name)
            same = self._signatures.get(name) == signature and not self._due(self._refused, name)
            if known is not None and same and not again:
                return known
            text = read_followed(path, limits.FILE_BYTES)
            wrong = first_invalid_utf8(text)
        except OSError as error:
            self._signatures.pop(name, None)
            return _unreadable(unreadable_problem(name, error), known)
        except Exception as error:
            self._signatures.pop(name, None)
            return _unreadable(internal_problem(error, "reading this file", name), known)
        if wrong is not None:
            return _unreadable(Problem(name, 0, "", f"is not UTF-8 text (byte {wrong})"), known)
        if time.time_ns() - signature.ctime_ns > FRESH_NANOSECONDS:
            self._signatures[name] = signature
        else:
            self._signatures.pop(name, None)
        for candidate in (known, self._accepted.get(name)):
            if candidate is not None and candidate.text == text and not (again and candidate is known):
                self._note(name, candidate.declaration)
                return candidate
        return self._parse(text, name, known)

    def _reserve_bytes(self, size: int) -> None:
        """Count a file of this size among those whose text is kept. Raises OSError if they are too large
        together; one that is too large by itself does not count."""
        if size <= limits.FILE_BYTES:
            if size > self._bytes_left:
                most = limits.DIRECTORY_BYTES >> 20
                raise OSError(0, f"with the files before it there are more than {most} MiB")
            self._bytes_left -= size

    def _parse(self, text: Utf8, path: str, known: _FileVersion | None) -> _FileVersion:
        """Parse a file's text as a declaration. An unexpected exception is a problem of this file
        alone."""
        try:
            with gc_paused() if len(text) > LARGE_TEXT else contextlib.nullcontext():
                if known is not None and known.text is not None:
                    declaration = parse_incrementally(text, path, known.text, known.declaration)
                else:
                    declaration = parse_declaration(text, path)
        except Exception as error:
            declaration = Declaration(problems=(internal_problem(error, "reading this file", path),))
        self._note(path, declaration)
        return _unless_known(_FileVersion(text, declaration), known)

    def _note(self, path: str, declaration: Declaration) -> None:
        """Record a read file. One with problems is read again from time to time, in case of a disk error; one
        whose reading ended in an internal error is parsed again, too."""
        internal = any(problem.trace for problem in declaration.problems)
        for times, concerned in ((self._refused, not declaration.ok), (self._failed, internal)):
            times.pop(path, None)
            if concerned:
                times[path] = time.monotonic()

    @staticmethod
    def _due(times: Mapping[str, float], path: str) -> bool:
        return path in times and time.monotonic() - times[path] >= RETRY_SECONDS

    def _directory_unreadable(self, error: OSError) -> bool:
        """The directory cannot be read: accepted versions continue to serve."""
        if isinstance(error, FileNotFoundError) and not self._read and not self._accepted:
            self._faults = (f"{self._directory}: there is no such directory; hint: create it",)
            return False
        why = error.strerror or str(error)
        kept = "the last good versions are used" if self._accepted else "no good version of a file is known"
        self._faults = (f"{self._directory}: cannot be read: {why}; {kept}",)
        if not self._read:
            self._read, self._stale = dict(self._accepted), True
            return True
        return False

    def _save_copy(self, path: str, read: _FileVersion) -> None:
        self._accepted[path], self._stale = read, True
        try:
            make_directory(self._copies)
            write_durably(_copy_of(self._copies, path), _copied(path, read.text or b""))
            self._keeping_faults.pop(path, None)
        except Exception as error:
            reason = error_text(error) if isinstance(error, OSError) else internal_error(error, "writing it")
            self._keeping_faults[path] = f"{self._copies}: cannot keep a copy of {path}: {reason}"


def _unreadable(problem: Problem, known: _FileVersion | None) -> _FileVersion:
    return _unless_known(_FileVersion(None, Declaration(problems=(problem,))), known)


def _unless_known(read: _FileVersion, known: _FileVersion | None) -> _FileVersion:
    """The known reading if it is equal: a unit that is the same object costs nothing."""
    return known if known is not None and known == read else read


def _copy_of(kept: Path, path: str) -> Path:
    """Path of a file's copy: from its path, or, if that is no valid file name, from a hash."""
    name = quote(path, safe="")
    if len(name) <= MAX_NAME_BYTES:
        return kept / name
    return kept / f"{_HASHED}{hashlib.sha256(path.encode()).hexdigest()}"


def _copied(path: str, text: Utf8) -> Utf8:
    """The content of a copy. A copy under a hash names its file in the first line."""
    hashed = len(quote(path, safe="")) > MAX_NAME_BYTES
    return concatenated(f"{path}\n".encode(), text) if hashed else text


def _read_copy(copy: Path) -> tuple[str, Utf8]:
    """The path of which a file is the copy, and its text. Raises OSError, ValueError."""
    text = read_large(open_own(copy, os.O_RDONLY), limits.FILE_BYTES)
    wrong = first_invalid_utf8(text)
    if wrong is not None:
        raise ValueError(f"it is not UTF-8 text (byte {wrong})")
    if not copy.name.startswith(_HASHED):
        return unquote(copy.name, errors="strict"), text
    end = find(text, b"\n")
    path = text[: max(0, end)].decode()
    if _copy_of(copy.parent, path) != copy:
        raise ValueError("it does not say whose copy it is")
    del text[: end + 1]  # which moves nothing
    return path, text


def _load_copies(kept: Path) -> dict[str, _FileVersion]:
    """The accepted copies of an earlier run; of those of a newer version, the services that this one
    understands."""
    found = {}
    try:
        copies = [kept / name for name in names_in(kept)]
    except OSError:
        return {}
    for copy in copies:
        if copy.name.startswith("."):
            continue
        try:
            path, text = _read_copy(copy)
        except (OSError, ValueError) as error:
            log.warning(
                "%s: the copy of a good version cannot be read: %s", printable(str(copy)), error_text(error)
            )
            continue
        declaration = parse_declaration(text, path, accepted=True)
        if declaration.ok:
            found[path] = _FileVersion(text, declaration)
            continue
        understood = declaration.understood()
        if understood.services:
            found[path] = _FileVersion(None, understood)  # no text: the same file has its problems
        use = "serves in part" if understood.services else "is of no use"
        log.warning("%s: the copy of a good version %s: %s", copy, use, declaration.problems[0])
    return found


def _nearest_directory(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
