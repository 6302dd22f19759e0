"""Declarations in a directory of files, with a copy of the last good version of each.

A file is read when it changes. A file with problems, or one that cannot be read, keeps its last accepted
version, also over a restart: a copy is in the cache. In a file of Kubernetes objects each Service is a unit
of its own. A deleted file serves no longer.

Nothing is forgotten because a file is empty: one that declares no service any more, without saying `services:
[]`, is held, which means that its last accepted version serves on. So are files that vanish together, if no
other is left: two or more within ten seconds, or one whose directory is missing or another one than before. A
held file is released when it declares something again; what another file declares is no longer held.
`accept_removal` lets go of all that is held.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from pathlib import Path

import watchfiles

from vipd.declaration.pieces import Utf8, first_invalid_utf8
from vipd.declaration.problems import (
    Declaration,
    Problem,
    internal_problem,
    printable,
    unreadable_problem,
)
from vipd.declaration.reader import parse_declaration
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.declaration.writer import format_declaration
from vipd.host.followed_links import read_followed
from vipd.host.gc_control import gc_paused
from vipd.model import limits
from vipd.model.formatting import counted
from vipd.model.service import Service
from vipd.sources.cache import Bucket, Cache, Value
from vipd.sources.declaration_files import SUFFIXES, Signature, list_files, signature_of
from vipd.sources.removal_guard import RemovalGuard
from vipd.sources.state import StoreError

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

SETTLE_SECONDS = 0.2
"""How long a file must rest before services that it has lost count as removed. Editors empty a file and write
it anew, or rename it away and write another: both are over within milliseconds, but may be seen."""
SETTLE_TRIES = 5
"""After so many rests a file counts as it is, so that one that is always written does not hold up others."""

LEAST_FILES = 2
"""Files that vanish together and are held; the removal of a single one is meant, in the same directory."""
NEARLY_ALL_PERCENT = 99.99
"""Above this share of at most ten thousand files lies only that of all."""

LARGE_TEXT = 200_000
"""Bytes above which parsing is a load: some thousand services. A scan that must not take long parses so much
of each author's files, and postpones the rest."""
FILE_COST = 2_000
"""Bytes that a file counts beside its text."""

_FILES_NAMED = 3
_RECORD_KEY = ""
"""Beside the paths of files."""
_REMOVE_HINT = "to remove them write services: [], delete the file, or vipctl accept-removal"

_Identity = tuple[int, int]
"""Device and inode of a directory."""
_Record = tuple[_Identity | None, tuple[str, ...]]
"""The directory of the accepted files, and the held ones."""

__all__ = ["SUFFIXES", "FileSource"]


@dataclass(frozen=True, slots=True)
class _FileVersion:
    """One file as last read."""

    text: Utf8 | None
    """None if it could not be read; of an accepted version also if a part of the file is an earlier one."""
    declaration: Declaration

    def is_of(self, text: Utf8, written_by: str) -> bool:
        """Whether it was read from this text, of this user's file."""
        services = self.declaration.services
        return self.text == text and (not services or services[0].origin.written_by == written_by)


_NOTHING = _FileVersion(None, EMPTY_DECLARATION)


@dataclass(frozen=True, slots=True)
class _Postponed:
    """A text that is still to be parsed."""

    text: Utf8
    written_by: str
    author: str


