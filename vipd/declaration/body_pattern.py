"""The pattern of an HTTP check for a body: plain text, or a regular expression of RE2. Pure.

RE2 takes time in proportion to pattern times body, for any input; Python's `re` can take years. It has
no look-around and no back-references. `$` also matches before a newline at the end, as in Python.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from vipd.declaration.syntax import quoted

MAX_PATTERN = 500
"""Longest pattern, in characters."""

MAX_PROGRAM = 1000
"""Largest compiled pattern, in RE2's instructions: with a body of 64 KiB it takes about a second at worst."""

_MAX_MEMORY = 256 * 1024
"""For each compiled pattern, including its cache between matches."""

MAX_CLASSES = 4
"""Most Unicode classes, like `\\pL`: RE2 takes half a millisecond to read each, and Python waits for it."""

_CLASS = re.compile(r"\\[pP]")
_SPECIAL = frozenset(".^$*+?[|()")
_REPETITION = re.compile(r"\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]*)\}")
_LACKS = "the syntax is RE2's: no look-around, back-references or possessive repetition, and \\z for \\Z"


class PatternError(ValueError):
    """An invalid pattern: what, and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


class BodyPattern:
    """A compiled pattern."""

    def __init__(self, pattern: str) -> None:
        """Raises PatternError."""
        if len(pattern) > MAX_PATTERN:
            raise PatternError(f"{len(pattern)} characters are too long", f"at most {MAX_PATTERN}")
        text = literal_text(pattern)
        try:
            self._text = None if text is None else text.encode()
            self._program = None if text is not None else _compiled(pattern)
        except UnicodeEncodeError:
            raise PatternError("the pattern is no text", "it holds half of a surrogate pair") from None
        if self._program is not None and self._program.programsize > MAX_PROGRAM:
            hint = "use smaller counts of repetitions"
            raise PatternError(f"the pattern {quoted(pattern)} is too large", hint)

    def matches(self, body: bytes) -> bool:
        """Whether it matches in a body of UTF-8 text."""
        if self._program is None:
            return (self._text or b"") in body
        if self._program.search(body):
            return True
        return body.endswith(b"\n") and self._program.search(body[:-1]) is not None

    def match_cost(self, size: int) -> int:
        """The work of a search in this many bytes at worst: 60 ns each."""
        return 0 if self._program is None else self._program.programsize * size * 2


@lru_cache(maxsize=128)
def body_pattern(pattern: str) -> BodyPattern:
    """The pattern, compiled. Raises PatternError."""
    return BodyPattern(pattern)


def literal_text(pattern: str) -> str | None:
    """The only text that a pattern matches; None if it is more than text."""
    if _REPETITION.search(pattern):
        return None
    found = []
    letters = iter(pattern)
    for letter in letters:
        if letter in _SPECIAL:
            return None
        if letter == "\\":
            letter = next(letters, "")
            if not letter or letter.isalnum() or not letter.isascii():
                return None
        found.append(letter)
    return "".join(found)


def _compiled(pattern: str) -> Any:
    if re.search(r"(?<!\\)\{,[0-9]*\}", pattern):
        raise PatternError("{,N} means nothing in RE2", "write {0,N}")
    if len(_CLASS.findall(pattern)) > MAX_CLASSES:
        raise PatternError(
            f"the pattern {quoted(pattern)} has too many classes \\p", f"at most {MAX_CLASSES}"
        )
    try:
        import re2  # on use: 5 ms, for the few that need it
    except ImportError:
        hint = "install google-re2, or use plain text: a backslash before . ^ $ * + ? [ | ( )"
        raise PatternError("regular expressions need the Python package google-re2", hint) from None
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = _MAX_MEMORY, False, True
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0] if error.args else ""
        why = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
        raise PatternError(f"{quoted(pattern)} is not a regular expression: {why}", _LACKS) from None
