"""Makes text of others safe to show and write: on terminals, in the log, in JSON and YAML. Pure.

A character that is not printable (controls, line separators, bidirectional marks, halves of surrogate pairs)
becomes its escape, `\\x1b` or `\\u202e`; every other one, wide or combining, stays as it is.
"""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE_PAIR = re.compile(r"\\u[dD]([89abAB][0-9a-fA-F]{2})\\u[dD]([c-fC-F][0-9a-fA-F]{2})")
_BACKSLASHES = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|.)", re.DOTALL)


def one_line(text: str) -> str:
    """The text on one line, with escapes for characters that are not printable."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def lines(text: str) -> str:
    """As `one_line`, but newlines stay."""
    return "\n".join(map(one_line, text.split("\n")))


def is_encodable(text: str) -> bool:
    """Whether it can be encoded: it contains no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_text(value: object, indent: int | None = None) -> str:
    """A value as JSON in which other scripts are readable, and unprintable characters are escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if text.isprintable():
        return text
    # Outside of its strings JSON contains only printable characters and the newlines of its layout.
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def yaml_quoted(text: str) -> str:
    """A scalar of YAML in double quotes, on one line, that reads back as this text."""
    return '"' + one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def join_surrogate_pairs(text: str) -> str:
    """Replaces escaped surrogate pairs in JSON by YAML's escapes: `\\ud83d\\ude00` becomes `\\U0001f600`.

    JSON has no other escape for such characters, and no reader of YAML accepts a half.
    """
    return _BACKSLASHES.sub(_joined, text) if _SURROGATE_PAIR.search(text) else text


def _joined(found: re.Match[str]) -> str:
    pair = _SURROGATE_PAIR.fullmatch(found[0])
    if pair is None:
        return found[0]
    high, low = (int(half, 16) for half in pair.groups())
    return f"\\U{0x10000 + ((high - 0x800) << 10) + (low - 0xC00):08x}"


def sanitized(value: object) -> Any:
    """A value of JSON with every text in it on one line. A `diff`, which is lines, stays so."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {
            one_line(key): lines(item) if key == "diff" and isinstance(item, str) else sanitized(item)
            for key, item in value.items()
        }
    return [sanitized(item) for item in value] if isinstance(value, list) else value


def shortened(text: str, max_length: int) -> str:
    """The words of a text of any author, on one line of at most `max_length` characters."""
    line = one_line(" ".join(text.split()))
    return line if len(line) <= max_length else f"{line[: max_length - 1]}…"


def display_width(text: str) -> int:
    """Number of terminal columns of a line: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    # Imported here because most lines are ASCII, and every start of vipctl imports this module.
    from unicodedata import category, east_asian_width

    return sum(2 if east_asian_width(c) in "WF" else category(c) not in ("Mn", "Me") for c in text)


def byte_size(text: str) -> int:
    """Length in bytes of a text that may have lone surrogates for bytes that are no UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogateescape"))
