"""The last good answers on disk: after a restart they serve before, and without, any name server.

The file is written whole, synced and renamed: it has at most some hundred addresses for each name. An entry
that cannot be read is left out alone.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vipd.declaration.bounded_json import read_json
from vipd.declaration.dns_names import parse_dns_name
from vipd.declaration.syntax import parse_address
from vipd.host.durable import error_text, make_directory, move_aside, read_own, write_durably
from vipd.model.service import MAX_WEIGHT, NameKind
from vipd.resolver.answers import Question, Target

log = logging.getLogger(__name__)

FORMAT = 1
MAX_BYTES = 512 * 2**20
"""Of the file: ten thousand names of a thousand targets each have less."""
GARBAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions from reading an invalid entry."""


class SavedAnswer(NamedTuple):
    """A good answer, and when it came, by the calendar."""

    targets: tuple[Target, ...]
    answered_at: float | None
    """None: unknown."""


def encode(answers: Mapping[Question, SavedAnswer]) -> bytes:
    """The content of the file."""
    entries = [
        [question.kind.value, question.name, saved.answered_at, list(map(list, saved.targets))]
        for question, saved in sorted(answers.items())
    ]
    return json.dumps({"format": FORMAT, "names": entries}, separators=(",", ":")).encode()


def decode(data: bytes) -> tuple[dict[Question, SavedAnswer], int]:
    """The answers in a file, and the number of invalid entries. Raises ValueError for another content."""
    read = read_json(data, MAX_BYTES)
    if not isinstance(read, dict) or read.get("format") != FORMAT or not isinstance(read.get("names"), list):
        raise ValueError("it is not in the format of this file")
    found: dict[Question, SavedAnswer] = {}
    for entry in read["names"]:
        try:
            kind, name, answered_at, targets = entry
            question = Question(NameKind(kind), parse_dns_name(name))
            found[question] = SavedAnswer(tuple(sorted(map(read_target, targets))), _moment(answered_at))
        except GARBAGE:
            continue
    return found, len(read["names"]) - len(found)


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


def load(path: Path) -> dict[Question, SavedAnswer]:
    """The saved answers. A file that cannot be read is kept aside, with a line in the log. Never raises."""
    try:
        found, invalid = decode(read_own(path, MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, *GARBAGE) as error:
        aside = move_aside(path)
        log.warning(
            "%s: cannot be read: %s; names serve once they are resolved; %s", path, error_text(error), aside
        )
        return {}
    if invalid:
        log.warning("%s: %d invalid entries are left out", path, invalid)
    return found


def save(path: Path, answers: Mapping[Question, SavedAnswer]) -> None:
    """Write the file. Blocks. Raises OSError that names the file and the consequence."""
    try:
        make_directory(path.parent)
        write_durably(path, encode(answers))
    except OSError as error:
        what = f"{path}: cannot be written: {error_text(error)}"
        raise OSError(f"{what}; hint: after a restart names serve only once they are resolved") from None
