"""What is wrong with a declaration, as values that name the place, the fault and the way out."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from vipd.model import Service


def printable(name: str) -> str:
    """The name of a file or a key as people see it: one line that can be printed, and no two names alike.

    Bytes that are no UTF-8 stand in `name` as lone surrogates.
    """
    return name if name.isprintable() and "\\" not in name else json.dumps(name)[1:-1]


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One fault. Its text is `file:line: path: what; hint`."""

    file: str
    """Empty for what came by a request instead of a file."""
    line: int
    """1-based; 0 when the whole file is meant."""
    path: str
    """Where in the document: `services[2].backends[0].port`. May be empty."""
    what: str
    hint: str = ""
    trace: str = field(default="", compare=False, repr=False)
    """The traceback of an internal error; logged with the problem, shown nowhere else."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        text = ": ".join(part for part in (place, self.path, self.what) if part)
        return f"{text}; {self.hint}" if self.hint else text


PLEASE_REPORT = "please report it"
"""The hint of every internal error: no input may cause one, whatever it holds."""

_LONGEST_MESSAGE = 300
"""Characters of an unexpected exception's message that are shown: it may quote its input."""


def internal_error(error: BaseException, doing: str) -> str:
    """One line about an exception that nobody expected: `internal error while reading this service: ...`."""
    message = " ".join(str(error).split())
    more = "..." if len(message) > _LONGEST_MESSAGE else ""
    told = f"{type(error).__name__}: {message[:_LONGEST_MESSAGE]}{more}" if message else type(error).__name__
    return f"internal error while {doing}: {told}"


def internal_problem(error: Exception, doing: str, file: str, line: int = 0) -> Problem:
    """An unexpected exception as a problem of what was being worked on. Call it while handling `error`."""
    trace = "".join(traceback.format_exception(error))
    return Problem(file, line, "", internal_error(error, doing), PLEASE_REPORT, trace)


_UNREADABLE_HINTS: dict[type[OSError], str] = {
    FileNotFoundError: "check the spelling",
    PermissionError: "let vipd read it (chgrp vipd, chmod g+r), or use the drop-in private-files.conf",
}


def unreadable(file: str, error: OSError) -> Problem:
    """A file that cannot be read, the same by `vipctl check` and by vipd."""
    if isinstance(error, IsADirectoryError):
        return Problem(file, 0, "", "is a directory, and is not read", "move its files up, or rename it")
    hint = _UNREADABLE_HINTS.get(type(error), "")
    return Problem(file, 0, "", f"cannot be read: {error.strerror or error}", hint)


@dataclass(frozen=True, slots=True, order=True)
class Note:
    """Something that is no fault but that its author may not expect. Its text is `file:line: note: text`."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: note: {self.text}"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one file, or one document of the store, declares.

    `services` holds what could be read even when there are problems, so that a caller can look for
    further conflicts; it must not be served unless `ok`.
    """

    services: tuple[Service, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()
    """What was left out of Kubernetes objects, and why."""

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems


class DeclarationError(ValueError):
    """A declaration that cannot be accepted, with every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)
