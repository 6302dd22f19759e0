"""The only output of `vipctl`: only printable characters, newlines, tabs and vipctl's own control sequences
reach the terminal, the pipe or the file, whatever a verb prints.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from vipd.model.text import one_line

_MARK = os.urandom(8).hex()
"""Random, so that no name or reason written by others can contain a control sequence of vipctl."""

_OURS = re.compile(rf"\x1b{_MARK}([^\x1b]*)\x1b")
_ODD = re.compile(r"[^\n\t -~]")


def control(sequence: str) -> str:
    """A control sequence of vipctl's own, `[31m` or a carriage return, as it may be printed."""
    return f"\x1b{_MARK}{sequence}\x1b"


CLEAR_LINE = control("\r") + control("[K")
"""Returns to the beginning of an emptied line."""


def printed(text: str) -> str:
    """The printable form of a text: escapes replace all other characters."""
    if not _ODD.search(text):
        return text
    parts = _OURS.split(text)
    parts[::2] = map(_clean, parts[::2])
    parts[1::2] = [f"\x1b{sequence}" if sequence[:1] == "[" else sequence for sequence in parts[1::2]]
    return "".join(parts)


def _clean(text: str) -> str:
    return "".join(c if c in "\n\t" else one_line(c) for c in text)


class _Stream:
    """A stream of text that passes nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; the number of its characters."""
        self._stream.write(printed(text))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Write several texts."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guarded(stream: TextIO) -> TextIO:
    """The stream, limited to the output of `printed`."""
    return stream if isinstance(stream, _Stream) else cast("TextIO", _Stream(stream))


@contextmanager
def guarded_output() -> Iterator[None]:
    """Standard output and standard error are guarded within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(guarded, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
