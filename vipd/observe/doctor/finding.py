"""A check, and its results. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vipd.observe.doctor.facts import Facts

MAX_NAMED = 3
"""Maximum number of things that a sentence names before it counts the rest."""
MAX_FIXES = 10
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
class CheckResult:
    """One result of a check."""

    severity: Severity
    title: str
    """The finding in one line."""
    cause: str = ""
    """Its cause, and its effect on traffic."""
    fix: tuple[str, ...] = ()
    """Commands for a root shell, to run in this order."""
    hint: str = ""
    """Advice if no command can be given."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the host. `check` returns faults, or nothing if there is none."""

    id: str
    """Stable: scripts may rely on it."""
    group: str
    ok_text: str
    """The finding if there is no fault."""
    check: Callable[[Facts], Iterable[CheckResult]]
    skipped_because: Callable[[Facts], str] = lambda facts: ""
    """Why the facts are insufficient to exclude a fault; empty if they suffice."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A judgement and the check that it is of."""

    id: str
    group: str
    result: CheckResult

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return self.result.severity


def problem(title: str, cause: str, *fix: str, hint: str = "") -> CheckResult:
    """Something that breaks traffic."""
    return CheckResult(Severity.PROBLEM, title, cause, fix, hint)


def warning(title: str, cause: str, *fix: str, hint: str = "") -> CheckResult:
    """Something that works, but not for all, or not for long."""
    return CheckResult(Severity.WARNING, title, cause, fix, hint)


def unchecked(title: str, cause: str, *fix: str) -> CheckResult:
    """A part that could not be checked, and the remedy."""
    return CheckResult(Severity.UNCHECKED, title, cause, fix)


def ok(title: str, cause: str = "") -> CheckResult:
    """A part without fault that is worth mentioning."""
    return CheckResult(Severity.OK, title, cause)


def internal_error_text(what: str, error: Exception) -> str:
    """The result for an unexpected exception of a check or collector."""
    return f"this {what} itself failed: {type(error).__name__}: {error}; please report it"


def listed(names: Collection[str], most: int = MAX_NAMED) -> str:
    """`a, b, c and 2 more`."""
    first = list(names)[:most]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
