"""Lines on disk; new ones replace the oldest: two files, each of limited size.

Nothing is synced: a crash of vipd loses nothing, a power cut perhaps the last seconds. A torn line
stays, and the next one begins on a new line.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vipd.host.durable import error_text, move_aside, open_own, read_own, rename_own

SEGMENT_BYTES = 1 << 20
MAX_BYTES = 16 * SEGMENT_BYTES
"""Maximum size of a file that is read: vipd writes none that is larger."""
CURRENT = "events.jsonl"
OLDER = "events.1.jsonl"
_MODE = 0o640


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
        data = b"\n" + line if self._torn else line
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
            self.close()
            rename_own(self._current, OLDER)
            descriptor = self._open()
        return descriptor

    def _open(self) -> int:
        self._descriptor = open_own(self._current, os.O_RDWR | os.O_APPEND | os.O_CREAT, _MODE)
        self._size = os.fstat(self._descriptor).st_size
        self._torn = self._size > 0 and os.pread(self._descriptor, 1, self._size - 1) != b"\n"
        return self._descriptor


def _content(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return read_own(path, MAX_BYTES)
    return b""
