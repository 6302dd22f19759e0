"""Services added by vipctl, and the history of their changes, in the database of the state directory.

A change that is not confirmed in time is taken back. That needs no disk: the history on disk has what was
before, and until when the change was to be confirmed, so that a restart takes it back again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from vipd.declaration.bounded_json import read_json
from vipd.declaration.operations import spec_of
from vipd.declaration.problems import PLEASE_REPORT, Declaration
from vipd.declaration.reader import parse_declaration, parse_service
from vipd.declaration.unit import Unit
from vipd.host.durable import read_fault, read_own, rename_own
from vipd.host.systemd.fields import Event, fields
from vipd.model import limits
from vipd.model.formatting import duration
from vipd.model.service import Origin, Service
from vipd.model.text import join_surrogate_pairs
from vipd.sources.confirmation import Clocks, Confirmation
from vipd.sources.history import (
    MAX_ENTRIES,
    NAMES_KEPT,
    NO_NOTE,
    TAKES_BACK,
    ChangeNote,
    Entry,
    History,
    action_of,
)
from vipd.sources.state import Connection, StateFile, StoreError

log = logging.getLogger(__name__)

STORE_UNIT = "cli"
OLD_NAME = "services.yaml"
"""The file of versions before the database."""
NOT_READ = (
    *(f"{OLD_NAME}.last-good", "history.jsonl", "overrides.json", "maintenance.json", "accepted"),
    *("services-dir.json", "etcd"),
    *("health.json", "names.json", "counters.json", "flow-targets.json", "events.jsonl", "events.1.jsonl"),
)
"""Others of them."""
MAX_FAULTS = 10
"""Services that are named, of those that cannot be read."""
MAX_HISTORY_BYTES = 16 * 2**20
"""Texts of all entries but the newest, which is kept however large it is: the last change can always be taken
back."""

_HINT = "hint: declare some of them in files"
_CONFIRM = "update change set confirmation = null where confirmation is not null"
Texts = Mapping[str, str | None]
"""The stored text of services, by name; None: not there."""


class StoreSource:
    """The services that vipctl owns."""

    name = "store"
    writes = False

    def __init__(self, path: Path, clocks: Clocks | None = None, repair: bool = True) -> None:
        """`repair`: whether to mend a damaged file, and take an old one over; a tool that only looks does
        not."""
        self._clocks, self._owns = clocks or Clocks(), repair
        self.file = StateFile(path, repair)
        """The database, in which overrides and maintenance are, too."""
        self._services: Mapping[str, Service] = {}
        self._size = 0
        """Endpoints of all of them."""
        self._unit = Unit(Declaration(), Declaration())
        self._unread: Mapping[str, str] = {}
        """Why stored services cannot be read, by name."""
        self._old_fault = ""
        """Why the old file could not be taken over."""
        self._entries: tuple[Entry, ...] = ()
        self._confirmation: Confirmation | None = None
        self._before: Mapping[str, Service | None] = {}
        """What the services of an unconfirmed change were before it; None: not there."""
        self._taken_back: Entry | None = None
        """The newest entry, while the disk lacks it."""
        self._ahead: dict[str, tuple[Service, str]] = {}
        """Texts of the services of a large change that is about to be saved."""
        self.change_lock = asyncio.Lock()
        """Held from the decision on a change until it is saved."""
        self.confirmation_changed = asyncio.Event()
        """Set by those who have caused that, on the event loop."""

    @property
    def location(self) -> str:
        """The database."""
        return str(self.file.path)

    @property
    def services(self) -> Mapping[str, Service]:
        """The stored services by name; the same object while nothing has changed."""
        return self._services

    @property
    def history(self) -> History:
        """The newest changes."""
        return History(self._entries, self.location, self.file.fault, confirmation=self._confirmation)

    @property
    def unsaved(self) -> bool:
        """Whether the disk still has what was taken back."""
        return self._taken_back is not None

    @property
    def has_good_copy(self) -> bool:
        """Whether the database cannot be used, and its copy serves."""
        return self.file.reads_copy

    def load(self) -> None:
        """Read the database. One that cannot be used is reported; the last good copy serves."""
        self.file.open()
        self._entries, self._confirmation, self._before, self._taken_back = (), None, {}, None
        self._unread, self._old_fault = {}, ""
        self._set_services({})
        try:
            services, self._unread = _readable(self.file.read(_stored_texts) or {})
            self._set_services(services)
            self._entries, confirmation = self.file.read(_history) or ((), None)
            if confirmation:
                self._confirmation = confirmation.in_this_boot(self._clocks)
                self._before = self.services_at(confirmation.revision - 1)
        except StoreError as error:
            self.file.fault = self.file.fault or str(error)
        if self._owns:
            self._log_what_is_not_read()
        if not self._entries and not self.file.fault:
            self._take_over()

    def _take_over(self) -> None:
        """Make the services of the file of earlier versions the first change, once."""
        path = self.file.path.with_name(OLD_NAME)
        try:
            # The first versions wrote characters beyond 16 bits as pairs, which YAML does not know.
            text = join_surrogate_pairs(read_own(path, limits.FILE_BYTES).decode("utf-8"))
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            self._old_fault = read_fault(path, error, f"hint: mend {OLD_NAME} or move it aside")
            return
        declared = parse_declaration(text, str(path), source=STORE_UNIT, accepted=True)
        services = _by_name(declared.understood().services)
        if not declared.ok:
            problems = "; ".join(map(str, declared.problems))
            rest = f"what can be read of it serves; hint: mend {OLD_NAME} or move it aside"
            self._old_fault = f"{problems}; {rest}"
        elif self._owns:
            services = {name: replace(s, origin=Origin(STORE_UNIT)) for name, s in services.items()}
            try:
                self.save(services, ChangeNote("vipd", f"taken over from {OLD_NAME}"))
                rename_own(path, f"{OLD_NAME}.taken-over")
            except (StoreError, OSError) as error:
                self._old_fault = f"{path}: cannot be taken over: {error}"
        self._set_services(services)

    def _log_what_is_not_read(self) -> None:
        directory = self.file.path.parent
        names = (OLD_NAME, *NOT_READ) if self._entries else NOT_READ
        if left := [name for name in names if (directory / name).exists()]:
            text = "%s of %s: of an earlier version, and not read; hint: remove it"
            log.warning(text, ", ".join(left), directory)

    def format_ahead(self, services: Iterable[Service]) -> None:
        """Make the texts of services that are about to be saved: a second for 10,000, in which others may
        change the store. Call it in a thread, one call at a time. Raises StoreError."""
        self._ahead = {
            name: (service, _text_of(service))
            for name, service in _by_name(services).items()
            if self._services.get(name) is not service
        }

    def save(self, services: Mapping[str, Service], note: ChangeNote = NO_NOTE) -> None:
        """Replace the stored services, on disk first. Raises StoreError; then nothing has changed.

        It blocks on the disk, and a second for 10,000 services of which there is no text yet: call it in a
        thread, one call at a time.
        """
        self.save_taken_back()
        self._require_writable()
        before, revision = self._services, self.history.newest + 1
        names = _different(before, services)
        size = self._size + sum(_size(services.get(name)) - _size(before.get(name)) for name in names)
        _check_limits(len(services), size)
        if names:
            texts = {name: self._new_text(services.get(name)) for name in names}
            actions = {name: action_of(before.get(name), services.get(name)) for name in names}
            entry = Entry.of(revision, self._clocks.time_of_day(), note, actions)
            confirmation = None
            if note.confirm_seconds is not None:
                confirmation = Confirmation.begin(revision, note.confirm_seconds, self._clocks)
            self._record(entry, texts, confirmation)
            self._before = {name: before.get(name) for name in names} if confirmation else {}
        self._ahead = {}
        self._set_services(services, size)

    def confirm(self) -> Entry:
        """The last change stays; returns its entry. Blocks on the disk. Raises StoreError; then it still is
        unconfirmed."""
        entry = self._entries[-1]

        def confirm(database: Connection) -> None:
            self._restore(database, entry.revision)
            database.execute(_CONFIRM)

        self._entries, _ = self.file.change(confirm, _history)
        self._confirmation, self._before = None, {}
        return entry

    def confirmation_view(self, service: str = "") -> dict[str, object] | None:
        """The confirmation that the last change waits for, as JSON for the API; None: it waits for none, or
        it does not concern this service."""
        waits = self._confirmation
        return waits.view(self._clocks) if waits and (not service or service in self._before) else None

    def seconds_to_confirm(self) -> float | None:
        """Seconds in which the last change can still be confirmed; 0: the time is over; None: nothing waits
        for it."""
        return self._confirmation.seconds_left(self._clocks) if self._confirmation else None

    def take_back_due(self) -> Mapping[str, str]:
        """Take the last change back if it was not confirmed in time; returns the actions by service."""
        waits = self._confirmation
        if waits is None or waits.seconds_left(self._clocks):
            return {}
        why = f"not confirmed within {duration(waits.seconds)}"
        return self.take_back(ChangeNote("vipd", why), "time limit")

    def take_back(self, note: ChangeNote, cause: str) -> Mapping[str, str]:
        """Take the unconfirmed change back, in memory; `save_taken_back` writes that. Returns the actions by
        service. Call it with the lock held, and only while a change is unconfirmed."""
        entry = self._entries[-1]
        actions = {name: action_of(self._services.get(name), before) for name, before in self._before.items()}
        reason = f"{TAKES_BACK}{entry.revision}: {note.reason}"
        at = self._clocks.time_of_day()
        taken = Entry.of(entry.revision + 1, at, ChangeNote(note.by, reason), actions)
        restored = {**self._services, **self._before}
        self._set_services({name: service for name, service in restored.items() if service is not None})
        self._entries, self._taken_back = (*self._entries, taken), taken
        self._confirmation, self._before = None, {}
        extra = fields(
            Event.CHANGE_TAKEN_BACK, service=taken.names, unit=STORE_UNIT, cause=cause, reason=reason
        )
        revision, by = f"revision {entry.revision}", entry.by or "an unknown user"
        log.warning("%s by %s is taken back: %s: %s", revision, by, note.reason, taken.summary(), extra=extra)
        return actions

    def save_taken_back(self) -> None:
        """Write to disk what was taken back; does nothing if it is there. Blocks on the disk. Raises
        StoreError; what was taken back stays so."""
        if self._taken_back is None:
            return
        try:
            texts = self._texts_at(self._taken_back.before - 1)
            self._record(self._taken_back, texts, None)
        except StoreError as error:
            raise StoreError(
                f"{error}; the change is taken back, but would be again after a restart"
            ) from None
        self._taken_back = None

    def services_at(self, revision: int) -> Mapping[str, Service | None]:
        """What the services changed since then were at that revision; None: not there. Raises StoreError if
        this version of vipd cannot read them."""
        return _services_of(self._texts_at(revision))

    def changes_in(self, entry: Entry) -> list[tuple[str, Service | None, Service | None]]:
        """Each service of an entry, before and after it. Raises StoreError."""
        query = "select name, before, after from changed where revision = ? order by rowid"
        rows = self.file.read(lambda database: database.execute(query, (entry.revision,)).fetchall()) or []
        befores = _services_of({name: before for name, before, _ in rows})
        afters = _services_of({name: after for name, _, after in rows})
        return [(name, befores[name], afters[name]) for name, _, _ in rows]

    def reload(self) -> None:
        """Read the database again when it could not be used before."""
        if self.faults() and not self.unsaved:
            self.load()

    def units(self) -> Mapping[str, Unit]:
        """One unit: stored services were accepted when they were stored."""
        return {STORE_UNIT: self._unit}

    def faults(self) -> tuple[str, ...]:
        """Why the database, or a service in it, cannot be used; what became of a damaged one."""
        faults = [*filter(None, (self.file.fault, self.file.damage, self._old_fault))]
        unread = list(self._unread.values())
        if len(unread) > MAX_FAULTS:
            unread[MAX_FAULTS:] = [f"{len(unread) - MAX_FAULTS} more services that vipctl added do not serve"]
        return (*faults, *unread)

    def held(self) -> Mapping[str, str]:
        """Nothing: what the store has lost is in its history."""
        return {}

    def accept_removal(self) -> None:
        """Does nothing."""

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Does nothing: the database is the accepted version."""

    def _set_services(self, services: Mapping[str, Service], size: int | None = None) -> None:
        self._size = sum(map(_size, services.values())) if size is None else size
        declaration = Declaration(tuple(services.values()))
        self._services, self._unit = services, Unit(declaration, declaration)

    def _require_writable(self) -> None:
        if self._old_fault:
            raise StoreError(f"the store cannot be changed: {self._old_fault}; then vipctl reload")

    def _new_text(self, service: Service | None) -> str | None:
        if service is None:
            return None
        ahead = self._ahead.get(service.name)
        return ahead[1] if ahead and ahead[0] is service else _text_of(service)

    def _texts_at(self, revision: int) -> Texts:
        """The texts that the services changed since then had at that revision. Raises StoreError."""
        query = "select name, before from changed where revision > ? order by revision desc"
        return dict(self.file.read(lambda database: database.execute(query, (revision,)).fetchall()) or [])

    def _record(self, entry: Entry, texts: Texts, confirmation: Confirmation | None) -> None:
        """Store these texts, and an entry of it. Raises StoreError; then nothing has changed."""

        def record(database: Connection) -> None:
            self._restore(database, entry.revision - 1)
            _store(database, entry, texts, confirmation)
            _drop_oldest(database)

        self._entries, self._confirmation = self.file.change(record, _history)
        self._unread = {name: fault for name, fault in self._unread.items() if name not in texts}

    def _restore(self, database: Connection, newest: int) -> None:
        """If somebody removed or replaced the file, which then has another newest revision, what serves
        counts."""
        (revision,) = database.execute("select coalesce(max(revision), 0) from change").fetchone()
        if revision != newest:
            database.execute("delete from change where revision > ?", (newest,))
            database.execute("delete from service")
            rows = [(name, _text_of(service)) for name, service in self._services.items()]
            database.executemany("insert into service values (?, ?)", rows)


