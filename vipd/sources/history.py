"""The history of the store, `state_dir/history.jsonl`: who changed which services, and when.

Each change is one entry, on disk, synced, before the store's own file is written; a disk that is full so
refuses the change, and no accepted change lacks its entry. The file is replaced as a whole: it is small, as
the oldest entries are dropped beyond `MAX_ENTRIES` and `MAX_BYTES`. While the oldest is of a user with few,
two consecutive ones of the user with the most become one instead, so that nobody's changes take the history
of others.

Its lines are JSON: first `{"format": 1, "confirmation": ...}`; then each entry, the oldest first, as one line
about the change and one for each service, with its text in the store's file before and after the change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from vipd.declaration.bounded_json import read_json
from vipd.host.durable import MAX_BYTES as MAX_FILE_BYTES
from vipd.host.durable import make_directory, read_fault, read_own, write_durably
from vipd.model.text import one_line
from vipd.sources.confirmation import Confirmation

FILE_NAME = "history.jsonl"
_NEW_HISTORY = "hint: move it aside, then vipctl reload; a new history begins"

MAX_ENTRIES = 100
MAX_BYTES = 16 * 2**20
"""Bytes of all entries but the newest, which is kept however large it is: the last change can always be taken
back."""
NAMES_KEPT = 100
"""Services that the summary of an entry names at most."""
NAMES_SUMMED = 10
TAKES_BACK = "takes back "
"""Begins the reason of an entry that takes back an unconfirmed change; its revision follows."""
MAX_TEXT = 300
"""Characters of `by` and `reason`."""

_FORMAT = 1


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


@dataclass(frozen=True, slots=True)
class ServiceChange:
    """One service's text in the store's file before and after a change; None: it was not there."""

    name: str
    before: str | None
    after: str | None

    @property
    def action(self) -> str:
        """`created`, `changed` or `removed`."""
        return "created" if self.before is None else "removed" if self.after is None else "changed"

    def reversed(self) -> ServiceChange:
        """The change that takes this one back."""
        return ServiceChange(self.name, self.after, self.before)


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
    encoded: bytes
    """Its lines of the file: most of them are never read again."""
    first: int = 0
    """The first of several changes that have become this one; 0: it is one alone."""

    @staticmethod
    def of(
        revision: int, at: datetime, note: ChangeNote, changes: Sequence[ServiceChange], first: int = 0
    ) -> Entry:
        """The entry of a change."""
        by, reason = one_line(note.by)[:MAX_TEXT], one_line(note.reason)[:MAX_TEXT]
        head = {"revision": revision, "at": at.isoformat(), "by": by, "reason": reason}
        lines = [_line({**head, "first": first} if first else head)]
        lines += (_line({"name": c.name, "before": c.before, "after": c.after}) for c in changes)
        actions = dict(Counter(change.action for change in changes))
        named = tuple((change.name, change.action) for change in changes[:NAMES_KEPT])
        return Entry(revision, at, by, reason, actions, named, b"".join(lines), first)

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

    def changes(self) -> Iterator[ServiceChange]:
        """Every service of it."""
        lines = self.encoded.split(b"\n")
        return (_service_change(_object(line)) for line in lines[1:-1])


class StoreHistory:
    """The newest entries, and the confirmation that the last one waits for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: tuple[Entry, ...] = ()
        self._confirmation: Confirmation | None = None
        self.fault = ""
        """Why the file cannot be used; empty: it can."""
        self._unsaved = False

    @property
    def location(self) -> str:
        """The file."""
        return str(self._path)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries, the oldest first."""
        return self._entries

    @property
    def confirmation(self) -> Confirmation | None:
        """Set while the newest change is not confirmed."""
        return self._confirmation

    @property
    def newest(self) -> int:
        """The revision of the newest change; 0: there is none."""
        return self._entries[-1].revision if self._entries else 0

    @property
    def oldest(self) -> int:
        """The oldest revision that the entries lead back to: the one before the first of them."""
        return self._entries[0].before if self._entries else 0

    def load(self) -> None:
        """Read the file. One that cannot be used is left alone and reported."""
        self._entries, self._confirmation, self.fault, self._unsaved = (), None, "", False
        try:
            self._entries, self._confirmation = _parse(read_own(self._path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._entries, self._confirmation = (), None
            self.fault = read_fault(self._path, error, _NEW_HISTORY)

    def reject(self, why: str) -> None:
        """The file cannot be used: it is left alone, and has no entries."""
        self._entries, self._confirmation = (), None
        self.fault = f"{self._path}: {why}; {_NEW_HISTORY}"

    def add(self, entry: Entry, confirmation: Confirmation | None = None) -> None:
        """Add an entry, on disk. Raises OSError; then nothing has changed."""
        entries = _within_limits((*self._entries, entry))
        self._write(entries, confirmation)
        self._entries, self._confirmation = entries, confirmation

    def confirm(self) -> None:
        """The newest change stays, and the disk has that. Raises OSError; then nothing has changed."""
        self._write(self._entries, None)
        self._confirmation = None

    def set_confirmation(self, confirmation: Confirmation) -> None:
        """Replace the confirmation in memory alone: its time is the same."""
        self._confirmation = confirmation

    def add_unsaved(self, entry: Entry) -> None:
        """Add an entry that ends the confirmation; `save` writes it."""
        self._entries = _within_limits((*self._entries, entry))
        self._confirmation, self._unsaved = None, True

    def drop_newest(self) -> None:
        """Remove the newest entry, which was not carried out; `save` writes that."""
        self._entries, self._confirmation, self._unsaved = self._entries[:-1], None, True

    def save(self) -> None:
        """Write what is not yet on disk. Raises OSError."""
        if self._unsaved:
            self._write(self._entries, self._confirmation)

    @property
    def unsaved(self) -> bool:
        """Whether `save` has something to write."""
        return self._unsaved

    def texts_at(self, revision: int) -> dict[str, str | None]:
        """The text that each service changed since then had at that revision; None: it was not there."""
        found: dict[str, str | None] = {}
        for entry in reversed(self._entries):
            if entry.revision > revision:
                found |= {change.name: change.before for change in entry.changes()}
        return found

    def _write(self, entries: Sequence[Entry], confirmation: Confirmation | None) -> None:
        waits = confirmation.to_json() if confirmation else None
        head = _line({"format": _FORMAT, "confirmation": waits})
        data = b"".join((head, *(entry.encoded for entry in entries)))
        if len(data) > MAX_FILE_BYTES:
            raise OSError(
                0, f"the change alone takes {len(data) >> 20} MiB; hint: change fewer services at once"
            )
        make_directory(self._path.parent)
        write_durably(self._path, data)
        self._unsaved = False


def _within_limits(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The newest of these entries that may be kept."""
    if len(entries) > MAX_ENTRIES:
        entries = _with_joined(entries)
    kept, size = list(entries[-1:]), 0
    for entry in reversed(entries[-MAX_ENTRIES:-1]):
        size += len(entry.encoded)
        if size > MAX_BYTES:
            break
        kept.append(entry)
    return tuple(reversed(kept))


