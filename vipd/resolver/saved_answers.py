"""The last good answers, as the cache keeps them: after a restart they serve before, and without, any name
server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from vipd.declaration.dns_names import parse_dns_name
from vipd.declaration.syntax import parse_address
from vipd.model.service import MAX_WEIGHT, NameKind
from vipd.resolver.answers import Question, Target
from vipd.sources.cache import Value

GARBAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions from reading an invalid entry."""


class SavedAnswer(NamedTuple):
    """A good answer, and when it came, by the calendar."""

    targets: tuple[Target, ...]
    answered_at: float | None
    """None: unknown."""


def key_of(question: Question) -> str:
    """The key of an answer."""
    return f"{question.kind.value} {question.name}"


def encode(saved: SavedAnswer) -> str:
    """The entry of an answer."""
    return json.dumps([saved.answered_at, list(map(list, saved.targets))], separators=(",", ":"))


def decode(key: str, text: Value) -> tuple[Question, SavedAnswer]:
    """The answer of an entry. Raises one of GARBAGE."""
    kind, _, name = key.partition(" ")
    answered_at, targets = json.loads(text)
    question = Question(NameKind(kind), parse_dns_name(name))
    return question, SavedAnswer(tuple(sorted(map(read_target, targets))), _moment(answered_at))


def read_target(values: Iterable[Any]) -> Target:
    """The target with these fields, which may be anything. Raises one of GARBAGE."""
    address, port, priority, weight, host = values
    for number in (port, priority, weight):
        if type(number) is not int or not 0 <= number <= MAX_WEIGHT:
            raise ValueError("no number of a record")
    return Target(parse_address(address), port, priority, weight, str(host))


def _moment(value: Any) -> float | None:
    if value is None:
        return None
    moment = float(value)
    if not math.isfinite(moment):
        raise ValueError("no time")
    return moment
