"""Keeps the maintenance of this host in a file that the daemon writes, `state_dir/maintenance.json`.

It is on disk, synced, before the request is answered, so that a host that restarts in the middle of its
maintenance announces nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from vipd.declaration.bounded_json import read_json
from vipd.host.durable import make_directory, read_fault, read_own, remove_own, write_durably
from vipd.host.observer import Observer
from vipd.host.systemd.fields import Event, fields
from vipd.model.maintenance import Maintenance, from_json, to_json
from vipd.model.override import MalformedOverrideError
from vipd.sources.state import StoreError

log = logging.getLogger(__name__)

FILE_NAME = "maintenance.json"
MAX_BYTES = 65536


class MaintenanceStore:
    """The maintenance of this host. A file that cannot be read counts as one: whoever wrote it wanted this
    host to announce nothing."""

    def __init__(self, path: Path, clock: Callable[[], datetime], observer: Observer | None = None) -> None:
        """`observer` gets `maintenance_changed` after a change is on disk, or time has ended it."""
        self._path, self._clock, self._observer = path, clock, observer or Observer()
        self._current: Maintenance | None = None
        self._ended_unsaved = False
        self._fault = ""

    @property
    def current(self) -> Maintenance | None:
        """The maintenance in force; None: there is none."""
        return self._current

    @property
    def unsaved(self) -> bool:
        """Whether the file contains a maintenance that is over."""
        return self._ended_unsaved

    def faults(self) -> tuple[str, ...]:
        """Why the file cannot be used."""
        return (self._fault,) if self._fault else ()

    def load(self) -> None:
        """Read the file; a missing one is no maintenance."""
        self._fault = ""
        try:
            self._current = from_json(read_json(read_own(self._path, MAX_BYTES), MAX_BYTES))
        except FileNotFoundError:
            self._current = None
        except (OSError, ValueError, MalformedOverrideError) as error:
            self._current = Maintenance("vipd", self._clock(), "its file cannot be read")
            what = "this host counts as in maintenance; hint: vipctl host resume"
            self._fault = read_fault(self._path, error, what)
            log.error("%s", self._fault, extra=fields(Event.SOURCE_FAILED))
        self._end_due()

    def put(self, maintenance: Maintenance) -> None:
        """Begin maintenance, or change it. Raises StoreError; then nothing has changed."""
        text = json.dumps(to_json(maintenance), indent=1) + "\n"
        try:
            make_directory(self._path.parent)
            write_durably(self._path, text.encode())
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from None
        self._set(maintenance)

    def clear(self) -> None:
        """End maintenance. Raises StoreError; then nothing has changed."""
        self._remove()
        self._set(None)

    def next_expiry(self) -> datetime | None:
        """When it ends by itself."""
        return self._current.until if self._current else None

    def expire_due(self) -> None:
        """End it if its time is over. `save_expired` then removes the file."""
        if self._end_due():
            self._observer.maintenance_changed()

    def save_expired(self) -> None:
        """Remove the file of a maintenance that is over. Raises StoreError."""
        if self._ended_unsaved:
            self._remove()

    def _end_due(self) -> bool:
        current = self._current
        if current is None or not current.over(self._clock()):
            return False
        self._current, self._ended_unsaved = None, True
        extra = fields(Event.MAINTENANCE_ENDED, cause="time limit", reason=f"was {current}")
        log.info("the maintenance of this host is over: its time limit", extra=extra)
        return True

    def _remove(self) -> None:
        try:
            remove_own(self._path)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be removed: {error.strerror}") from None
        self._ended_unsaved = False

    def _set(self, current: Maintenance | None) -> None:
        self._current, self._fault, self._ended_unsaved = current, "", False
        self._observer.maintenance_changed()
