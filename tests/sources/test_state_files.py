"""Every file of the state directory with anything in its place: vipd says which, never waits, loses none."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.api.daemon_process import host
from tests.model.samples import HEAD, block
from tests.sources.etcd.gateway import broken
from vipd.dataplane.chosen import ChosenDataplane
from vipd.dataplane.conntrack.entries import Traffic
from vipd.dataplane.counting import BackendKey, RefusedKey
from vipd.declaration.native import parse_declaration
from vipd.health.record_cache import SavedRecord
from vipd.health.record_file import RecordFile, encode
from vipd.health.state import HealthRecord, HealthState
from vipd.host.durable import MAX_MOVED_ASIDE
from vipd.model.backend_status import AdminState
from vipd.model.forwarding import ForwardingKey
from vipd.model.override import Override, OverrideTarget
from vipd.model.service import Family
from vipd.model.service import Protocol as Transport
from vipd.observe.events.event import EventRecord
from vipd.observe.events.event_log import EventLog
from vipd.observe.events.recorder import Recorder
from vipd.observe.flow_stats.collector import FlowCollector
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.sources.etcd.keys import EtcdKeys
from vipd.sources.etcd.snapshot_file import SnapshotFile, StoredKey, accepted_record, change_record
from vipd.sources.etcd.snapshot_file import SnapshotState as Keys
from vipd.sources.etcd.values import Layout
from vipd.sources.files import FileSource
from vipd.sources.override_store import OverrideStore
from vipd.sources.removal_guard import RemovalGuard
from vipd.sources.store import StoreError, StoreSource

pytestmark = pytest.mark.timeout(60)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DRAIN = Override(
    OverrideTarget("web", "10.0.0.1"), "root", NOW, AdminState.DRAINING, until=NOW, pins_until=NOW
)
PLACE = BackendKey(ForwardingKey("web", "", Transport.TCP, Family.IPV4), "10.0.0.1", 80)
SERVICES = HEAD + block("10.96.0.10", "dns", "10.244.0.5")
EVENT = EventRecord(id=7, at=NOW, event="started", services=("a",), backends=("b",), since=NOW)


class Counter:
    """A dataplane's, which has counted nothing."""

    seconds = 0.0

    async def take(self) -> dict[BackendKey, int]:
        return {PLACE: 1}

    async def refused(self) -> dict[RefusedKey, int]:
        """No limits."""
        return {}

    async def collect_garbage(self) -> dict[BackendKey, int]:
        """Nothing is left."""
        return {}

    def saved_state(self) -> object:
        return None

    def restore(self, memory: object) -> None:
        pass


def _health(path: Path) -> list[str]:
    saved = RecordFile(path, lambda: 100.0, lambda: 2000.0)
    known = saved.load()
    saved.save(lambda: known)
    return []


def _counters(path: Path) -> list[str]:
    async def live() -> None:
        counting = FlowCollector(Counter(), path, list)
        await counting.collect_now()
        await counting.close()

    asyncio.run(live())
    return []


def _overrides(path: Path) -> list[str]:
    store = OverrideStore(path, lambda: NOW)
    store.load()
    store.next_expiry()
    try:
        store.put(DRAIN)
    except StoreError:
        assert store.faults()
    return list(store.faults())


def _store(path: Path) -> list[str]:
    store = StoreSource(path)
    store.load()
    try:
        store.save({})
    except StoreError:
        assert store.faults()
    return list(store.faults())


def _dataplane(path: Path) -> list[str]:
    chosen = ChosenDataplane(path.parent)
    assert chosen.read() in ("", "nftables")
    chosen.write("nftables")
    return []


