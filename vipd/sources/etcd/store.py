"""vipctl's writes to etcd: services, one key each, with a note in the history; and overrides.

Every write is a transaction that fails if another client has changed one of its keys since this host last
received it.

Each note is a key of its own, written in the transaction that writes the services, so that its revision is
that of the change. What the services were is in etcd's own earlier revisions, until these are compacted. What
others write to etcd, as with etcdctl, has no note.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from vipd.declaration.bounded_json import read_json
from vipd.declaration.operations import Outcome, RefusedError
from vipd.declaration.problems import printable
from vipd.model.override import Override, OverrideTarget
from vipd.model.service import Service
from vipd.model.text import one_line
from vipd.sources.etcd.client import EtcdClient, KeyValue
from vipd.sources.etcd.errors import CompactedError, EndpointError, EtcdError
from vipd.sources.etcd.fleet import names_of_targets, override_name, override_value, service_value
from vipd.sources.etcd.follow import EtcdSource
from vipd.sources.etcd.values import Layout, read_service_value, unit_name
from vipd.sources.history import MAX_ENTRIES, MAX_TEXT, NAMES_KEPT, NO_NOTE, ChangeNote, Entry

Answer = TypeVar("Answer")

OBSERVE_TIMEOUT_SECONDS = 10.0
"""How long an answer waits until this host receives its own write."""
POLL_SECONDS = 0.01
MAX_DELETES_PER_TXN = 100
"""Fewer than the 128 operations that etcd accepts in a transaction by default."""
MAX_NOTE_BYTES = 256 * 1024
"""Of a note: the names of its services, at most, and two texts."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The outcome of a write."""

    revision: int
    """0 when there was nothing to write."""
    keys: Mapping[str, bool]
    """Whether each exists now, or was removed."""

    @property
    def location(self) -> str:
        """`etcd /vipd/v1/services/dns at revision 42`."""
        keys = list(map(printable, self.keys))
        named = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more keys" if keys else ""
        return f"etcd {named} at revision {self.revision}" if self.revision else f"etcd {named}".rstrip()