class FileSource:
    """The files of one directory. `scan` reads what changed; `changes` yields when to scan."""

    name = "files"
    writes = True

    def __init__(self, directory: Path, cache: Cache) -> None:
        self._directory = directory
        self._copies = cache.bucket("accepted", _encode, self._whole)
        self._read: dict[str, _FileVersion] = {}
        self._signatures: dict[str, Signature] = {}
        self._refused: dict[str, float] = {}
        """Files with problems, and when they were read, on the monotonic clock."""
        self._failed: dict[str, float] = {}
        """Files whose reading ended in an internal error, and when, on the monotonic clock."""
        self._scanning, self._keeping = threading.Lock(), threading.Lock()
        self._postponed: dict[str, _Postponed] = {}
        """Texts that scans have postponed, by file."""
        self._parsed: dict[str, _FileVersion] = {}
        """What has been parsed of them since the last scan."""
        self._parsed_bytes = Counter[str]()
        """Of each author's files during a scan."""
        self._unsettled: dict[str, float] = {}
        """Files that have just lost services and whose writers may go on, and since when."""
        self._bytes_left = limits.DIRECTORY_BYTES
        self._faults: tuple[str, ...] = ()
        self._record, self._accepted = _load_copies(self._copies)
        self._units: dict[str, Unit] = {}
        self._unwritten = False
        """Copies have changed since they were last written."""
        self._stale = True
        """The units must be rebuilt."""
        self._inodes: dict[str, int] = {}
        """Of each file when it was last read."""
        self._known_directory = self._record[0]
        self._guard = RemovalGuard(NEARLY_ALL_PERCENT, LEAST_FILES)
        self._gone = {path: self._accepted[path] for path in self._record[1] if path in self._accepted}
        """Held files that are no longer in the directory."""
        self._guard.held.update(self._gone)
        self._parts_seen: dict[str, tuple[_FileVersion | None, Sequence[Declaration | None]]] = {}
        """Of each file with parts: what was read of it, and what served, when parts were last accepted."""
        self._recent: dict[str, _FileVersion] = {}
        """Files removed lately, which the guard may hold yet."""
        self._missing = ""
        """Why held files are gone, as far as that is known."""

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
                accepted = self._accepted.get(path, _NOTHING).declaration
                for part, unit in _units_of(path, read.declaration, accepted):
                    name = _unit_name(path, part)
                    known = before.get(name)
                    self._units[name] = known if known and _same_unit(known, unit) else unit
            for path, unit in self._units_of_gone().items():
                known = before.get(path)
                self._units[path] = known if known and _same_unit(known, unit) else unit
        return self._units

    def faults(self) -> tuple[str, ...]:
        """Set while the directory cannot be read, or files are held that are gone."""
        return (*self._faults, *self._fault_of_gone())

    def held(self) -> Mapping[str, str]:
        """The held files, as owners of services, each with the reason."""
        gone = {f"file:{path}": "its file is gone" for path in self._gone if path not in self._read}
        return {**gone, **{f"file:{path}": "its file is empty" for path in self._emptied()}}

    def accept_removal(self) -> tuple[str, ...]:
        """Let go of all held files; returns their names. Blocks while a scan runs."""
        with self._scanning, self._keeping:
            gone, emptied = sorted(self._gone.keys() - self._read.keys()), self._emptied()
            self._guard.accept()
            self._recent.clear()
            self._gone = {}
            for path in gone:
                self._drop_copy(path)
            for path in emptied:
                self._save_copy(path, self._read[path])
            self._save_record()
            self._stale = True
        return (*gone, *emptied)

    def scan(self, whole: bool = True) -> bool:
        """Scan the directory; returns whether anything changed. Unchanged files are not read again.

        Not `whole`: what takes long is left, so that nobody's files delay those of others. `read_postponed`
        parses large texts, and while files are `unsettled` another scan is due soon.
        """
        changed = self._scan(whole)
        if not (whole and self._postponed):
            return changed
        for author in self.postponed:
            self.read_postponed(author)
        return self._scan(whole) or changed

    @property
    def postponed(self) -> list[str]:
        """The authors with texts that are to be parsed, those with the least first."""
        sizes = Counter[str]()
        for left in list(self._postponed.values()):
            sizes[left.author] += len(left.text) + FILE_COST
        return sorted(sizes, key=lambda author: sizes[author])

    @property
    def unsettled(self) -> bool:
        """Whether any file has just lost services, and may be in the middle of being written."""
        return bool(self._unsettled)

    def read_postponed(self, author: str) -> None:
        """Parse what scans have left of an author's files; the next scan takes it. It blocks, for seconds and
        more: call it in a thread, once at a time for each author."""
        for name, left in list(self._postponed.items()):
            if left.author == author:
                version = self._parse(left.text, name, self._read.get(name), left.written_by)
                with self._scanning:
                    if name in self._postponed:  # else the file is gone
                        self._parsed[name] = version
                    if self._postponed.get(name) is left:
                        del self._postponed[name]

    def _scan(self, whole: bool) -> bool:
        with self._scanning:
            try:
                paths, self._faults, directory = self._list()
            except OSError as error:
                return self._directory_unreadable(error)
            before, self._bytes_left = self._read, limits.DIRECTORY_BYTES
            inodes = dict(self._inodes)
            self._parsed_bytes.clear()
            versions = {path: self._read_file(path) for path in paths}
            read = {printable(str(path)): version for path, version in versions.items() if version}
            in_place = [path for path in paths if self._same_inode(path, inodes)]
            if whole:
                self._await_writers(in_place, read)
            self._unsettled = {} if whole else self._keep_unsettled(in_place, read)
            # Held before it leaves: what is neither in `_read` nor in `_gone` loses its copy.
            held_before, self._gone = self._gone, {**self._gone, **self._newly_held(read, directory)}
            self._read = read
            self._gone = {path: version for path, version in self._gone.items() if path not in read}
            listed = {printable(str(path)) for path in paths}
            for known in (self._signatures, self._inodes, self._postponed, self._parsed):
                for path in known.keys() - listed:
                    del known[path]
            changed = read != before or self._gone.keys() != held_before.keys()
            if changed:  # never False: `accepted` may have set it concurrently
                self._stale = True
            return changed

    def _list(self) -> tuple[list[Path], tuple[str, ...], _Identity | None]:
        """The files of the directory, what is wrong with it, and which one it is; None: there is none. Raises
        OSError."""
        listed = _list_directory(self._directory, {*self._read, *self._accepted})
        if {path for path in self._read if self._serves(path)} - {printable(str(path)) for path in listed[0]}:
            time.sleep(SETTLE_SECONDS)
            return _list_directory(self._directory, {*self._read, *self._accepted})
        return listed

    def _serves(self, path: str) -> bool:
        """Whether a file has an accepted version with services."""
        return bool(self._accepted.get(path, _NOTHING).declaration.services)

    def _newly_held(
        self, read: Mapping[str, _FileVersion], directory: _Identity | None
    ) -> dict[str, _FileVersion]:
        """The files that are gone from the directory and are held from now on."""
        if self._recent and read.keys() - self._read.keys():
            # Whoever writes another file has not lost those before it.
            self._guard.make_final()
            self._recent.clear()
        if self._guard.held or self._recent:
            for path in read:
                self._guard.key_written(path)
                self._recent.pop(path, None)
        here = f"{printable(str(self._directory))}/"
        serving = {path for path in (*self._accepted,) if path.startswith(here) and self._serves(path)}
        if serving & read.keys() or not serving:
            self._known_directory = directory
        counted_before = serving - self._guard.held - self._recent.keys()
        replaced = not serving & read.keys() and (directory is None or directory != self._known_directory)
        decision = self._guard.decide(
            counted_before - read.keys(), len(counted_before), time.monotonic(), replaced
        )
        restored = {path: self._recent.pop(path) for path in decision.restore if path in self._recent}
        self._recent |= {path: self._accepted[path] for path in decision.allowed}
        self._recent = {path: v for path, v in self._recent.items() if self._guard.may_restore(path)}
        self._missing = "" if directory == self._known_directory else "the directory is another one"
        for path, version in restored.items():
            with self._keeping:
                self._save_copy(path, version)
        return {**restored, **{path: self._accepted[path] for path in decision.held}}

    def _units_of_gone(self) -> dict[str, Unit]:
        """The units of held files that are gone, without what other files declare now."""
        if not self._gone:
            return {}
        units = self._units.values()
        declared = [service for unit in units if unit.candidate.ok for service in unit.candidate.services]
        left = {path: _unclaimed(v.declaration, declared) for path, v in self._gone.items()}
        return {_unit_name(path): Unit(d, d) for path, d in left.items() if path not in self._read}

    def _emptied(self) -> tuple[str, ...]:
        """The files that are there and held, because they declare nothing any more."""
        read = self._read
        return tuple(path for path, v in read.items() if v.declaration.blank and self._serves(path))

    def _fault_of_gone(self) -> tuple[str, ...]:
        gone = sorted(path.rpartition("/")[2] for path in self._gone.keys() - self._read.keys())
        if not gone:
            return ()
        what = "files are gone, and their services go on serving"
        if len(gone) == 1:
            what = "file is gone, and its services go on serving"
        named = ", ".join(gone[:_FILES_NAMED]) + (", ..." if len(gone) > _FILES_NAMED else "")
        why = self._missing or "no other was left"
        hint = "put back what is missing, or vipctl accept-removal"
        return (f"{self._directory}: {len(gone)} {what}: {why} ({named}); hint: {hint}",)

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Write a copy of each file whose current text serves; remove those of deleted files. It blocks on
        the disk; call it in a thread. It does not wait for a scan, whose duration depends on the author of a
        file: every change by anyone waits for these copies."""
        with self._keeping:
            self._update_copies(chosen)
        if self._unwritten:
            self._unwritten = False
            with contextlib.suppress(StoreError):  # status says so
                self._copies.write()

    def _update_copies(self, chosen: Mapping[str, Declaration]) -> None:
        present = self._read  # a scan puts another one in its place, after `_gone`
        for path, read in present.items():
            if self._accepted.get(path) is read:
                continue
            if read.declaration.parts:
                self._accept_parts(path, read, chosen)
            elif chosen.get(_unit_name(path)) is read.declaration:
                self._save_copy(path, read)
        if self._gone:
            self._release_declared(present)
        for path in self._accepted.keys() - present.keys() - self._gone.keys():
            self._drop_copy(path)
        self._save_record()

    def _accept_parts(self, path: str, read: _FileVersion, chosen: Mapping[str, Declaration]) -> None:
        """Accept the parts of a file whose current version serves. The others keep their accepted version,
        and so do those that are gone from it while the rest of the file is refused."""
        parts, accepted = read.declaration.parts, self._accepted.get(path, _NOTHING)
        serving = [chosen.get(_unit_name(path, name)) for name in parts]
        last, seen = self._parts_seen.get(path, (None, ()))
        if last is read and all(map(is_, seen, serving)):
            return
        self._parts_seen[path] = read, serving
        before = _parts_of(accepted.declaration)
        rest_serves = chosen.get(_unit_name(path)) is parts[""]
        now: dict[str, Declaration] = {}
        for name, part in parts.items():
            served = chosen.get(_unit_name(path, name), EMPTY_DECLARATION)
            if name and part.ok and served.services:  # perhaps without addresses that this host refuses
                now[name] = served
            elif name in before:
                now[name] = before[name]
        now[""] = parts[""] if rest_serves else _rest(accepted.declaration, parts)
        whole = all(now.get(name) is part for name, part in parts.items()) and len(now) == len(parts)
        services = tuple(service for part in now.values() for service in part.services)
        same = accepted.declaration.services == services and (accepted.text is not None) == whole
        version = read if whole else _FileVersion(None, Declaration(services, parts=now))
        if same:
            self._accepted[path] = version
            self._stale = self._stale or any(now[name] is not before.get(name) for name in now)
        else:
            self._save_copy(path, version)

    def _release_declared(self, present: Mapping[str, _FileVersion]) -> None:
        """Hold no longer what the accepted version of another file declares."""
        declared = [s for p in present if p in self._accepted for s in self._accepted[p].declaration.services]
        for path, version in list(self._gone.items()):
            left = _unclaimed(version.declaration, declared)
            if path in present or left is version.declaration:
                continue
            if left.services:
                self._gone[path] = _FileVersion(None, left)
                self._save_copy(path, self._gone[path])
            else:
                del self._gone[path]
                self._guard.key_written(path)

    def _drop_copy(self, path: str) -> None:
        self._stale = True
        self._accepted.pop(path, None)
        self._parts_seen.pop(path, None)
        self._keep({path: None})

    def _save_record(self) -> None:
        """Keep which directory the accepted files were in, and which files are held: at the next start some
        may be gone because another directory, or none, is in its place."""
        record = (self._known_directory, tuple(sorted(self._gone)))
        if record == self._record or not (self._accepted or self._record[0]):
            return
        self._record = record
        self._keep({_RECORD_KEY: record})

    def _keep(self, changes: Mapping[str, _FileVersion | _Record | None]) -> None:
        self._copies.put(changes)
        self._unwritten = True

    def _whole(self) -> dict[str, _FileVersion | _Record]:
        return {**self._accepted, _RECORD_KEY: self._record}

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
            except (OSError, RuntimeError) as error:  # the latter where there is no room for an instance
                raise OSError(f"{watched} cannot be watched: {error}; looking every few seconds") from None

    def _same_inode(self, path: Path, before: Mapping[str, int]) -> bool:
        """Whether a file is the one that it was. One that replaces another by a rename is complete."""
        name = printable(str(path))
        return name in before and before[name] == self._inodes.get(name)

    def _await_writers(self, paths: Iterable[Path], read: dict[str, _FileVersion]) -> None:
        """Read files again that have just lost services, until their writers rest."""
        for _ in range(SETTLE_TRIES):
            paths = [path for path in paths if self._may_be_written(path, read)]
            if not paths:
                break
            time.sleep(SETTLE_SECONDS)
            for path in paths:
                name = printable(str(path))
                self._bytes_left += len(read[name].text or b"")
                read[name] = self._read_file(path) or read[name]

    def _keep_unsettled(self, paths: Iterable[Path], read: dict[str, _FileVersion]) -> dict[str, float]:
        """Keep the known versions of files that have just lost services, until their writers rest; returns
        since when for each."""
        now, unsettled = time.monotonic(), dict[str, float]()
        for path in paths:
            name = printable(str(path))
            since = self._unsettled.get(name, now)
            if now - since < SETTLE_SECONDS * SETTLE_TRIES and self._may_be_written(path, read):
                unsettled[name], read[name] = since, self._read[name]
                self._signatures.pop(name, None)
        return unsettled

    def _may_be_written(self, path: Path, read: Mapping[str, _FileVersion]) -> bool:
        """Whether a file has lost services just now, so that its writer may not have finished."""
        name = printable(str(path))
        return name in read and self._has_lost(read[name], name) and _is_fresh(path)

    def _has_lost(self, read: _FileVersion, name: str) -> bool:
        known = self._read.get(name)
        if known is None or known is read or read.text is None:
            return False
        has = {service.name for service in read.declaration.services}
        return any(service.name not in has for service in known.declaration.services)

    def _read_file(self, path: Path) -> _FileVersion | None:
        """The current state of a file, parsed again only if its text differs; while that is postponed the
        last one, or None."""
        name = printable(str(path))
        known = self._parsed.pop(name, None) or self._read.get(name)
        try:
            signature = signature_of(path)
            self._inodes[name] = signature.inode
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
        self._note_signature(name, signature)
        written_by = f"user {signature.user}" if signature.user else ""
        for candidate in (known, self._accepted.get(name)):
            if candidate and candidate.is_of(text, written_by) and not (again and candidate is known):
                self._postponed.pop(name, None)
                self._note(name, candidate.declaration)
                return candidate
        if self._postpones(name, text, written_by):
            return known or self._accepted.get(name)
        return self._parse(text, name, known, written_by)

    def _note_signature(self, name: str, signature: Signature) -> None:
        """A file with the same signature is not read again, unless it was changed just before it was read."""
        if time.time_ns() - signature.ctime_ns > FRESH_NANOSECONDS:
            self._signatures[name] = signature
        else:
            self._signatures.pop(name, None)

    def _postpones(self, name: str, text: Utf8, written_by: str) -> bool:
        """Whether a text is to be parsed later, as its author's other texts have taken long in this scan."""
        author = written_by or name
        self._parsed_bytes[author] += len(text) + FILE_COST
        if self._parsed_bytes[author] <= LARGE_TEXT:
            self._postponed.pop(name, None)
            return False
        if name not in self._postponed or self._postponed[name].text != text:
            self._postponed[name] = _Postponed(text, written_by, author)
        return True

    def _reserve_bytes(self, size: int) -> None:
        """Count a file of this size among those whose text is kept. Raises OSError if they are too large
        together; one that is too large by itself does not count."""
        if size <= limits.FILE_BYTES:
            if size > self._bytes_left:
                most = limits.DIRECTORY_BYTES >> 20
                raise OSError(0, f"with the files before it there are more than {most} MiB")
            self._bytes_left -= size

    def _parse(self, text: Utf8, path: str, known: _FileVersion | None, written_by: str) -> _FileVersion:
        """Parse a file's text as a declaration. An unexpected exception is a problem of this file
        alone."""
        try:
            with gc_paused() if len(text) > LARGE_TEXT else contextlib.nullcontext():
                declaration = parse_declaration(text, path, written_by=written_by)
        except Exception as error:
            declaration = Declaration(problems=(internal_problem(error, "reading this file", path),))
        self._note(path, declaration)
        if known is not None:
            declaration = _with_known_services(declaration, known.declaration)
        if known is not None and declaration.parts:
            declaration = _with_known_parts(declaration, known.declaration.parts)
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
        why = error.strerror or str(error)
        kept = "the last good versions are used" if self._accepted else "no good version of a file is known"
        self._faults = (f"{self._directory}: cannot be read: {why}; {kept}",)
        if not self._read:
            self._read, self._stale = dict(self._accepted), True
            return True
        return False

    def _save_copy(self, path: str, read: _FileVersion) -> None:
        self._accepted[path], self._stale = read, True
        self._keep({path: read})


