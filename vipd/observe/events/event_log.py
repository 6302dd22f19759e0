"""Lines on disk; new ones replace the oldest: two files, each of limited size.

When the older file goes, the newest lines of each author in it stay, so that nobody's flood of events takes
those of others.

Nothing is synced: a crash of vipd loses nothing, a power cut perhaps the last seconds. A torn line
stays, and the next one begins on a new line.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from pathlib import Path

from vipd.host.durable import error_text, move_aside, open_own, read_own, rename_own
from vipd.host.systemd.fields import author_of

SEGMENT_BYTES = 1 << 20
MAX_BYTES = 16 * SEGMENT_BYTES
"""Maximum size of a file that is read: vipd writes none that is larger."""
CURRENT = "events.jsonl"
OLDER = "events.1.jsonl"
_MODE = 0o640

_AUTHOR = re.compile(
    rb'"services":\[(?P<service>"[^"]*")?.*?"unit":"(?P<unit>[^"]*)",'
    rb'"cause":"(?P<cause>.*?)"'
)


class EventLog:
    """The lines in one directory. Not thread-safe."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._current, self._older = directory / CURRENT, directory / OLDER
        self._segment_bytes = segment_bytes
        self._descriptor: int | None = None
        self._size = 0
        self._torn = False

    def append(self, line: bytes) -> None:
        """Add a line, which has its end. Raises OSError; the line may be torn then."""
        descriptor = self._room_for(line)
        self._write(descriptor, b"\n" + line if self._torn else line)

    def _write(self, descriptor: int, data: bytes) -> None:
        self._torn = True
        written = os.write(descriptor, data)
        self._size += written
        self._torn = written < len(data)
        if self._torn:
            raise OSError(f"{self._current}: only {written} of {len(data)} bytes could be written")

    def repair(self) -> list[str]:
        """Keep aside anything in place of the files that is no such file; returns the actions in words."""
        done = []
        for path in (self._older, self._current):
            try:
                _content(path)
            except OSError as error:
                done.append(f"{path}: events cannot be read: {error_text(error)}; {move_aside(path)}")
        return done

    def data(self) -> bytes:
        """All content, oldest first; a line may be torn. Raises OSError."""
        return b"\n".join(_content(path) for path in (self._older, self._current))

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _room_for(self, line: bytes) -> int:
        descriptor = self._descriptor if self._descriptor is not None else self._open()
        if self._size and self._size + len(line) > self._segment_bytes:
            stays = self._lines_that_stay()
            self.close()
            rename_own(self._current, OLDER)
            descriptor = self._open()
            if stays:
                self._write(descriptor, stays)
        return descriptor

    def _lines_that_stay(self) -> bytes:
        """Of the older file, which goes, the newest lines of each author who has few in the newer one: up to
        an equal share of a quarter of a file, or one line."""
        try:
            going, newer = (_content(p).splitlines(keepends=True) for p in (self._older, self._current))
        except OSError:
            return b""
        by_author: dict[object, list[bytes]] = {}
        for line in reversed(going):
            by_author.setdefault(_author_of(line), []).append(line)
        sizes = Counter[object]()
        for line in newer:
            sizes[_author_of(line)] += len(line)
        room = self._segment_bytes // 4
        share, stays = room // max(1, len(by_author)), set[bytes]()
        for author, newest in by_author.items():
            for line in newest:
                if room < len(line) or (sizes[author] and sizes[author] + len(line) > share):
                    break
                stays.add(line)
                sizes[author] += len(line)
                room -= len(line)
        return b"".join(line for line in going if line in stays)

    def _open(self) -> int:
        self._descriptor = open_own(self._current, os.O_RDWR | os.O_APPEND | os.O_CREAT, _MODE)
        self._size = os.fstat(self._descriptor).st_size
        self._torn = self._size > 0 and os.pread(self._descriptor, 1, self._size - 1) != b"\n"
        return self._descriptor


def _author_of(line: bytes) -> object:
    """Who an event is about; without a unit its cause, and its first service."""
    parts = _AUTHOR.search(line)
    if parts is None:
        return None
    unit, author = parts["unit"].decode(), author_of(parts["unit"].decode(), parts["cause"].decode())
    return author if unit else (author, parts["service"])


def _content(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return read_own(path, MAX_BYTES)
    return b""