def _with_joined(entries: Sequence[Entry]) -> Sequence[Entry]:
    """These entries with two of the user with the most as one; as they are, if that user made the oldest, or
    no two in succession. The newest stays as it is, because it may wait for its confirmation."""
    users = [entry.by.partition(" (pid ")[0] for entry in entries[:-1]]
    user, _ = Counter(users).most_common(1)[0]
    pair = next((n for n, two in enumerate(pairwise(users)) if two == (user, user)), None)
    if users[0] == user or pair is None:
        return entries
    first, second = entries[pair : pair + 2]
    changes = {change.name: change for change in first.changes()}
    for change in second.changes():
        before = changes[change.name].before if change.name in changes else change.before
        changes[change.name] = ServiceChange(change.name, before, change.after)
    differing = [change for change in changes.values() if change.before != change.after]
    note, since = ChangeNote(second.by, second.reason), first.before + 1
    joined = Entry.of(second.revision, second.at, note, differing, since)
    return (*entries[:pair], joined, *entries[pair + 2 :])


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _parse(data: bytes) -> tuple[tuple[Entry, ...], Confirmation | None]:
    """The content of the file. Raises ValueError that names the line."""
    *lines, rest = data.split(b"\n")
    entries: list[Entry] = []
    confirmation = None
    head: dict[str, object] = {}
    changes: list[ServiceChange] = []
    number = 0
    try:
        if rest or not lines:
            raise ValueError("it has no end")
        for number, line in enumerate(lines, 1):
            value = _object(line)
            if number == 1:
                confirmation = _confirmation(value)
            elif "revision" in value:
                entries += _entry(head, changes, entries)
                head, changes = value, []
            else:
                changes.append(_service_change(value))
        entries += _entry(head, changes, entries)
        if confirmation and (not entries or confirmation.revision != entries[-1].revision):
            raise ValueError("it confirms another change than the newest")
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    return tuple(entries), confirmation


def _confirmation(head: Mapping[str, object]) -> Confirmation | None:
    if head.get("format") != _FORMAT:
        raise ValueError(f"format {head.get('format')!r} is not known")
    waits = head.get("confirmation")
    return Confirmation.from_json(waits) if isinstance(waits, Mapping) else None


def _entry(
    head: Mapping[str, object], changes: Sequence[ServiceChange], before: Sequence[Entry]
) -> Iterator[Entry]:
    """The entry of a line and those of its services; none, if there was no line yet."""
    if not head:
        if changes:
            raise ValueError("a service belongs to no change")
        return
    revision, by, reason = head["revision"], head.get("by"), head.get("reason")
    if isinstance(revision, bool) or not isinstance(revision, int) or not 0 < revision < 2**53:
        raise ValueError(f"revision {revision!r} is not a number")
    if before and revision <= before[-1].revision:
        raise ValueError(f"revision {revision} comes after {before[-1].revision}")
    if not isinstance(by, str) or not isinstance(reason, str):
        raise ValueError("by and reason must be text")
    first = head.get("first", 0)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= revision:
        raise ValueError(f"first {first!r} is not the number of a change before")
    at = datetime.fromisoformat(str(head.get("at"))).astimezone(UTC)
    yield Entry.of(revision, at, ChangeNote(by, reason), changes, first)


def _service_change(value: Mapping[str, object]) -> ServiceChange:
    name, before, after = value.get("name"), value.get("before"), value.get("after")
    if not isinstance(name, str) or not name:
        raise ValueError("a service without a name")
    if not isinstance(before, str | None) or not isinstance(after, str | None) or before == after:
        raise ValueError("before and after must be texts, or one of them null")
    return ServiceChange(name, before, after)


def _object(line: bytes) -> dict[str, object]:
    value = read_json(line, MAX_FILE_BYTES)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value
