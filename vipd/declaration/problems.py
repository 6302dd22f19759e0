"""Problems of a declaration, as values with place, fault and remedy."""

from __future__ import annotations

import traceback
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vipd.model.limits import ALL_PROBLEMS, PROBLEMS
from vipd.model.service import Service
from vipd.model.text import one_line


def printable(name: str) -> str:
    """The displayed name of a file or a key: one printable line, and no two names alike.

    Invalid UTF-8 bytes are lone surrogates in `name`.
    """
    return one_line(name.replace("\\", "\\\\"))


def _clean(value: Problem | Note, *names: str) -> None:
    """Make each of these texts of a new value one line."""
    for name in names:
        text: str = getattr(value, name)
        if not text.isprintable():
            object.__setattr__(value, name, one_line(text))


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One fault. Its text is `file:line: path: what; hint`, one line whatever its parts quote."""

    file: str
    """Empty for input from a request instead of a file."""
    line: int
    """1-based; 0: the whole file."""
    path: str
    """Path in the document: `services[2].backends[0].port`. May be empty."""
    what: str
    hint: str = ""
    trace: str = field(default="", compare=False, repr=False)
    """The traceback of an internal error; only logged with the problem."""
    more: int = field(default=0, compare=False, repr=False)
    """Number of problems that are only counted, which this one represents."""
    partial: bool = field(default=False, compare=False, repr=False)
    """It refuses a part of a service alone: the rest may serve."""

    def __post_init__(self) -> None:
        _clean(self, "file", "path", "what", "hint")

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        text = ": ".join(part for part in (place, self.path, self.what) if part)
        return f"{text}; {self.hint}" if self.hint else text


class ProblemList:
    """The problems of one unit, each once: the first ones, and the number of further ones."""

    def __init__(self, problems: Iterable[Problem] = (), most: int = PROBLEMS) -> None:
        self._kept: dict[Problem, None] = {}
        self._most = most
        self._more = 0
        self.extend(problems)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._kept)

    @property
    def full(self) -> bool:
        """Whether further problems are only counted: their texts are not needed."""
        return len(self._kept) >= self._most

    def add(self, problem: Problem) -> None:
        """One more problem."""
        if self.full and problem not in self._kept:
            self._more += 1
        else:
            self._kept.setdefault(problem)

    def count(self, number: int = 1) -> None:
        """More problems, which are not kept."""
        self._more += number

    def extend(self, problems: Iterable[Problem]) -> None:
        """Add problems. One that represents counted ones counts for as many."""
        for problem in problems:
            if problem.more:
                self._more += problem.more
            else:
                self.add(problem)

    def by_line(self) -> tuple[Problem, ...]:
        """The kept ones in line order, and at the end one with the number of further ones."""
        found = sorted(self._kept, key=lambda problem: problem.line)
        return (
            (*found, more_problems(found[-1].file, found[-1].line, self._more))
            if self._more
            else tuple(found)
        )


def problem_texts(problems: Iterable[object]) -> list[str]:
    """The problems of all units as text, and the number beyond the limit of one answer."""
    all_of_them = list(problems)
    found = [str(problem) for problem in all_of_them[:ALL_PROBLEMS]]
    more = len(all_of_them) - len(found)
    return [*found, f"and {more} more problems"] if more else found


def more_problems(file: str, line: int, number: int) -> Problem:
    """Represents problems that are only counted."""
    what = f"and {number} more problem{'s' if number > 1 else ''}"
    return Problem(file, line, "", what, "mend those that are named first", more=number)


PLEASE_REPORT = "please report it"
"""The hint of every internal error: no input may cause one."""

_MAX_MESSAGE_LENGTH = 300
"""Characters of an unexpected exception's message that are shown: it may quote its input."""


def internal_error(error: BaseException, doing: str) -> str:
    """One line about an unexpected exception: `internal error while reading this service: ...`."""
    message = " ".join(str(error).split())
    more = "..." if len(message) > _MAX_MESSAGE_LENGTH else ""
    told = (
        f"{type(error).__name__}: {message[:_MAX_MESSAGE_LENGTH]}{more}" if message else type(error).__name__
    )
    return f"internal error while {doing}: {told}"


def internal_problem(error: Exception, doing: str, file: str, line: int = 0) -> Problem:
    """An unexpected exception as a problem of the object being processed. Call it while handling `error`."""
    trace = "".join(traceback.format_exception(error))
    return Problem(file, line, "", internal_error(error, doing), PLEASE_REPORT, trace)


_UNREADABLE_HINTS: dict[type[OSError], str] = {
    FileNotFoundError: "check the spelling",
    PermissionError: "let vipd read it (chgrp vipd, chmod g+r), or use the drop-in private-files.conf",
}


def unreadable_problem(file: str, error: OSError) -> Problem:
    """A file that cannot be read, the same by `vipctl check` and by vipd."""
    if isinstance(error, IsADirectoryError):
        return Problem(file, 0, "", "is a directory, and is not read", "move its files up, or rename it")
    hint = _UNREADABLE_HINTS.get(type(error)) or str(getattr(error, "hint", ""))
    return Problem(file, 0, "", f"cannot be read: {error.strerror or error}", hint)


@dataclass(frozen=True, slots=True, order=True)
class Note:
    """Information that is no fault but may be unexpected. Its text is `file:line: note: text`."""

    file: str
    line: int
    text: str

    def __post_init__(self) -> None:
        _clean(self, "file", "text")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: note: {self.text}"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of one file, or one document of the store.

    `services` contains those that could be read even if there are problems, so that a caller can find
    further conflicts; it must not be served unless `ok`. With `parts` each part of them is judged by itself.
    """

    services: tuple[Service, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()
    """Parts of Kubernetes objects, or of another program's configuration, that were left out, and why."""
    parts: Mapping[str, Declaration] = field(default_factory=dict, compare=False, repr=False)
    """Of a file with Kubernetes objects: what is accepted or refused by itself. By `namespace/name` each
    Service, and by "" all that belongs to none of them. The problems and services of all parts are also those
    of the whole, which has the conflicts between parts too."""
    blank: bool = field(default=False, compare=False)
    """It declares no service, and does not say so by `services: []`: no text, only comments, a list without
    a Service."""

    @property
    def ok(self) -> bool:
        """No problem was found, but for those that leave the rest of a service in place."""
        return all(problem.partial for problem in self.problems)

    def served_parts(self) -> tuple[Service, ...]:
        """The services that may serve: all of them, or those of the parts without a problem."""
        parts = self.parts.values() if self.parts else (self,)
        return tuple(service for part in parts if part.ok for service in part.services)

    def understood(self) -> Declaration:
        """The services in which there is no problem. For a text that another version accepted: what this one
        does not know in one service is no reason to stop the others. It contains no service if a problem lies
        outside of vipd's own services, where it may concern any of them.

        A problem is known by its line alone: services on one line go together, and one that cannot be read at
        all takes the service before it along.
        """
        if self.parts:
            rest = self.parts[""]
            known = () if rest.ok else rest.understood().services
            return Declaration((*self.served_parts(), *known))
        if any(problem.more or not problem.path.startswith("services[") for problem in self.problems):
            return Declaration()
        starts = [0, *(service.origin.line for service in self.services)]
        faulty = {starts[bisect_right(starts, problem.line) - 1] for problem in self.problems}
        return Declaration(tuple(s for s in self.services if s.origin.line not in faulty))