def _snapshot(path: Path) -> list[str]:
    state = Keys()
    snapshot = SnapshotFile(path, "/vipd/v1/", lambda: state)
    state = snapshot.load()
    EtcdKeys(Layout("/vipd/v1/"), RemovalGuard(50), lambda record: None).restore(state)

    async def live() -> None:
        snapshot.enqueue(accepted_record(()))
        task = asyncio.create_task(snapshot.run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        snapshot.close()

    asyncio.run(live())
    return []


def _events(path: Path) -> list[str]:
    async def live() -> None:
        recorder = Recorder(EventLog(path.parent), asyncio.get_running_loop())
        recorder.record(EVENT)
        assert recorder.read()[-1].event == "started"
        recorder.close()

    asyncio.run(live())
    return []


def _accepted(path: Path) -> list[str]:
    directory = path.parent.parent / "services.d"
    directory.mkdir(exist_ok=True)
    FileSource(directory, path.parent).scan()
    return []


class StateFile(NamedTuple):
    """A file, what a good one holds, and what reads and then writes it. The reader returns its faults."""

    name: str
    good: bytes
    live: Callable[[Path], list[str]]


def _lines(*records: object) -> bytes:
    lines = (json.dumps(record).encode() for record in records)
    return b"".join(b"%08x %b\n" % (zlib.crc32(data), data) for data in lines)


def _counted() -> bytes:
    totals = FlowTotals()
    totals.add({PLACE: 3})
    totals.add_ended({PLACE: Traffic(1, 2, 3, 4)})
    return json.dumps({"boot": "", "totals": totals.to_json(), "counters": [["x"]]}).encode()


def _event() -> bytes:
    from vipd.observe.events.event import encode as line_of

    return line_of(EVENT)


def _overriding() -> bytes:
    from vipd.model.override import to_json

    return json.dumps({"overrides": [to_json(DRAIN)]}).encode()


HEAD_OF_KEYS = {"format": 1, "prefix": "/vipd/v1/"}
KEY = "/vipd/v1/services/dns"
CHANGE = change_record("7", 9, [(KEY, StoredKey("address: 10.96.0.1\nports: 80\n", 5, "x"))], ["gone"])

FILES = (
    StateFile(
        "health.json",
        encode(
            [SavedRecord(("10.0.0.1", 80, "tcp"), "", (), 50.0, HealthRecord(10.0, HealthState.UNHEALTHY))],
            100.0,
            2000.0,
        ),
        _health,
    ),
    StateFile("counters.json", _counted(), _counters),
    StateFile("overrides.json", _overriding(), _overrides),
    StateFile("services.yaml", SERVICES.encode(), _store),
    StateFile("services.yaml.last-good", SERVICES.encode(), lambda path: _store(path.with_suffix(""))),
    StateFile("dataplane", b"nftables\n", _dataplane),
    StateFile("etcd/snapshot", _lines(HEAD_OF_KEYS, CHANGE, accepted_record([KEY])), _snapshot),
    StateFile("events.jsonl", _event(), _events),
    StateFile("events.1.jsonl", _event(), lambda path: _events(path.with_name("events.jsonl"))),
    StateFile("accepted/%2Fetc%2Fvipd%2Fdns.yaml", SERVICES.encode(), _accepted),
    StateFile("accepted/sha256-00", SERVICES.encode(), _accepted),
)


def _put(data: bytes) -> Callable[[Path, bytes], object]:
    return lambda path, good: path.write_bytes(data)


def _huge(path: Path, good: bytes) -> None:
    path.write_bytes(good)
    os.truncate(path, 2**40)


PLACED: dict[str, Callable[[Path, bytes], object]] = {
    "garbage": _put(b"\x00\xff\xfe\x80garbage\n\n\xff"),
    "null": _put(b"null"),
    "list": _put(b"[1]"),
    "deep": _put(b"[" * 100_000),
    "truncated": lambda path, good: path.write_bytes(good[: len(good) // 2]),
    "huge": _huge,
    "directory": lambda path, good: path.mkdir(),
    "pipe": lambda path, good: os.mkfifo(path),
    "unreadable": lambda path, good: path.symlink_to(path.name),
}
SPEAKS_OF_LINES = ("events.jsonl", "events.1.jsonl")


def _inodes(root: Path) -> set[int]:
    return {path.lstat().st_ino for path in root.rglob("*")}


@pytest.mark.parametrize("what", PLACED)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_whatever_stands_in_its_place_is_told_and_never_lost(
    file: StateFile, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state" / file.name
    path.parent.mkdir(parents=True)
    PLACED[what](path, file.good)
    inode = path.lstat().st_ino
    with caplog.at_level(logging.INFO):
        faults = file.live(path)
        again = file.live(path)
    said = "\n".join([caplog.text, *faults, *again])
    lines = file.name in SPEAKS_OF_LINES and what not in ("huge", "directory", "pipe", "unreadable")
    torn = what == "truncated" and file.name == "etcd/snapshot"  # as by a power cut
    empty = what == "null" and file.good == SERVICES.encode() and not file.name.startswith("accepted/sha")
    unused = file.name == "services.yaml.last-good"  # nobody reads it while the file itself is good
    if not (torn or empty or unused):
        assert "lines of the kept events" in said if lines else file.name in said
    if not (unused or empty or torn) and file.name != "accepted/%2Fetc%2Fvipd%2Fdns.yaml":
        assert inode in _inodes(tmp_path), "lost"
    assert not [record for record in caplog.records if record.exc_info]


JSON_FILES = [file for file in FILES if file.good.lstrip().startswith(b"{")]


@pytest.mark.parametrize("file", JSON_FILES, ids=lambda file: file.name)
def test_every_broken_field_is_got_over(file: StateFile, tmp_path: Path) -> None:
    path = tmp_path / "state" / file.name
    path.parent.mkdir(parents=True)
    for name, value in broken(json.loads(file.good)):
        for old in path.parent.iterdir():
            old.unlink()
        path.write_text(json.dumps(value) + "\n")
        try:
            file.live(path)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error


def test_every_broken_field_of_the_snapshot_is_got_over(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    records: list[object] = [HEAD_OF_KEYS, CHANGE, accepted_record([KEY])]
    for name, value in broken(records):
        for old in tmp_path.iterdir():
            old.unlink()
        assert isinstance(value, list)
        path.write_bytes(_lines(*value))
        try:
            _snapshot(path)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error


def test_what_is_sound_of_a_snapshot_counts_and_stays_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(_lines(HEAD_OF_KEYS, CHANGE) + b"garbage\n" + _lines(accepted_record([KEY])))
    for _ in range(3):
        assert KEY in SnapshotFile(path, "/vipd/v1/", Keys).load().keys
    assert sorted(each.name for each in tmp_path.iterdir()) == ["snapshot", "snapshot.unreadable"]


def test_copies_that_are_kept_aside_have_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "health.json"
    for _ in range(2 * MAX_MOVED_ASIDE):
        path.write_text("garbage")
        RecordFile(path, lambda: 100.0, lambda: 2000.0).load()
    assert len(list(tmp_path.iterdir())) == MAX_MOVED_ASIDE + 1
    assert "not kept aside" in caplog.text


def test_a_store_whose_copy_is_a_pipe_starts(tmp_path: Path) -> None:
    path = tmp_path / "services.yaml"
    path.write_text("garbage: [")
    os.mkfifo(path.with_name("services.yaml.last-good"))
    assert "no good copy" in _store(path)[-1]
    assert parse_declaration(SERVICES, "x").ok


@pytest.mark.root
@pytest.mark.parametrize("what", ["garbage", "directory", "pipe", "huge"])
def test_a_daemon_starts_with_any_state_directory(what: str) -> None:
    with host() as node:
        node.declare("dns.yaml", block("10.96.0.10", "dns", "10.244.0.5"))
        for file in FILES:
            path = node.state_dir / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            PLACED[what](path, file.good)
        node.start()
        node.declare("web.yaml", block("10.96.0.11", "web", "10.244.0.6"))
        node.wait_for(lambda: node.names() == {"dns", "web"})
        status = node.get("status")
        said = json.dumps(status) + node.log()
        for name in ("health.json", "counters.json", "overrides.json", "services.yaml", "dataplane"):
            assert f"{node.state_dir}/{name}" in said, name
        assert "Traceback" not in node.log()
        assert node.end(signal.SIGTERM) == 0