def _unit_name(path: str, part: str = "") -> str:
    return f"file:{path}#{part}" if part else f"file:{path}"


def _units_of(path: str, read: Declaration, accepted: Declaration) -> Iterator[tuple[str, Unit]]:
    """The units of a file with the name of its part in each; "" is all that has no part of its own."""
    served = _parts_of(accepted) if read.parts else {}
    for name, part in read.parts.items():
        if name:
            yield name, Unit(part, served.get(name, EMPTY_DECLARATION), part=True)
    rest = read.parts.get("", read)
    last = _rest(accepted, read.parts)
    if read.blank and last.services and not rest.problems:
        number = len(last.services)
        what = f"declares no service any more: {counted(number, 'service')} of its last good version serve on"
        rest = replace(rest, problems=(Problem(path, 0, "", what, _REMOVE_HINT),))
    yield "", Unit(rest, last)


def _parts_of(accepted: Declaration) -> dict[str, Declaration]:
    """The accepted version of each service of a file by itself, and of the rest of it."""
    own = accepted.parts.get("", accepted)
    alone = {
        service.name: Declaration((replace(service, origin=replace(service.origin, part=service.name)),))
        for service in own.services
    }
    return {**alone, **{name: part for name, part in accepted.parts.items() if name}}


def _rest(accepted: Declaration, parts: Mapping[str, Declaration]) -> Declaration:
    """The accepted version of what has no part in a new version of the file."""
    if not parts and not accepted.parts:
        return accepted
    services = tuple(service for service in accepted.services if service.name not in parts)
    own = accepted.parts.get("", accepted)
    return own if own.services == services else Declaration(services)