class EtcdStore:
    """The services and overrides in etcd, as known to this host, and changes to them. Every coroutine raises
    RefusedError; then nothing was written, unless the error reports that this is unknown."""

    def __init__(
        self,
        client: EtcdClient,
        source: EtcdSource,
        prefix: str,
        clock: Callable[[], datetime],
        host: str = "",
    ) -> None:
        """`host`: the name of this host, for the history."""
        self._client, self._source, self._known = client, source, source.keys
        self._layout, self._clock, self._host = Layout(prefix), clock, host
        self._stopping = False

    @property
    def services(self) -> dict[str, Service]:
        """Every service in etcd, without backends that registered themselves; for a faulty value, its last
        good one."""
        units = self._known.units.values()
        serving = (unit.candidate if unit.candidate.ok else unit.accepted for unit in units)
        return {service.name: service for declared in serving for service in declared.services}

    @property
    def location(self) -> str:
        """Location of the services."""
        return f"etcd {self._layout.services}"

    @property
    def history_location(self) -> str:
        """Location of the notes on changes."""
        return f"etcd {self._layout.history}"

    def check(self, outcome: Outcome) -> None:
        """Check that a change can be written at all. Raises RefusedError."""
        self._values(outcome)

    async def save(self, outcome: Outcome, note: ChangeNote = NO_NOTE) -> WriteResult:
        """Write a change that was decided on the current `services`."""
        results = outcome.results
        puts = {key: (value, 0) for key, value in self._values(outcome).items()}
        deletes = [self._key(name) for name, action in results.items() if action == "removed"]
        changing = bool(puts or deletes)
        if changing:
            now = self._clock()
            key = f"{self._layout.history}{now.isoformat()} {self._host}"
            puts[key] = (note_value(now, note, self._host, outcome), 0)
        # If nothing changes, unchanged services count too: this host may not know the latest change yet.
        names = [name for name, action in results.items() if action != "unchanged"] or list(results)
        revision = await self._write([self._key(name) for name in names], puts, deletes)
        if changing:
            await self._drop_old_notes()
        present = {self._key(name): results[name] != "removed" for name in names}
        return WriteResult(revision if changing else 0, present)

    async def put_override(self, override: Override) -> WriteResult:
        """Write an override, each part at a key of its own, beside an earlier other part; one that expires
        gets a lease that expires with it."""
        start, parts = self._layout.overrides, override.parts()
        values = {f"{start}{override_name(key)}": override_value(part) for key, part in parts.items()}
        lease = await self._lease(override.until) if values else 0
        puts = {key: (value, lease) for key, value in values.items()}
        try:
            revision = await self._write([*puts], puts, ()) if puts else 0
        except RefusedError:
            if lease:
                with contextlib.suppress(EtcdError):
                    await self._client.revoke_lease(lease)
            raise
        return WriteResult(revision, dict.fromkeys(puts, True))

    async def clear_overrides(self, targets: Collection[OverrideTarget]) -> WriteResult:
        """Delete the overrides of these targets."""
        start = self._layout.overrides
        keys = [f"{start}{name}" for name in names_of_targets(self._known.overrides, targets)]
        revision = 0
        for first in range(0, len(keys), MAX_DELETES_PER_TXN):
            some = keys[first : first + MAX_DELETES_PER_TXN]
            revision = await self._write(some, {}, some)
        return WriteResult(revision, dict.fromkeys(keys, False))

    def stop_waiting(self) -> None:
        """vipd stops: end every `wait_observed`."""
        self._stopping = True

    async def wait_observed(self, written: WriteResult) -> str:
        """Wait until this host receives a write; returns why it does not, or does not follow it, else
        empty."""
        clock = asyncio.get_running_loop().time
        end = clock() + OBSERVE_TIMEOUT_SECONDS
        while not all(self._received(key, there, written.revision) for key, there in written.keys.items()):
            if self._stopping:
                return "vipd is stopping: this host follows when it has started again"
            if clock() >= end:
                seconds = f"{OBSERVE_TIMEOUT_SECONDS:.0f} s"
                late = f"this host has not heard of revision {written.revision} after {seconds}"
                return "; ".join((late, *self._source.faults()))
            await asyncio.sleep(POLL_SECONDS)
        held = [key for key in self._known.held if written.keys.get(key) is False]
        if not held:
            return ""
        what = f"{len(held)} of the removals are held" if len(held) > 1 else "the removal is held"
        return f"{what}: too many services at once; vipctl accept-removal on each host lets go"

    def units(self, written: WriteResult) -> list[str]:
        """Names of the units that were written."""
        return [unit_name(key) for key, there in written.keys.items() if there]

    async def history(self) -> tuple[Entry, ...]:
        """The newest changes, at most `MAX_ENTRIES`, the oldest first."""
        notes = await _asked(self._client.newest(self._layout.history, MAX_ENTRIES))
        return tuple(entry for note in reversed(notes) for entry in read_note(note))

    async def _drop_old_notes(self) -> None:
        """Delete the older ones of twice as many as are shown. If that fails, the next change tries again."""
        with contextlib.suppress(EtcdError):
            notes = await self._client.newest(self._layout.history, 3 * MAX_ENTRIES, keys_only=True)
            if len(notes) >= 2 * MAX_ENTRIES:
                await self._client.txn({}, deletes=[note.key for note in notes[-MAX_DELETES_PER_TXN:]])

    async def changes_in(self, entry: Entry) -> list[tuple[str, Service | None, Service | None]]:
        """The services that an entry names, each before and after it."""
        names = [name for name, _ in entry.named]
        before = await self._services_at(names, entry.revision - 1)
        after = await self._services_at(names, entry.revision)
        return [(name, before.get(name), after.get(name)) for name in names]

    async def services_since(self, revision: int) -> Mapping[str, Service | None]:
        """What the services that changed since a revision were at it; None: not there."""
        start, names = self._layout.services, self.services.keys()
        listing = await _asked(self._client.list_keys([start], revision=revision), revision)
        earlier = {kv.key.removeprefix(start): kv for kv in listing.kvs}
        changed: dict[str, Service | None] = {
            name: self._service(kv)
            for name, kv in earlier.items()
            if name not in names or self._known.mod_revision(kv.key) != kv.mod_revision
        }
        return changed | dict.fromkeys(names - earlier.keys())

    async def _services_at(self, names: Iterable[str], revision: int) -> dict[str, Service]:
        """Those of some services that were there at a revision."""
        kvs = await _asked(self._client.get_all([*map(self._key, names)], revision), revision)
        return {service.name: service for service in map(self._service, kvs)}

    async def _lease(self, until: datetime | None) -> int:
        if until is None:
            return 0
        seconds = math.ceil((until - self._clock()).total_seconds())
        return await _asked(self._client.grant_lease(max(seconds, 1)))

    def _received(self, key: str, there: bool, revision: int) -> bool:
        known = self._known.mod_revision(key)
        overtaken = known > revision or (known == 0 and self._known.last_change > revision)
        return overtaken or known == (revision if there else 0)

    def _key(self, name: str) -> str:
        return f"{self._layout.services}{name}"

    def _service(self, kv: KeyValue) -> Service:
        """The service in an earlier value. Raises RefusedError."""
        declared = read_service_value(kv.key, kv.key.removeprefix(self._layout.services), kv.value)
        if not declared.ok:
            what = f"{printable(kv.key)} of revision {kv.mod_revision} cannot be used"
            raise RefusedError("invalid", what, problems=declared.problems)
        return declared.services[0]

    def _values(self, outcome: Outcome) -> dict[str, str]:
        return {
            self._key(name): service_value(self._layout, outcome.stored[name])
            for name, action in outcome.results.items()
            if action in ("created", "changed")
        }

    async def _write(
        self, keys: Sequence[str], puts: Mapping[str, tuple[str, int]], deletes: Collection[str]
    ) -> int:
        unchanged = {key: self._known.mod_revision(key) for key in keys}
        revision = await _asked(self._client.txn(unchanged, puts, deletes))
        if not revision:
            named = printable(keys[0]) if len(keys) == 1 else f"one of {len(keys)} keys"
            what = f"{named} was changed by somebody else meanwhile"
            why = "etcd holds another version than this host knew; nothing was stored"
            raise RefusedError("changed", what, why, "look at it, and say it again")
        return revision


