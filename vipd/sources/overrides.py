"""Overrides of backends by operators, and the maintenance of this host, in the database of the state
directory.

A change is on disk, synced, before the request is answered (guarantee G4): so a host that restarts in the
middle of its maintenance announces nothing. Expiry needs no disk: an override contains its expiry, so that an
expired one does not count whatever the disk has.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from vipd.declaration.bounded_json import read_json
from vipd.declaration.problems import PLEASE_REPORT
from vipd.host.durable import MAX_BYTES
from vipd.host.observer import Observer
from vipd.host.systemd.fields import Event, fields
from vipd.model import maintenance, override
from vipd.model.maintenance import Maintenance
from vipd.model.override import MAX_TEXT, Override, OverrideKey, OverridePart, Overrides, OverrideTarget
from vipd.sources.state import Connection, StateFile, StoreError

log = logging.getLogger(__name__)

MAX_FAULTS = 10
"""Rows that are named, of those that cannot be read."""
HOST = "this host"
"""The target of maintenance; none of an override."""
Row = tuple[str, str]
"""The target of a part of an override, or `HOST`, and its text: JSON."""
Changes = Mapping[OverrideKey, Override | None]
"""The new override of each part that changes; None: there is none any more."""


@dataclass(frozen=True, slots=True)
class _Table:
    """What the table has."""

    overrides: Overrides
    maintenance: Maintenance | None
    unreadable: Mapping[Row, str]
    """Rows that stay as they are, each with the reason."""

    @staticmethod
    def of(rows: Iterable[Row], now: datetime) -> _Table:
        """What stored rows say. Maintenance that cannot be read counts: whoever wrote it wanted this host to
        announce nothing."""
        overrides, host, unreadable = list[Override](), None, dict[Row, str]()
        for target, text in rows:
            try:
                value = read_json(text, MAX_BYTES)
                if target == HOST:
                    host = maintenance.from_json(value)
                else:
                    overrides.append(override.from_json(value))
            except ValueError as error:
                why = f"what is stored for {target[:MAX_TEXT]} cannot be read: {error}"
                unreadable[target, text] = f"{why}; no override of it is in force; hint: give it again"
                if target == HOST:
                    host = Maintenance("vipd", now, "the stored one cannot be read")
                    unreadable[target, text] = f"{why}; it counts as maintenance; hint: vipctl host resume"
        return _Table(override.by_part(overrides), host, unreadable)

    def rows(self) -> list[Row]:
        """The rows to store."""
        rows = [(str(key.target), json.dumps(override.to_json(o))) for key, o in self.overrides.items()]
        if self.maintenance and HOST not in {target for target, _ in self.unreadable}:
            rows.append((HOST, json.dumps(maintenance.to_json(self.maintenance))))
        return [*rows, *self.unreadable]

    def with_overrides(self, changes: Changes) -> _Table:
        """The same after these changes."""
        changed = {**self.overrides, **changes}
        overrides = {key: order for key, order in changed.items() if order is not None}
        return replace(self._without({str(key.target) for key in changes}), overrides=overrides)

    def with_maintenance(self, current: Maintenance | None) -> _Table:
        """The same with this maintenance."""
        return replace(self._without({HOST}), maintenance=current)

    def _without(self, targets: set[str]) -> _Table:
        """The same without what cannot be read of these targets."""
        rows = {row: why for row, why in self.unreadable.items() if row[0] not in targets}
        return replace(self, unreadable=rows)


class OverrideStore:
    """All active overrides, and the maintenance of this host. An override that cannot be read is reported and
    is not in force; it stays on disk until its target gets another.

    If neither the database nor its copy can be read, nothing is known of either; then this host is in no
    maintenance, since a fault of the disk must not withdraw what it announces.
    """

    def __init__(
        self, file: StateFile, clock: Callable[[], datetime], observer: Observer | None = None
    ) -> None:
        """`observer` gets `overrides_changed` and `maintenance_changed` after a change is on disk, or time
        has ended something."""
        self._file, self._clock, self._observer = file, clock, observer or Observer()
        self._table = _Table({}, None, {})
        self._fault = ""
        """Why the database could not be read; then the table is not changed."""
        self.unsaved = False
        """Whether the disk has what has expired."""
        self._lock = asyncio.Lock()
        """Held by one change at a time, in the order of the requests."""

    @property
    def location(self) -> str:
        """The database."""
        return str(self._file.path)

    @property
    def overrides(self) -> Overrides:
        """Every active override, in parts."""
        return self._table.overrides

    @property
    def maintenance(self) -> Maintenance | None:
        """The maintenance in force; None: there is none."""
        return self._table.maintenance

    def faults(self) -> tuple[str, ...]:
        """What cannot be read."""
        faults = [f"{self.location}: {why}" for why in self._table.unreadable.values()]
        if len(faults) > MAX_FAULTS:
            faults[MAX_FAULTS:] = [f"{len(faults) - MAX_FAULTS} more overrides cannot be read"]
        return (*filter(None, [self._fault]), *faults)

    def load(self) -> None:
        """Read the database; what has expired is not active. Blocks on the disk."""
        self._take(self._read())

    async def reload(self) -> None:
        """Read the database again when something in it could not be read before."""
        async with self._lock:
            if self.faults():
                self._take(await asyncio.to_thread(self._read))

    async def put(self, order: Override) -> None:
        """Activate an override, on disk first; its parts replace earlier ones. Raises StoreError; then
        nothing has changed."""
        await self._change(lambda table: table.with_overrides(order.parts()))

    async def clear(self, *targets: OverrideTarget) -> None:
        """Clear the overrides of these targets. Raises StoreError; then nothing has changed."""
        none = dict.fromkeys(OverrideKey(target, part) for target in targets for part in OverridePart)
        await self._change(lambda table: table.with_overrides(none))

    async def set_maintenance(self, current: Maintenance | None) -> None:
        """Begin maintenance, or change it; None: end it. Raises StoreError; then nothing has changed."""
        await self._change(lambda table: table.with_maintenance(current))

    def next_expiry(self) -> datetime | None:
        """When something next expires."""
        ends = [override.next_expiry(self.overrides), self.maintenance.until if self.maintenance else None]
        return min((end for end in ends if end), default=None)

    def expire_due(self) -> None:
        """End what has expired. `save_expired` then updates the disk."""
        now, table = self._clock(), self._table
        if changes := override.expired(table.overrides, now):
            for key, order in changes.items():
                _log_expired(table.overrides[key], pins_alone=order is not None)
            table = table.with_overrides(changes)
        if table.maintenance and table.maintenance.over(now):
            extra = fields(Event.MAINTENANCE_ENDED, cause="time limit", reason=f"was {table.maintenance}")
            log.info("the maintenance of this host is over: its time limit", extra=extra)
            table = table.with_maintenance(None)
        self.unsaved = self.unsaved or table is not self._table
        self._set(table)

    async def save_expired(self) -> None:
        """Record on disk that something has expired, if it lacks that. Raises StoreError."""
        if self.unsaved:
            await self._change(lambda table: table)

    def _read(self) -> _Table | StoreError:
        """What the database has, or why it cannot be read."""
        try:
            return _Table.of(self._file.read(_stored_rows) or (), self._clock())
        except StoreError as error:
            return error

    def _take(self, table: _Table | StoreError) -> None:
        if isinstance(table, StoreError):
            self._fault = f"no override is in force, and this host counts as in no maintenance: {table}"
        else:
            self._fault, self.unsaved = "", False
            self._set(table)
        for fault in self.faults():
            log.error("%s", fault, extra=fields(Event.SOURCE_FAILED))
        self.expire_due()

    async def _change(self, change: Callable[[_Table], _Table]) -> None:
        """If the caller is cancelled, it still is carried out."""
        await asyncio.shield(self._carry_out(change))

    async def _carry_out(self, change: Callable[[_Table], _Table]) -> None:
        async with self._lock:
            before = self._table
            await asyncio.to_thread(self._save, change(before))
            self.unsaved = self._table is not before  # something has expired meanwhile
            self._set(change(self._table))

    def _save(self, table: _Table) -> None:
        """Let the database have this. Blocks on the disk. Raises StoreError."""
        if self._fault:
            raise StoreError(f"overrides cannot be changed: {self._fault}")
        rows = table.rows()
        if _Table.of(rows, self._clock()).overrides != table.overrides:
            raise StoreError(f"these overrides read back as others; nothing has changed; {PLEASE_REPORT}")

        def save(database: Connection) -> None:
            stored, wanted = dict.fromkeys(_stored_rows(database)), dict.fromkeys(rows)
            gone, new = stored.keys() - wanted.keys(), [row for row in wanted if row not in stored]
            database.executemany("delete from override where target = ? and text = ?", gone)
            database.executemany("insert into override values (?, ?)", new)

        self._file.change(save, lambda _: None)

    def _set(self, table: _Table) -> None:
        before, self._table = self._table, table
        keys = {**before.overrides, **table.overrides}
        different = [key for key in keys if before.overrides.get(key) != table.overrides.get(key)]
        if different:
            self._observer.overrides_changed(frozenset(key.target for key in different))
        if before.maintenance != table.maintenance:
            self._observer.maintenance_changed()


def _stored_rows(database: Connection) -> list[Row]:
    rows = database.execute("select target, text from override order by rowid")
    return [(str(target), str(text)) for target, text in rows]  # any column of SQLite may have any type


def _log_expired(order: Override, pins_alone: bool) -> None:
    subject, was = order.target, override.describe(order)
    what = f"the pins of {subject} have ended" if pins_alone else f"the order for {subject} has ended"
    reason = f"clients with affinity move now; {was}" if pins_alone else f"was {was}"
    extra = fields(
        Event.OVERRIDE_ENDED,
        service=subject.service,
        backend=subject.backend,
        cause="time limit",
        reason=reason,
    )
    log.info("%s: %s", what, reason, extra=extra)