def _with_known_parts(declaration: Declaration, known: Mapping[str, Declaration]) -> Declaration:
    """The declaration with the known parts where they are the same: what has not changed costs nothing."""
    parts = {}
    for name, part in declaration.parts.items():
        before = known.get(name)
        same = before == part and [s.origin for s in before.services] == [s.origin for s in part.services]
        parts[name] = before if same and before is not None else part
    return replace(declaration, parts=parts)


def _same_unit(one: Unit, other: Unit) -> bool:
    """Whether two units say the same, so that the first may stay, and costs nothing."""
    candidates = one.candidate is other.candidate or (
        bool(other.candidate.problems) and one.candidate == other.candidate
    )
    return candidates and (one.accepted is other.accepted or one.accepted == other.accepted)


def _unclaimed(declaration: Declaration, declared: Iterable[Service]) -> Declaration:
    """The services that have no name and no frontend of those that are declared elsewhere."""
    claims = {claim for service in declared for claim in (service.name, *service.frontends())}
    services = declaration.services
    left = tuple(s for s in services if claims.isdisjoint((s.name, *s.frontends())))
    return declaration if len(left) == len(services) else Declaration(left)


def _list_directory(
    directory: Path, before: set[str]
) -> tuple[list[Path], tuple[str, ...], _Identity | None]:
    """As `FileSource._list`."""
    try:
        return *list_files(directory, before), _identity(directory)
    except FileNotFoundError:
        return [], (f"{directory}: there is no such directory; hint: create it",), None