def _by_name(services: Iterable[Service]) -> dict[str, Service]:
    return {service.name: service for service in services}


def _different(before: Mapping[str, Service], after: Mapping[str, Service]) -> list[str]:
    """The names of services that a change removes, changes or adds."""
    removed = before.keys() - after.keys()
    names = [name for name in before if name in removed] if removed else []
    # Most are the same object, which is the faster comparison.
    others = [name for name, service in after.items() if before.get(name) is not service]
    return names + [name for name in others if before.get(name) != after[name]]


def _size(service: Service | None) -> int:
    return limits.declared_size(service) if service else 0


def _check_limits(services: int, size: int) -> None:
    if services > limits.SERVICES:
        raise StoreError(f"the store would have {services} services: {limits.SERVICES} are the most; {_HINT}")
    if size > limits.MAX_UNIT_SIZE:
        raise StoreError(
            f"the store would have {size} endpoints: {limits.MAX_UNIT_SIZE} are the most; {_HINT}"
        )


def _text_of(service: Service) -> str:
    """Its item of a declaration, as JSON. Raises StoreError if that reads back as something else."""
    text = json.dumps(spec_of(service), separators=(",", ":"))
    if _service_of(service.name, text) != service:
        what = f"what would be stored for {service.name} reads back as something else"
        raise StoreError(f"{what}; nothing has changed; {PLEASE_REPORT}")
    return text


