"""Notes on earlier changes, read back from etcd's revisions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import cast

import pytest

from vipd.declaration.operations import Outcome, RefusedError
from vipd.sources.etcd.client import EtcdClient, Listing
from vipd.sources.etcd.errors import CompactedError
from vipd.sources.etcd.messages import Header, KeyRange, KeyValue, RangeResponse
from vipd.sources.etcd.store_history import EtcdHistory, note_value
from vipd.sources.etcd.values import Layout
from vipd.sources.history import MAX_ENTRIES, NAMES_KEPT, ChangeNote

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LAYOUT = Layout("/vipd/v1/")
NOTE = ChangeNote("root (pid 1)", "why")


class Etcd:
    """Versions of keys by revision, of which those before `compacted` are gone."""

    def __init__(self, versions: dict[int, tuple[str, str]], compacted: int = 0) -> None:
        self.versions, self.compacted, self.asked = versions, compacted, 0

    async def range(self, keys: KeyRange, limit: int = 0, revision: int = 0) -> RangeResponse:
        self.asked += 1
        kvs = self._at(revision, keys)
        return RangeResponse(Header("", "", max(self.versions)), kvs, False, len(kvs))

    async def list(self, ranges: list[KeyRange], page: int = 0, *, revision: int = 0) -> Listing:
        return Listing(Header("", "", max(self.versions)), self._at(revision, *ranges))

    def _at(self, revision: int, *ranges: KeyRange) -> tuple[KeyValue, ...]:
        if revision and revision < self.compacted:
            raise CompactedError(self.compacted)
        found = {}
        for at, (key, value) in sorted(self.versions.items()):
            if (not revision or at <= revision) and any(keys.contains(key.encode()) for keys in ranges):
                found[key] = KeyValue(key.encode(), value.encode(), at)
        return tuple(found.values())

    def history(self) -> EtcdHistory:
        return EtcdHistory(cast(EtcdClient, self), LAYOUT)


def note(services: int = 1) -> tuple[str, str]:
    results = {f"s{number}": "created" for number in range(services)} | {"same": "unchanged"}
    return LAYOUT.history, note_value(NOW, NOTE, "h1", Outcome({}, results))  # type: ignore[arg-type]


def test_a_note_says_who_when_what_and_why() -> None:
    (entry,) = asyncio.run(Etcd({7: note(NAMES_KEPT + 5)}).history().entries())
    assert (entry.revision, entry.at, entry.by, entry.reason) == (7, NOW, "root (pid 1) on h1", "why")
    assert entry.actions == {"created": NAMES_KEPT + 5}
    assert entry.names == tuple(f"s{number}" for number in range(NAMES_KEPT))


def test_only_so_many_notes_are_read() -> None:
    etcd = Etcd({number: note() for number in range(2, 300)})
    entries = asyncio.run(etcd.history().entries())
    assert [entry.revision for entry in entries] == list(range(300 - MAX_ENTRIES, 300))
    assert etcd.asked == MAX_ENTRIES


def test_the_history_ends_where_etcd_is_compacted() -> None:
    etcd = Etcd({3: note(), 5: note(), 9: note()}, compacted=5)
    assert [entry.revision for entry in asyncio.run(etcd.history().entries())] == [5, 9]


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "junk",
        "[]",
        "{}",
        "null",
        '{"at": 7, "by": "", "reason": "", "actions": {}, "services": []}',
        '{"at": "2026-01-01T00:00:00", "by": "", "reason": "", "actions": {}, "services": []}',
        '{"at": "2026-01-01T00:00:00+00:00", "by": "", "reason": "", "actions": [], "services": []}',
        '{"at": "2026-01-01T00:00:00+00:00", "by": "", "reason": "", "actions": {}, "services": [1]}',
        "[" * 100_000,
    ],
)
def test_what_others_write_in_its_place_is_passed_over(junk: str) -> None:
    etcd = Etcd({3: note(), 5: (LAYOUT.history, junk), 9: note()})
    assert [entry.revision for entry in asyncio.run(etcd.history().entries())] == [3, 9]


def test_only_what_has_changed_since_then_is_read() -> None:
    def service(number: int, text: str) -> tuple[str, str]:
        return f"{LAYOUT.services}s{number}", text

    good = "address: 10.96.0.1\nports: 80\nbackends: [10.244.0.{}]\n"
    etcd = Etcd({2: service(1, good.format(1)), 3: service(2, "junk"), 5: service(1, good.format(5))})
    known = {"s1": 5, "s2": 3, "s3": 4}
    found = asyncio.run(etcd.history().services_since(3, known))
    assert {name: service and service.backends[0].address for name, service in found.items()} == {
        "s1": "10.244.0.1",
        "s3": None,
    }
    with pytest.raises(RefusedError, match="s2 of revision 3 cannot be used"):
        asyncio.run(etcd.history().services_since(3, {"s2": 4}))
