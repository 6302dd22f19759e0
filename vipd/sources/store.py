"""Services added by vipctl: one file that the daemon writes, `state_dir/services.yaml`, itself a declaration.

Every change is on disk, synced, before the request is answered (guarantee G4). A copy beside it serves if
the file has been damaged. The history beside it has an entry for each change.

A change that is not confirmed in time is taken back. That needs no disk: the history on disk has what was
before, and until when the change was to be confirmed, so that a restart takes it back again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vipd.declaration.problems import PLEASE_REPORT, Declaration
from vipd.declaration.reader import parse_declaration
from vipd.declaration.unit import Unit
from vipd.declaration.writer import format_service
from vipd.host.durable import (
    error_text,
    make_directory,
    read_fault,
    read_own,
    write_atomically,
    write_durably,
)
from vipd.host.systemd.fields import Event, fields
from vipd.model import limits
from vipd.model.formatting import duration
from vipd.model.service import Origin, Service
from vipd.model.text import join_surrogate_pairs
from vipd.sources.confirmation import Clocks, Confirmation
from vipd.sources.history import (
    FILE_NAME,
    NO_NOTE,
    TAKES_BACK,
    ChangeNote,
    Entry,
    ServiceChange,
    StoreHistory,
)

log = logging.getLogger(__name__)

STORE_UNIT = "cli"
COPY_SUFFIX = ".last-good"
READ_BACK_AT_ONCE = 100
"""Services."""

_FOREIGN = re.compile(r"[\r\x85\u2028\u2029]|\n(?!  - |    |\Z)")
"""In a file of the store: what is no line of a service."""
_REFERENCE = re.compile(r"[\s\[{,:][&*]\S")
"""In the text of a service: perhaps an anchor or alias of YAML, by which services depend on others."""

_HEAD = """\
# Services added by vipctl. vipd writes this file; change it with vipctl.
apiVersion: vipd/v1
services:"""

_HINT = "hint: declare some of them in files"


class StoreError(RuntimeError):
    """The store's file cannot be used; the text gives the reason."""