def _service_of(name: str, text: str) -> Service:
    """The service of a stored text. Raises StoreError."""
    if not isinstance(text, str):  # any column of SQLite may have any type
        raise StoreError(f"service {name}: it is no text")
    try:
        service, problems = parse_service(
            read_json(text, limits.FILE_BYTES), Origin(STORE_UNIT), accepted=True
        )
    except ValueError as error:
        raise StoreError(f"service {name}: {error}") from None
    if problems:
        raise StoreError(f"service {name}: {replace(problems[0], file='')}")
    if service is None or service.name != name:
        raise StoreError(f"service {name}: its text has another name")
    return service


def _services_of(texts: Texts) -> dict[str, Service | None]:
    """The services of stored texts. Raises StoreError."""
    try:
        return {name: None if text is None else _service_of(name, text) for name, text in texts.items()}
    except StoreError as error:
        raise StoreError(f"the history cannot be read back: {error}") from None


def _readable(texts: Mapping[str, str]) -> tuple[dict[str, Service], dict[str, str]]:
    """The services of stored texts, and why others cannot be read."""
    services, faults = dict[str, Service](), dict[str, str]()
    for name, text in texts.items():
        try:
            services[name] = _service_of(name, text)
        except StoreError as error:
            faults[name] = f"{error}; it was added by vipctl and does not serve; hint: add it again"
    return services, faults


