"""JSON that others wrote, read within limits of size, depth and digits. Pure."""

from __future__ import annotations

import json
from typing import Any

from vipd.model.limits import JSON_DEPTH, JSON_DIGITS

Json = dict[str, object]
"""A JSON object."""

_STRUCTURE = b'"[]{}'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class BeyondLimitsError(ValueError):
    """It may be JSON, but it is larger or deeper than, or has longer numbers than, any valid input."""


def read_json(data: bytes | str, max_size: int) -> Any:
    """Parses a text of at most `max_size` bytes (or characters, if it is decoded). Raises ValueError for
    invalid JSON, and its subclass BeyondLimitsError."""
    if len(data) > max_size:
        raise BeyondLimitsError(f"it has {len(data)} bytes, of which {max_size} are the most")
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    if raw.count(b"[") + raw.count(b"{") > JSON_DEPTH and _too_deep(raw):
        raise BeyondLimitsError(f"it is nested more than {JSON_DEPTH} levels deep")
    try:
        return json.loads(data, parse_int=_integer, parse_float=_fraction)
    except RecursionError:
        raise BeyondLimitsError(f"it is nested more than {JSON_DEPTH} levels deep") from None


def _too_deep(raw: bytes) -> bool:
    """Whether brackets are nested too deep; removes the innermost pairs repeatedly. Each
    pass handles the whole text at once, which is a hundred times faster than a loop in Python."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    left = raw.translate(_ONE_KIND, _OTHERS).replace(b'""', b"")
    # After this only brackets outside of strings remain.
    left = b"".join(left.split(b'"')[::2])
    for _ in range(JSON_DEPTH):
        left = left.replace(b"[]", b"")
        if not left:
            return False
    return True


def _integer(text: str) -> int:
    return int(_bounded(text))


def _fraction(text: str) -> float:
    return float(_bounded(text))


def _bounded(text: str) -> str:
    if len(text) > JSON_DIGITS:
        raise BeyondLimitsError(f"a number has {len(text)} digits, of which {JSON_DIGITS} are the most")
    return text