async def _asked(question: Awaitable[Answer], revision: int = 0) -> Answer:
    """The answer to a question about a revision. Raises RefusedError."""
    try:
        return await question
    except CompactedError:
        why = "etcd has compacted it: it keeps as much as its --auto-compaction-retention says"
        raise RefusedError("not-found", f"revision {revision} is not kept any more", why) from None
    except EtcdError as error:
        raise refused_error(error) from None


def refused_error(error: EtcdError) -> RefusedError:
    """Why etcd did not carry out the request."""
    why, _, hint = str(error).partition("; hint: ")
    what = "etcd did not take it"
    if isinstance(error, EndpointError) and error.sent:
        what = "etcd did not answer, and may have taken it or not"
        hint = hint or "look before you say it again"
    elif "too many operations" in why:
        hint = "change fewer services at once, or start etcd with a higher --max-txn-ops"
    return RefusedError("internal", what, why, hint)


def note_value(at: datetime, note: ChangeNote, host: str, outcome: Outcome) -> str:
    """What a change leaves at the key of the history."""
    changed = {name: action for name, action in outcome.results.items() if action != "unchanged"}
    return json.dumps(
        {
            "at": at.isoformat(),
            "by": one_line(f"{note.by} on {host}")[:MAX_TEXT],
            "reason": one_line(note.reason)[:MAX_TEXT],
            "actions": dict(Counter(changed.values())),
            "services": list(changed.items())[:NAMES_KEPT],
        }
    )


def read_note(kv: KeyValue) -> tuple[Entry, ...]:
    """The entry of a note; none if something else was written there."""
    try:
        note = read_json(kv.value, MAX_NOTE_BYTES)
        at = datetime.fromisoformat(note["at"])
        by, reason = one_line(str(note["by"]))[:MAX_TEXT], one_line(str(note["reason"]))[:MAX_TEXT]
        actions = {one_line(str(action)): int(count) for action, count in note["actions"].items()}
        named = tuple((str(name), str(action)) for name, action in note["services"][:NAMES_KEPT])
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()
    return (Entry(kv.mod_revision, at, by, reason, actions, named),) if at.tzinfo else ()