class StoreSource:
    """The services that vipctl owns."""

    name = "store"
    writes = False

    def __init__(self, path: Path, clocks: Clocks | None = None) -> None:
        self._path, self._clocks = path, clocks or Clocks()
        self.history = StoreHistory(path.with_name(FILE_NAME))
        self._copy = path.with_name(path.name + COPY_SUFFIX)
        self._blocks: dict[str, tuple[Service, str]] = {}
        """Each stored service as it was written last, by name."""
        self._ahead: dict[str, tuple[Service, str]] = {}
        """Services of a large change that is about to be saved."""
        self._declaration = Declaration()
        self._services: Mapping[str, Service] = {}
        self._unit = Unit(self._declaration, self._declaration)
        self._faults: tuple[str, ...] = ()
        self.has_good_copy = False
        """Whether the file cannot be used, and its copy has services and no problem."""
        self._before: Mapping[str, Service | None] = {}
        """What the services of an unconfirmed change were before it; None: not there."""
        self._unsaved = False
        """Whether the file still has what was taken back."""
        self.change_lock = asyncio.Lock()
        """Held from the decision on a change until it is saved."""
        self.confirmation_changed = asyncio.Event()
        """Set by those who have caused that, on the event loop."""

    @property
    def location(self) -> str:
        """The file."""
        return str(self._path)

    @property
    def services(self) -> Mapping[str, Service]:
        """The stored services by name; the same object while nothing has changed."""
        return self._services

    @property
    def unsaved(self) -> bool:
        """Whether the disk still has what was taken back."""
        return self._unsaved or self.history.unsaved

    def load(self) -> None:
        """Read the file. One that cannot be used is left alone and reported; the last good copy serves."""
        self._load_services()
        self.history.load()
        self._before, self._unsaved = {}, False
        try:
            self._finish_last_change()
            if waits := self.history.confirmation:
                self._before = self.services_at(waits.revision - 1)
                self.history.set_confirmation(waits.in_this_boot(self._clocks))
        except StoreError as error:
            self.history.reject(str(error))

    def _load_services(self) -> None:
        text, found, self._faults = _read(self._path)
        self._blocks, self.has_good_copy = {}, False
        if not self._faults:
            self._set_declaration(found)
            self._blocks = _blocks_in(text, found.services)
            return
        _, last_good, unusable = _read(self._copy)
        self._set_declaration(last_good)
        self.has_good_copy = bool(last_good.services) and not unusable
        serving = "no good copy of it can be read"
        if last_good.services:
            which = "its last good copy goes" if self.has_good_copy else "the services without problems go"
            serving = f"{which} on serving"
        *first, last = self._faults
        what, *hint = last.partition("; hint: ")
        self._faults = (
            *first,
            f"{what}; {serving}{''.join(hint)}",
        )  # one fault, one problem: they are counted

    def format_ahead(self, services: Iterable[Service]) -> None:
        """Make the texts of services that are about to be saved: a second for 10,000, in which others may
        change the store. Call it in a thread, one call at a time. Raises StoreError."""
        self._ahead = self._blocks_of(services)

    def save(self, services: Mapping[str, Service], note: ChangeNote = NO_NOTE) -> None:
        """Replace the stored services, on disk first. Raises StoreError; then nothing has changed.

        It blocks on the disk, and a second for 10,000 services of which there is no text yet: call it in a
        thread, one call at a time.
        """
        self.save_taken_back()
        self._require_writable()
        if self.history.fault:
            raise StoreError(f"the store cannot be changed: {self.history.fault}")
        blocks, text = self._text_of(services)
        changes = self._changes_to(services, blocks)
        if changes:
            self._add_to_history(changes, note)
        try:
            self._write(text)
        except StoreError:
            if changes:
                self.history.drop_newest()
                with contextlib.suppress(OSError):
                    self.history.save()  # else the next start sees that it was not carried out
            raise
        if note.confirm_seconds is not None:
            self._before = {change.name: self._services.get(change.name) for change in changes}
        self._blocks, self._ahead = blocks, {}
        self._set_declaration(Declaration(tuple(services.values())))

    def confirm(self) -> Entry:
        """The last change stays; returns its entry. Blocks on the disk. Raises StoreError; then it still is
        unconfirmed."""
        try:
            self.history.confirm()
        except OSError as error:
            raise StoreError(f"{self.history.location}: cannot be written: {error.strerror}") from None
        self._before = {}
        return self.history.entries[-1]

    def confirmation_view(self, service: str = "") -> dict[str, object] | None:
        """The confirmation that the last change waits for, as JSON for the API; None: it waits for none, or
        it does not concern this service."""
        waits = self.history.confirmation
        return waits.view(self._clocks) if waits and (not service or service in self._before) else None

    def seconds_to_confirm(self) -> float | None:
        """Seconds in which the last change can still be confirmed; 0: the time is over; None: nothing waits
        for it."""
        waits = self.history.confirmation
        return waits.seconds_left(self._clocks) if waits else None

    def take_back_due(self) -> Mapping[str, str]:
        """Take the last change back if it was not confirmed in time; returns the actions by service."""
        waits = self.history.confirmation
        if waits is None or waits.seconds_left(self._clocks):
            return {}
        why = f"not confirmed within {duration(waits.seconds)}"
        return self.take_back(ChangeNote("vipd", why), "time limit")

    def take_back(self, note: ChangeNote, cause: str) -> Mapping[str, str]:
        """Take the unconfirmed change back, in memory; `save_taken_back` writes that. Returns the actions by
        service. Call it in a thread, with the lock held, and only while a change is unconfirmed."""
        entry = self.history.entries[-1]
        changes = [change.reversed() for change in entry.changes()]
        reason = f"{TAKES_BACK}{entry.revision}: {note.reason}"
        at = self._clocks.time_of_day()
        taken = Entry.of(entry.revision + 1, at, ChangeNote(note.by, reason), changes)
        self._set_services({**self._services, **self._before})
        self._before, self._unsaved = {}, True
        self.history.add_unsaved(taken)
        extra = fields(
            Event.CHANGE_TAKEN_BACK, service=taken.names, unit=STORE_UNIT, cause=cause, reason=reason
        )
        what, who = f"revision {entry.revision}", entry.by or "an unknown user"
        log.warning("%s by %s is taken back: %s: %s", what, who, note.reason, taken.summary(), extra=extra)
        return {change.name: change.action for change in changes}

    def save_taken_back(self) -> None:
        """Write to disk what was taken back; does nothing if it is there. Blocks on the disk. Raises
        StoreError; what was taken back stays so."""
        if not self.unsaved:
            return
        try:
            self.history.save()
        except OSError as error:
            what = f"{self.history.location}: cannot be written: {error_text(error)}"
            raise StoreError(
                f"{what}; the change is taken back, but would be again after a restart"
            ) from None
        if self._unsaved:
            self._require_writable()
            blocks, text = self._text_of(self._services)
            self._write(text)
            self._blocks, self._unsaved = blocks, False

    def services_at(self, revision: int) -> Mapping[str, Service | None]:
        """What the services changed since then were at that revision; None: not there. Raises StoreError if
        this version of vipd cannot read them."""
        return _services_of(self.history.texts_at(revision))

    def changes_in(self, entry: Entry) -> list[tuple[ServiceChange, Service | None, Service | None]]:
        """Each change of an entry, and the service before and after it. Raises StoreError."""
        changes = list(entry.changes())
        befores = _services_of({change.name: change.before for change in changes})
        afters = _services_of({change.name: change.after for change in changes})
        return [(change, befores[change.name], afters[change.name]) for change in changes]

    def _require_writable(self) -> None:
        if self._faults:
            fault, _, hint = self._faults[0].partition("; hint: ")
            hint = hint or f"mend {self._path} or move it aside, then vipctl reload"
            raise StoreError(f"the store cannot be changed: {fault}; hint: {hint}")

    def _text_of(self, services: Mapping[str, Service]) -> tuple[dict[str, tuple[Service, str]], bytes]:
        """Each service with its text, and the file of them all. Raises StoreError beyond the limits."""
        _check_limits(len(services), sum(map(limits.declared_size, services.values())))
        blocks = self._blocks_of(services.values())
        text = _file_text([block for _, block in blocks.values()]).encode()
        if len(text) > limits.FILE_BYTES:
            raise StoreError(
                f"the store would have {len(text)} bytes: {limits.FILE_BYTES} are the most; {_HINT}"
            )
        return blocks, text

    def _write(self, text: bytes) -> None:
        """Replace the file and its copy. Raises StoreError; then both are as before."""
        try:
            make_directory(self._path.parent)
            write_durably(self._path, text)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from None
        with contextlib.suppress(OSError):
            # Not synced: a power cut may lose the copy, but then it has not damaged the file itself.
            write_atomically(self._copy, text)

    def _add_to_history(self, changes: Sequence[ServiceChange], note: ChangeNote) -> None:
        revision, confirmation = self.history.newest + 1, None
        if note.confirm_seconds is not None:
            confirmation = Confirmation.begin(revision, note.confirm_seconds, self._clocks)
        entry = Entry.of(revision, self._clocks.time_of_day(), note, changes)
        try:
            self.history.add(entry, confirmation)
        except OSError as error:
            what = f"{self.history.location}: cannot be written: {error_text(error)}"
            raise StoreError(f"{what}; nothing has changed") from None

    def _changes_to(
        self, services: Mapping[str, Service], blocks: Mapping[str, tuple[Service, str]]
    ) -> list[ServiceChange]:
        """The differences from the stored services, as texts."""
        gone = [name for name in self._services if name not in services]
        before = self._services.get
        # Most are the same object, which is the faster comparison.
        new = [name for name, service in services.items() if before(name) is not service]
        changed = [name for name in new if before(name) != services[name]]
        return [
            ServiceChange(name, self._stored_text(name), blocks[name][1] if name in blocks else None)
            for name in (*gone, *changed)
        ]

    def _stored_text(self, name: str) -> str | None:
        """A stored service as it is in the file; None if there is none."""
        known, service = self._blocks.get(name), self._services.get(name)
        if known and known[0] is service:
            return known[1]
        return None if service is None else format_service(service).removesuffix("\n")

    def _finish_last_change(self) -> None:
        """After a crash between the history and the file: a change that the file lacks was not accepted, and
        is dropped; that a change was taken back counts, and is done again."""
        entry = next(reversed(self.history.entries), None)
        if entry is None or any(self._stored_text(c.name) != c.before for c in entry.changes()):
            return
        if entry.takes_back:
            afters = _services_of({change.name: change.after for change in entry.changes()})
            self._set_services({**self._services, **afters})
            self._unsaved = True
        elif not self._faults:  # else it may be in the file that cannot be read
            log.warning(
                "revision %d was not stored, as vipd ended before: %s", entry.revision, entry.summary()
            )
            self.history.drop_newest()

    def reload(self) -> None:
        """Read the file again when it could not be used before."""
        if self.faults():
            self.load()

    def units(self) -> Mapping[str, Unit]:
        """One unit: stored services were accepted when they were stored."""
        if self._unit.candidate is not self._declaration:
            self._unit = Unit(self._declaration, self._declaration)
        return {STORE_UNIT: self._unit}

    def _set_services(self, services: Mapping[str, Service | None]) -> None:
        self._set_declaration(Declaration(tuple(each for each in services.values() if each is not None)))

    def _set_declaration(self, declaration: Declaration) -> None:
        self._services = {service.name: service for service in declaration.services}
        self._declaration = declaration

    def _blocks_of(self, services: Iterable[Service]) -> dict[str, tuple[Service, str]]:
        """Each service with its text, which is the known one while the service is the same. Raises
        StoreError for one whose text does not parse to exactly that service."""
        blocks, fresh = {}, []
        for service in services:
            written, ahead = self._blocks.get(service.name), self._ahead.get(service.name)
            known = next((k for k in (written, ahead) if k and k[0] is service), None)
            if known is None:
                known = (service, format_service(service).removesuffix("\n"))
                fresh.append(known)
            blocks[service.name] = known
        # In parts: reading the text of many at once would hold Python's lock for long.
        for start in range(0, len(fresh), READ_BACK_AT_ONCE):
            part = fresh[start : start + READ_BACK_AT_ONCE]
            if not _reads_back(part):
                wrong = next((s.name for s, text in part if not _reads_back([(s, text)])), "")
                what = f"what would be written for {wrong or 'these services'} reads back as something else"
                raise StoreError(f"{what}; nothing has changed; {PLEASE_REPORT}")
        return blocks

    def faults(self) -> tuple[str, ...]:
        """Set while the file, or the history, cannot be used."""
        return (*self._faults, *filter(None, (self.history.fault,)))

    def held(self) -> Mapping[str, str]:
        """Nothing: what the store has lost is in its history."""
        return {}

    def accept_removal(self) -> None:
        """Does nothing."""

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Does nothing: the file is the accepted version."""


def _check_limits(services: int, size: int) -> None:
    """Ensures that the file can be read again. Raises StoreError."""
    if services > limits.SERVICES:
        raise StoreError(f"the store would have {services} services: {limits.SERVICES} are the most; {_HINT}")
    if size > limits.MAX_UNIT_SIZE:
        raise StoreError(
            f"the store would have {size} endpoints: {limits.MAX_UNIT_SIZE} are the most; {_HINT}"
        )


def _read(path: Path) -> tuple[str, Declaration, tuple[str, ...]]:
    """A file's text and services; or the services that are understood, and why it cannot be used. A missing
    file contains none."""
    try:
        text = read_own(path, limits.FILE_BYTES).decode("utf-8")
    except FileNotFoundError:
        return "", Declaration(), ()
    except (OSError, UnicodeDecodeError) as error:
        return "", Declaration(), (read_fault(path, error),)
    text = join_surrogate_pairs(text)  # earlier versions wrote text as JSON does
    found = parse_declaration(text, str(path), source="cli", accepted=True)
    return (text, found, ()) if found.ok else ("", found.understood(), tuple(map(str, found.problems)))


def _services_of(texts: Mapping[str, str | None]) -> dict[str, Service | None]:
    """The services of these texts of the file. Raises StoreError."""
    text = _file_text([text for text in texts.values() if text is not None])
    found = parse_declaration(text, STORE_UNIT, source="cli", accepted=True)
    services = {service.name: replace(service, origin=Origin("cli")) for service in found.services}
    if not found.ok or services.keys() != {name for name, text in texts.items() if text is not None}:
        why = str(found.problems[0]) if found.problems else "its services have other names"
        raise StoreError(f"the history cannot be read back: {why}")
    return {name: services.get(name) for name in texts}


def _file_text(blocks: Sequence[str]) -> str:
    return "\n".join([_HEAD if blocks else f"{_HEAD} []", *blocks, ""])


def _reads_back(blocks: Sequence[tuple[Service, str]]) -> bool:
    """Whether these texts parse to exactly their services. Each is an independent item without references, so
    that this is true beside any others."""
    text = _file_text([text for _, text in blocks])
    found = parse_declaration(text, STORE_UNIT, source="cli", accepted=True)
    return found.ok and found.services == tuple(service for service, _ in blocks)


def _blocks_in(text: str, services: Sequence[Service]) -> dict[str, tuple[Service, str]]:
    """The text of each service that was read from a file as vipd writes it. Left out are others, and services
    that may depend on others."""
    head = f"{_HEAD}\n"
    if not text.startswith(head) or _FOREIGN.search(text, len(head)):
        return {}
    lines = text.split("\n")
    starts = [service.origin.line - 1 for service in services]
    ends = [*starts[1:], len(lines) - 1]
    texts = ("\n".join(lines[start:end]) for start, end in zip(starts, ends, strict=True))
    return {
        service.name: (service, text)
        for service, text in zip(services, texts, strict=True)
        if not _REFERENCE.search(text)
    }
