"""What a check is, and what it says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vipd.observe.doctor.facts import Facts

NAMED = 3
"""How many things a sentence names before it counts the rest."""
MENDED = 10
"""For how many things of one kind commands are shown at once; after those are mended the others show."""


class Severity(IntEnum):
    """How bad it is, the worst first."""

    PROBLEM = 0
    """Traffic fails, or will at the next occasion."""
    WARNING = 1
    """It works, but something is about to bite, or does so for some flows."""
    UNCHECKED = 2
    """Could not be looked at."""
    OK = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Judgement:
    """One thing that a check says."""

    severity: Severity
    title: str
    """What is so, in one line."""
    cause: str = ""
    """Why it is so, and what it does to traffic."""
    repair: tuple[str, ...] = ()
    """Commands for a root shell, to be run in this order."""
    hint: str = ""
    """What to do where no command can know it."""


@dataclass(frozen=True, slots=True)
class Check:
    """A question about the host. `judge` says what is wrong, or nothing when all is well."""

    id: str
    """Stable: scripts may rely on it."""
    group: str
    fine: str
    """What is so when nothing is wrong."""
    judge: Callable[[Facts], Iterable[Judgement]]
    blind: Callable[[Facts], str] = lambda facts: ""
    """Why the facts do not suffice to say that all is well; empty when they do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A judgement and the check that it is of."""

    id: str
    group: str
    judgement: Judgement

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return self.judgement.severity


def problem(title: str, cause: str, *repair: str, hint: str = "") -> Judgement:
    """Something that breaks traffic."""
    return Judgement(Severity.PROBLEM, title, cause, repair, hint)


def warning(title: str, cause: str, *repair: str, hint: str = "") -> Judgement:
    """Something that works, but not for all, or not for long."""
    return Judgement(Severity.WARNING, title, cause, repair, hint)


def unchecked(title: str, cause: str, *repair: str) -> Judgement:
    """Something that could not be looked at, and what would let it."""
    return Judgement(Severity.UNCHECKED, title, cause, repair)


def fine(title: str, cause: str = "") -> Judgement:
    """Something that is well, and worth a word."""
    return Judgement(Severity.OK, title, cause)


def fault_of_ours(what: str, error: Exception) -> str:
    """What is said of a check, or of a look at the host, that failed as nobody expected."""
    return f"this {what} itself failed: {type(error).__name__}: {error}; please report it"


def listed(names: Collection[str]) -> str:
    """`a, b, c and 2 more`."""
    first = list(names)[:NAMED]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