def _is_fresh(path: Path) -> bool:
    """Whether a file was changed so recently that its writer may not have finished."""
    try:
        age = time.time_ns() - path.stat().st_ctime_ns
    except OSError:
        return False
    return 0 <= age < SETTLE_SECONDS * 10**9


def _read_record(text: Value) -> _Record:
    """The directory of an earlier run, and the files that it held; nothing if that cannot be read."""
    try:
        record = json.loads(text)
        device, inode = record["directory"]
        held = tuple(name for name in record["held"] if isinstance(name, str))
        return (int(device), int(inode)), held
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, ()


def _encode(value: _FileVersion | _Record) -> Value:
    if isinstance(value, _FileVersion):
        return _copy_of(value)
    return json.dumps({"directory": value[0], "held": value[1]})


def _unreadable(problem: Problem, known: _FileVersion | None) -> _FileVersion:
    return _unless_known(_FileVersion(None, Declaration(problems=(problem,))), known)


def _with_known_services(declaration: Declaration, known: Declaration) -> Declaration:
    """The declaration with those objects of an earlier one that are the same at the same line, so that what
    follows costs what has changed."""
    by_name = {service.name: service for service in known.services}

    def same(service: Service) -> Service:
        before = by_name.get(service.name)
        unchanged = before is not None and before == service and before.origin == service.origin
        return before if unchanged and before is not None else service

    return replace(declaration, services=tuple(map(same, declaration.services)))


