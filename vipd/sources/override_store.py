"""Where operators' orders are kept: one file that the daemon writes, `state_dir/overrides.json`.

Every order is on disk, synced, before it is answered (guarantee G4).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from vipd.bounded_json import read_json
from vipd.declaration.problems import PLEASE_REPORT
from vipd.durable import MOST_BYTES, make_directory, read_own, why, write_durably
from vipd.overrides import (
    MalformedError,
    Override,
    Overrides,
    Subject,
    describe,
    from_json,
    lapsed,
    next_lapse,
    to_json,
)
from vipd.sources.store import StoreError
from vipd.systemd.fields import Event, fields

log = logging.getLogger(__name__)

MOST_FAULTS = 10
"""That are named of one file."""
_HINT = "hint: mend it or move it aside, then vipctl reload"


class OverrideStore:
    """All orders in force. One that cannot be read is reported and left out, and keeps the file unchanged."""

    def __init__(self, path: Path, clock: Callable[[], datetime]) -> None:
        self._path, self._clock = path, clock
        self._overrides: dict[Subject, Override] = {}
        self._faults: tuple[str, ...] = ()
        self.changed: Callable[[frozenset[Subject]], None] = lambda subjects: None
        """Called with what orders have changed about, after the change is on disk."""

    @property
    def location(self) -> str:
        """The file."""
        return str(self._path)

    @property
    def overrides(self) -> Overrides:
        """Every order, by what it is about."""
        return self._overrides

    def faults(self) -> tuple[str, ...]:
        """What of the file cannot be used."""
        return self._faults

    def load(self) -> None:
        """Read the file. No file holds no orders."""
        self._overrides, faults = {}, []
        try:
            items = _items(read_own(self._path))
        except FileNotFoundError:
            items = []
        except (OSError, ValueError) as error:
            items = []
            faults = [f"{self._path}: cannot be read: {why(error)}; no order of it is in force; {_HINT}"]
        for number, item in enumerate(items):
            try:
                override = from_json(item)
                self._overrides[override.subject] = override
            except MalformedError as error:
                faults.append(f"{self._path}: override {number}: {error}; it is not in force; {_HINT}")
        if len(faults) > MOST_FAULTS:
            faults[MOST_FAULTS:] = [f"{self._path}: {len(faults) - MOST_FAULTS} more faults"]
        self._faults = tuple(faults)

    def reload(self) -> None:
        """Read the file again when it could not be used before."""
        if self._faults:
            before = self._overrides.keys()
            self.load()
            self.changed(frozenset(before ^ self._overrides.keys()))

    def put(self, *orders: Override) -> None:
        """Make these orders hold, on disk first. One that orders nothing takes back what held before.

        Raises StoreError; then nothing has changed.
        """
        wanted = dict(self._overrides)
        for override in orders:
            if override.orders():
                wanted[override.subject] = override
            else:
                wanted.pop(override.subject, None)
        self._save(wanted, frozenset(override.subject for override in orders))

    def take_back(self, *subjects: Subject) -> None:
        """Let orders about these hold no more. Raises StoreError; then nothing has changed."""
        gone = frozenset(subjects) & self._overrides.keys()
        if gone:
            self._save({s: o for s, o in self._overrides.items() if s not in gone}, gone)

    def due(self) -> datetime | None:
        """When an order next ends by itself."""
        return next_lapse(self._overrides)

    def tick(self) -> None:
        """Let orders end whose time has come. Raises StoreError; then they end with the next tick."""
        changes = lapsed(self._overrides, self._clock())
        if changes:
            wanted = {**self._overrides, **changes}
            kept = {subject: override for subject, override in wanted.items() if override is not None}
            before = self._overrides
            self._save(kept, frozenset(changes))
            for subject, changed in changes.items():
                _tell_ended(before[subject], pins_alone=changed is not None)

    def _save(self, wanted: dict[Subject, Override], subjects: frozenset[Subject]) -> None:
        if self._faults:
            raise StoreError(f"overrides cannot be changed: {self._faults[0]}")
        text = json.dumps({"overrides": [to_json(o) for o in wanted.values()]}, indent=1)
        if [from_json(item) for item in _items(text.encode())] != list(wanted.values()):
            raise StoreError(f"these overrides read back as others; nothing has changed; {PLEASE_REPORT}")
        try:
            make_directory(self._path.parent)
            write_durably(self._path, (text + "\n").encode())
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from None
        self._overrides = wanted
        self.changed(subjects)


def _tell_ended(override: Override, pins_alone: bool) -> None:
    subject = override.subject
    what = f"the pins of {subject} have ended" if pins_alone else f"the order for {subject} has ended"
    reason = (
        f"clients with affinity move now; {describe(override)}" if pins_alone else f"was {describe(override)}"
    )
    extra = fields(
        Event.OVERRIDE_ENDED,
        service=subject.service,
        backend=subject.backend,
        cause="time limit",
        reason=reason,
    )
    log.info("%s: %s", what, reason, extra=extra)


def _items(data: bytes) -> list[object]:
    """The stored orders; raises ValueError."""
    document = read_json(data, MOST_BYTES)
    items = document.get("overrides") if isinstance(document, dict) else None
    if not isinstance(items, list):
        raise ValueError("it must be a mapping with the list overrides")
    return items
