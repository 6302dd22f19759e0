"""A check, and its results. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vipd.observe.doctor.facts import Facts

NAMED = 3
"""Maximum number of things that a sentence names before it counts the rest."""
MENDED = 10
"""Maximum number of things of one kind for which commands are shown; once those are fixed, the others
appear."""


class Severity(IntEnum):
    """How bad it is, the worst first."""

    PROBLEM = 0
    """Traffic fails, or will at the next occasion."""
    WARNING = 1
    """It works, but something is about to bite, or does so for some flows."""
    UNCHECKED = 2
    """Could not be checked."""
    OK = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Judgement:
    """One result of a check."""

    severity: Severity
    title: str
    """The finding in one line."""
    cause: str = ""
    """Its cause, and its effect on traffic."""
    repair: tuple[str, ...] = ()
    """Commands for a root shell, to run in this order."""
    hint: str = ""
    """Advice if no command can be given."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the host. `judge` returns faults, or nothing if there is none."""

    id: str
    """Stable: scripts may rely on it."""
    group: str
    fine: str
    """The finding if there is no fault."""
    judge: Callable[[Facts], Iterable[Judgement]]
    blind: Callable[[Facts], str] = lambda facts: ""
    """Why the facts are insufficient to exclude a fault; empty if they suffice."""


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
    """A part that could not be checked, and the remedy."""
    return Judgement(Severity.UNCHECKED, title, cause, repair)


def fine(title: str, cause: str = "") -> Judgement:
    """A part without fault that is worth mentioning."""
    return Judgement(Severity.OK, title, cause)


def fault_of_ours(what: str, error: Exception) -> str:
    """The result for an unexpected exception of a check or collector."""
    return f"this {what} itself failed: {type(error).__name__}: {error}; please report it"


def listed(names: Collection[str]) -> str:
    """`a, b, c and 2 more`."""
    first = list(names)[:NAMED]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