def _stored_texts(database: Connection) -> dict[str, str]:
    query = "select name, text from service order by rowid limit ?"
    texts = dict(database.execute(query, (limits.SERVICES + 1,)))
    if len(texts) > limits.SERVICES:
        raise ValueError(f"more than {limits.SERVICES} services")
    return texts


def _history(database: Connection) -> tuple[tuple[Entry, ...], Confirmation | None]:
    """The entries, the oldest first, and the confirmation that the newest waits for."""
    entries, confirmation = list[Entry](), None
    query = (
        "select revision, first, at, by, reason, actions, named, confirmation from change order by revision"
    )
    for revision, first, at, by, reason, actions, named, waits in database.execute(query):
        pairs = tuple((str(name), str(action)) for name, action in json.loads(named))
        when = datetime.fromisoformat(at).astimezone(UTC)
        counts = {str(action): int(number) for action, number in dict(json.loads(actions)).items()}
        entries.append(Entry(int(revision), when, str(by), str(reason), counts, pairs, int(first)))
        confirmation = Confirmation.from_json(dict(json.loads(waits))) if waits else None
    return tuple(entries), confirmation


def _store(database: Connection, entry: Entry, texts: Texts, confirmation: Confirmation | None) -> None:
    waits = json.dumps(confirmation.to_json()) if confirmation else None
    about = (entry.at.isoformat(), entry.by, entry.reason, json.dumps(dict(entry.actions)))
    row = (entry.revision, entry.first, *about, json.dumps(entry.named), 0, waits)
    database.execute("insert into change values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    for name, text in texts.items():
        stored = database.execute("select text from service where name = ?", (name,)).fetchone()
        change = (entry.revision, name, stored[0] if stored else None, text)
        database.execute("insert into changed values (?, ?, ?, ?)", change)
        if text is None:
            database.execute("delete from service where name = ?", (name,))
        else:
            upsert = "insert into service values (?, ?) on conflict (name) do update set text = excluded.text"
            database.execute(upsert, (name, text))
    _note_size(database, entry.revision)


def _note_size(database: Connection, revision: int) -> None:
    """Keep the size of an entry's texts with it: all of them are not read for each change."""
    size = """
    update change set size =
      (select coalesce(sum(length(coalesce(before, '')) + length(coalesce(after, ''))), 0)
       from changed where changed.revision = change.revision)
    where revision = ?"""
    database.execute(size, (revision,))


def _drop_oldest(database: Connection) -> None:
    """Keep the history within its limits. While the oldest is of a user with few entries, two consecutive
    ones of the user with the most become one instead, so that nobody's changes take the history of others."""
    rows = database.execute("select revision, by from change order by revision").fetchall()
    if len(rows) > MAX_ENTRIES:
        revisions = [revision for revision, _ in rows]
        users = [by.partition(" (pid ")[0] for _, by in rows[:-1]]  # the newest may wait to be confirmed
        user, _ = Counter(users).most_common(1)[0]
        pair = next((n for n, two in enumerate(pairwise(users)) if two == (user, user)), None)
        if users[0] == user or pair is None:
            database.execute("delete from change where revision = ?", (revisions[0],))
        else:
            _join(database, *revisions[pair : pair + 2])
    query = """
    select revision, size from change
    where revision < (select max(revision) from change) order by revision desc"""
    size = 0
    for revision, length in database.execute(query).fetchall():
        size += length
        if size > MAX_HISTORY_BYTES:
            database.execute("delete from change where revision <= ?", (revision,))
            return


def _join(database: Connection, first: int, second: int) -> None:
    """Make of two consecutive entries one, which leads from before the first to after the second."""
    both, one = {"first": first, "second": second}, {"second": second}
    for statement in (
        """update changed set before = (select before from changed as earlier
             where earlier.revision = :first and earlier.name = changed.name)
           where revision = :second and name in (select name from changed where revision = :first)""",
        """update changed set revision = :second where revision = :first
             and name not in (select name from changed where revision = :second)""",
        """update change set first =
             coalesce(nullif((select first from change where revision = :first), 0), :first)
           where revision = :second""",
        "delete from change where revision = :first",
    ):
        database.execute(statement, both)
    database.execute("delete from changed where revision = :second and before is after", one)
    query = "select name, before, after from changed where revision = :second order by rowid"
    actions = {name: action_of(before, after) for name, before, after in database.execute(query, one)}
    summary = (json.dumps(Counter(actions.values())), json.dumps(list(actions.items())[:NAMES_KEPT]))
    database.execute("update change set actions = ?, named = ? where revision = ?", (*summary, second))
    _note_size(database, second)