def _unless_known(read: _FileVersion, known: _FileVersion | None) -> _FileVersion:
    """The known reading if it is equal: a unit that is the same object costs nothing."""
    return known if known is not None and known == read else read


def _copy_of(version: _FileVersion) -> Utf8:
    """The text of a copy."""
    if version.text is not None:
        return version.text
    return format_declaration(version.declaration.services).encode()


def _load_copies(copies: Bucket[_FileVersion | _Record]) -> tuple[_Record, dict[str, _FileVersion]]:
    """What an earlier run has kept."""
    texts = copies.load()
    record = _read_record(texts.pop(_RECORD_KEY, ""))
    versions = ((path, _load_copy(path, text)) for path, text in texts.items())
    return record, {path: version for path, version in versions if version is not None}


def _load_copy(path: str, text: Value) -> _FileVersion | None:
    """The accepted version of an earlier run; of one of a newer version, the services that this one
    understands. None: it is of no use."""
    text = text.encode() if isinstance(text, str) else text
    if first_invalid_utf8(text) is not None:
        return None
    declaration = parse_declaration(text, path, accepted=True)
    if declaration.ok:
        return _FileVersion(text, declaration)
    understood = declaration.understood()
    use = "serves in part" if understood.services else "is of no use"
    log.warning("%s: the copy of its good version %s: %s", path, use, declaration.problems[0])
    # No text: the same file has its problems.
    return _FileVersion(None, understood) if understood.services else None


def _nearest_directory(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _identity(path: Path) -> _Identity:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
