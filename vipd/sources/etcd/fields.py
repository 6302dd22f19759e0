"""Reads single fields of etcd's answers, and checks the type of each: a wrong one raises a
MalformedAnswerError that names it. Pure.

proto3's JSON omits zero, false and empty values, so a missing field counts as such.
"""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

from vipd.sources.etcd.errors import MalformedAnswerError

Message = dict[str, Any]

MAX_BYTES = 16 * 2**20
"""Of one answer, or of one message of a stream. etcd's own limit for a request, 1.5 MiB, results in 2 MiB."""

_LARGEST = 2**64 - 1
"""Largest number of etcd: ids are unsigned and have 64 bits."""
_DIGITS = 20
_SHOWN = 60


def message_of(value: object, name: str) -> Message:
    """An object; null counts as an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    return value


def inner(message: Message, name: str) -> Message:
    """The object in a field; an empty one without it."""
    return message_of(message.get(name), name)


def objects(message: Message, name: str) -> list[Message]:
    """The objects of a list."""
    return [message_of(item, f"{name}[{at}]") for at, item in enumerate(items(message, name))]


def items(message: Message, name: str) -> list[Any]:
    """A list of anything."""
    value = message.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(name, value, "a list")
    return value


def number(message: Message, name: str, minimum: int = 0) -> int:
    """A whole number of 64 bits, written as a number or as text."""
    value = message.get(name, 0)
    found: int | None = 0 if value is None else None
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    elif isinstance(value, str) and len(value) <= _DIGITS and value.removeprefix("-").isdecimal():
        found = int(value) if value.isascii() else None
    if found is None or abs(found) > _LARGEST:
        raise _wrong(name, value, "a number")
    if found < minimum:
        raise MalformedAnswerError(f"{name} is {found if name in message else 'missing'}")
    return found


def flag(message: Message, name: str) -> bool:
    """True or false."""
    value = message.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return bool(value)


def text(message: Message, name: str) -> str:
    """A text; a number counts as one, as ids are written in either way."""
    value = message.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _wrong(name, value, "text")
    return str(value)


def data(message: Message, name: str) -> bytes:
    """Bytes, which JSON carries in base64."""
    value = message.get(name)
    if value is None:
        return b""
    try:
        return b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise _wrong(name, value, "base64") from None


def _wrong(name: str, value: object, wanted: str) -> MalformedAnswerError:
    if isinstance(value, list | dict):
        found = "a list" if isinstance(value, list) else "an object"
    else:
        found = json.dumps(value[:_SHOWN] if isinstance(value, str) else value)[:_SHOWN]
    return MalformedAnswerError(f"{name} is not {wanted}: {found}")
