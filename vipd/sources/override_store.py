"""Keeps overrides of operators in one file that the daemon writes, `state_dir/overrides.json`.

Every override is on disk, synced, before the request is answered (guarantee G4). Expiry needs no disk: an
override contains its expiry, so that an expired one does not count whatever the file contains.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from vipd.declaration.bounded_json import read_json
from vipd.declaration.problems import PLEASE_REPORT
from vipd.host.durable import MAX_BYTES, make_directory, read_fault, read_own, write_durably
from vipd.host.observer import Observer
from vipd.host.systemd.fields import Event, fields
from vipd.model.override import (
    MalformedOverrideError,
    Override,
    OverrideKey,
    Overrides,
    OverrideTarget,
    by_part,
    describe,
    expired,
    from_json,
    next_expiry,
    to_document,
)
from vipd.sources.state import StoreError

log = logging.getLogger(__name__)

MAX_FAULTS = 10
"""Number of faults that are named for one file."""
_HINT = "hint: mend it or move it aside, then vipctl reload"


class OverrideStore:
    """All active overrides. One that cannot be read is reported and left out, and the file is then not
    changed."""

    def __init__(self, path: Path, clock: Callable[[], datetime], observer: Observer | None = None) -> None:
        """`observer` gets `overrides_changed` after a change is on disk, or time has ended orders."""
        self._path, self._clock, self._observer = path, clock, observer or Observer()
        self._overrides: dict[OverrideKey, Override] = {}
        self._expired_unsaved = False
        self._faults: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """The file."""
        return str(self._path)

    @property
    def overrides(self) -> Overrides:
        """Every active override, in parts."""
        return self._overrides

    @property
    def unsaved(self) -> bool:
        """Whether the file contains expired overrides. While it is faulty it is not changed."""
        return self._expired_unsaved and not self._faults

    def faults(self) -> tuple[str, ...]:
        """The parts of the file that cannot be used."""
        return self._faults

    def load(self) -> None:
        """Read the file. A missing file contains no overrides; expired ones are not active."""
        found: list[Override] = []
        faults: list[str] = []
        items: list[tuple[str, object]] = []
        try:
            items = _items(read_own(self._path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            faults = [read_fault(self._path, error, f"no order of it is in force; {_HINT}")]
        for name, item in items:
            try:
                found.append(from_json(item))
            except MalformedOverrideError as error:
                faults.append(f"{self._path}: {name}: {error}; it is not in force; {_HINT}")
        if len(faults) > MAX_FAULTS:
            faults[MAX_FAULTS:] = [f"{self._path}: {len(faults) - MAX_FAULTS} more faults"]
        self._faults = tuple(faults)
        self._overrides, self._expired_unsaved = by_part(found), False
        self._expire()

    def reload(self) -> None:
        """Read the file again when it could not be used before."""
        if self._faults:
            before = self._overrides
            self.load()
            self._observer.overrides_changed(_different(before, self._overrides))

    def put(self, *overrides: Override) -> None:
        """Activate these overrides, on disk first; each replaces an earlier one of the same part.

        Raises StoreError; then nothing has changed.
        """
        self._change(
            {**self._overrides, **by_part(overrides)}, frozenset(order.target for order in overrides)
        )

    def clear(self, *targets: OverrideTarget) -> None:
        """Clear the overrides of these targets. Raises StoreError; then nothing has changed."""
        gone = frozenset(targets) & {key.target for key in self._overrides}
        if gone:
            self._change({key: o for key, o in self._overrides.items() if key.target not in gone}, gone)

    def next_expiry(self) -> datetime | None:
        """When an override next expires."""
        return next_expiry(self._overrides)

    def expire_due(self) -> None:
        """End overrides that have expired. `save_expired` then updates the file."""
        if changed := self._expire():
            self._observer.overrides_changed(changed)

    def save_expired(self) -> None:
        """Record in the file that overrides have expired, if it does not. Raises StoreError."""
        if self.unsaved:
            self._save(self._overrides)

    def _expire(self) -> frozenset[OverrideTarget]:
        """End overrides that have expired; returns their targets."""
        changes, before = expired(self._overrides, self._clock()), self._overrides
        if changes:
            now = {**before, **changes}
            self._overrides = {key: override for key, override in now.items() if override is not None}
            self._expired_unsaved = True
        for key, changed in changes.items():
            _log_expired(before[key], pins_alone=changed is not None)
        return frozenset(key.target for key in changes)

    def _change(self, wanted: dict[OverrideKey, Override], targets: frozenset[OverrideTarget]) -> None:
        self._save(wanted)
        self._overrides = wanted
        self._observer.overrides_changed(targets)

    def _save(self, wanted: dict[OverrideKey, Override]) -> None:
        if self._faults:
            raise StoreError(f"overrides cannot be changed: {self._faults[0]}")
        text = json.dumps(to_document(wanted), indent=1)
        if by_part(from_json(item) for _, item in _items(text.encode())) != wanted:
            raise StoreError(f"these overrides read back as others; nothing has changed; {PLEASE_REPORT}")
        try:
            make_directory(self._path.parent)
            write_durably(self._path, (text + "\n").encode())
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from None
        self._expired_unsaved = False


def _different(one: Overrides, other: Overrides) -> frozenset[OverrideTarget]:
    """The targets of overrides that differ between the two."""
    return frozenset(key.target for key in {**one, **other} if one.get(key) != other.get(key))


def _log_expired(override: Override, pins_alone: bool) -> None:
    subject = override.target
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


def _items(data: bytes) -> list[tuple[str, object]]:
    """The stored overrides, each with its name for people; raises ValueError."""
    document = read_json(data, MAX_BYTES)
    if not isinstance(document, dict) or not isinstance(document.get("overrides"), list):
        raise ValueError("it must be a mapping with the list overrides")
    weights = document.get("weights", [])
    if not isinstance(weights, list):
        raise ValueError("weights must be a list")
    # A separate weight takes precedence over one beside a state, which is its copy for older versions.
    return [
        *((f"override {number}", item) for number, item in enumerate(document["overrides"])),
        *((f"weight {number}", item) for number, item in enumerate(weights)),
    ]
