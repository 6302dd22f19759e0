"""The history of a store, as values: who changed which services, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from vipd.model.text import one_line
from vipd.sources.confirmation import Confirmation

MAX_ENTRIES = 100
NAMES_KEPT = 100
"""Services that the summary of an entry names at most."""
NAMES_SUMMED = 10
TAKES_BACK = "takes back "
"""Begins the reason of an entry that takes back an unconfirmed change; its revision follows."""
MAX_TEXT = 300
"""Characters of `by` and `reason`."""


@dataclass(frozen=True, slots=True)
class ChangeNote:
    """What the history holds about a change besides its services."""

    by: str = ""
    """Who made it: `root (pid 4711)`."""
    reason: str = ""
    """Why, if it is not simply a change: `rollback to 7`."""
    confirm_seconds: int | None = None
    """The change is taken back unless it is confirmed within this time."""


NO_NOTE = ChangeNote()


def action_of(before: object, after: object) -> str:
    """What a change does with a service that it found and leaves so; None: not there."""
    return "created" if before is None else "removed" if after is None else "changed"


@dataclass(frozen=True, slots=True)
class Entry:
    """One change of the store."""

    revision: int
    """Its number, one more than that of the change before."""
    at: datetime
    by: str
    reason: str
    actions: Mapping[str, int]
    """Number of services by action."""
    named: tuple[tuple[str, str], ...]
    """The first services with their actions."""
    first: int = 0
    """The first of several changes that have become this one; 0: it is one alone."""

    @staticmethod
    def of(revision: int, at: datetime, note: ChangeNote, actions: Mapping[str, str]) -> Entry:
        """The entry of a change, with the action for each service."""
        by, reason = one_line(note.by)[:MAX_TEXT], one_line(note.reason)[:MAX_TEXT]
        named = tuple(islice(actions.items(), NAMES_KEPT))
        return Entry(revision, at, by, reason, dict(Counter(actions.values())), named)

    @property
    def before(self) -> int:
        """The revision that it leads back to."""
        return (self.first or self.revision) - 1

    @property
    def names(self) -> tuple[str, ...]:
        """The first services."""
        return tuple(name for name, _ in self.named)

    @property
    def takes_back(self) -> bool:
        """Whether it takes back a change that was not confirmed."""
        return self.reason.startswith(TAKES_BACK)

    def summary(self) -> str:
        """`dns created, web removed and 3 more`."""
        shown = [f"{name} {action}" for name, action in self.named[:NAMES_SUMMED]]
        more = sum(self.actions.values()) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")


@dataclass(frozen=True, slots=True)
class History:
    """The newest changes of a store."""

    entries: Sequence[Entry]
    """The oldest first."""
    location: str
    """Where they are kept, as text for messages."""
    fault: str = ""
    """Why there is none; empty: there is."""
    bounded: bool = True
    """Whether no other revisions are kept than those of the entries."""
    confirmation: Confirmation | None = None
    """Set while the newest change is not confirmed."""

    @property
    def newest(self) -> int:
        """The revision of the newest change; 0: there is none."""
        return self.entries[-1].revision if self.entries else 0

    @property
    def oldest(self) -> int:
        """The oldest revision that the entries lead back to: the one before the first of them."""
        return self.entries[0].before if self.entries else 0
