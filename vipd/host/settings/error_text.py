"""Error messages for invalid settings, in vipd's own words instead of pydantic's. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

MANUAL_HINT = "man vipd.yaml tells them all"

_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "string": "text",
    "path": "a path",
    "tuple": "a list",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""What a valid value is, by the prefix of pydantic's error type."""


def fault_text(error: Mapping[str, object], known: tuple[str, ...]) -> str:
    """The message for one pydantic error, as `what; hint: ...`. It has several lines if a validator found
    several problems.

    `known` are the names of all settings.
    """
    kind = str(error["type"])
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        name = str(_listed(error["loc"])[-1])
        close = difflib.get_close_matches(name.lower(), known, 1)
        return f"unknown setting; hint: {f'did you mean {close[0]}?' if close else MANUAL_HINT}"
    given = _given(error["input"])
    if kind == "literal_error":
        return _literal_error_text(given, error)
    if kind == "string_pattern_mismatch":
        return f"{given} is not in the form wanted; hint: man vipd.yaml"
    for start, expected in _EXPECTED.items():
        if kind.startswith(start):
            return f"must be {expected.format_map(_context(error))}, not {given}"
    return re.sub(r"^Value error, ", "", str(error["msg"]))


def _literal_error_text(given: str, error: Mapping[str, object]) -> str:
    words = re.findall(r"'([^']*)'", str(_context(error).get("expected", "")))
    close = difflib.get_close_matches(given.strip('"').lower(), words, 1)
    hint = f"; hint: did you mean {close[0]}?" if close else ""
    return f"must be one of {', '.join(words)}, not {given}{hint}"


def _given(value: object) -> str:
    """A value as a user writes it; of a mapping or a list only its type."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _context(error: Mapping[str, object]) -> Mapping[str, object]:
    found = error.get("ctx")
    return found if isinstance(found, Mapping) else {}


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
