"""The history of the services in etcd: who changed which with vipctl, when, and what they were before.

Each of vipctl's changes puts a note at one key, in the transaction that writes the services. etcd keeps every
version of that key, and of the services, until it is compacted: the notes are read one after the other, each
at the revision before the next one. What others write to etcd, as with etcdctl, has no note.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime

from vipd.declaration.bounded_json import read_json
from vipd.declaration.operations import Outcome, RefusedError
from vipd.declaration.problems import printable
from vipd.model.service import Service
from vipd.model.text import one_line
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import CompactedError
from vipd.sources.etcd.messages import KeyRange, KeyValue
from vipd.sources.etcd.values import Layout, read_service_value
from vipd.sources.history import MAX_ENTRIES, MAX_TEXT, NAMES_KEPT, ChangeNote, Entry

MAX_NOTE_BYTES = 256 * 1024
"""Of a note: the names of its services, at most, and two texts."""


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


class EtcdHistory:
    """Reads what etcd keeps of earlier changes."""

    def __init__(self, client: EtcdClient, layout: Layout) -> None:
        self._client, self._layout = client, layout

    async def entries(self) -> tuple[Entry, ...]:
        """The newest changes, at most `MAX_ENTRIES`, the oldest first. Raises EtcdError."""
        key, found, revision = KeyRange(self._layout.history.encode()), list[Entry](), 0
        for _ in range(MAX_ENTRIES):
            try:
                kvs = (await self._client.range(key, revision=revision)).kvs
            except CompactedError:
                break
            if not kvs:
                break
            found += _entries(kvs[0])
            revision = kvs[0].mod_revision - 1
            if revision < 1:
                break
        return tuple(reversed(found))

    async def changes_in(self, entry: Entry) -> list[tuple[str, Service | None, Service | None]]:
        """The services that an entry names, each before and after it. Raises EtcdError, RefusedError."""
        return [
            (
                name,
                await self._service_at(name, entry.revision - 1),
                await self._service_at(name, entry.revision),
            )
            for name, _ in entry.named
        ]

    async def services_since(self, revision: int, known: Mapping[str, int]) -> Mapping[str, Service | None]:
        """What the services that changed since a revision were at it; None: not there. `known`: the revisions
        at which the present ones were last written, by name. Raises EtcdError, RefusedError."""
        start = self._layout.services
        try:
            listing = await self._client.list([KeyRange.prefix(start.encode())], revision=revision)
        except CompactedError:
            raise _compacted_error(revision) from None
        kvs = {_text(kv.key).removeprefix(start): kv for kv in listing.kvs}
        found: dict[str, Service | None] = {
            name: self._read(name, kv) for name, kv in kvs.items() if known.get(name) != kv.mod_revision
        }
        return found | dict.fromkeys(known.keys() - kvs.keys())

    async def _service_at(self, name: str, revision: int) -> Service | None:
        if revision < 1:
            return None
        key = KeyRange(f"{self._layout.services}{name}".encode())
        try:
            kvs = (await self._client.range(key, revision=revision)).kvs
        except CompactedError:
            raise _compacted_error(revision) from None
        return self._read(name, kvs[0]) if kvs else None

    def _read(self, name: str, kv: KeyValue) -> Service:
        found = read_service_value(_text(kv.key), name, _text(kv.value))
        if not found.ok:
            what = f"{printable(_text(kv.key))} of revision {kv.mod_revision} cannot be used"
            raise RefusedError("invalid", what, problems=tuple(found.problems))
        return found.services[0]


def _entries(kv: KeyValue) -> tuple[Entry, ...]:
    """The entry of a note; none if something else was written there."""
    try:
        note = read_json(kv.value, MAX_NOTE_BYTES)
        at = datetime.fromisoformat(note["at"])
        by, reason = one_line(str(note["by"]))[:MAX_TEXT], one_line(str(note["reason"]))[:MAX_TEXT]
        actions = {one_line(str(action)): int(count) for action, count in note["actions"].items()}
        named = tuple((str(name), str(action)) for name, action in note["services"][:NAMES_KEPT])
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()
    if at.tzinfo is None:
        return ()
    return (Entry(kv.mod_revision, at, by, reason, actions, named, b""),)


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _compacted_error(revision: int) -> RefusedError:
    why = "etcd has compacted it: it keeps as much as its --auto-compaction-retention says"
    return RefusedError("not-found", f"revision {revision} is not kept any more", why)
