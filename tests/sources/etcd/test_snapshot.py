"""The file of the last known state: what it gives back after any end of its writer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.simulated_time import pass_over, simulate
from vipd.host.supervisor import Loop, Supervisor
from vipd.sources.etcd import snapshot_file as etcd_snapshot
from vipd.sources.etcd.snapshot_file import (
    SnapshotFile,
    SnapshotState,
    StoredKey,
    accepted_record,
    change_record,
)

PREFIX = "/vipd/v1/"


class Disk:
    """A snapshot, and the state that it is told of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = SnapshotState("c1", 1)
        self.snapshot = SnapshotFile(path, PREFIX, lambda: self.state)

    def put(self, revision: int, key: str, kept: StoredKey) -> None:
        self.state.keys[key] = kept
        self.state.revision = revision
        self.snapshot.enqueue(change_record("c1", revision, [(key, kept)], ()))

    def delete(self, revision: int, key: str) -> None:
        del self.state.keys[key]
        self.state.revision = revision
        self.snapshot.enqueue(change_record("c1", revision, (), [key]))

    def write(self) -> None:
        """Bring all that is noted to disk."""
        self.snapshot._do(self.snapshot._work())

    def read(self) -> SnapshotState:
        return SnapshotFile(self.path, PREFIX, SnapshotState).load()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "etcd" / "snapshot")


def test_what_is_written_is_read_again(disk: Disk) -> None:
    disk.put(2, "a", StoredKey("bad", 2, "good"))
    disk.write()
    disk.put(3, "b", StoredKey("x\udc80\n\u20ac", 3, None))
    disk.put(4, "c", StoredKey("held", 1, "held", held=True))
    disk.put(5, "d", StoredKey("gone", 5))
    disk.delete(6, "d")
    disk.snapshot.enqueue(accepted_record(["b"]))
    disk.write()
    assert disk.read() == SnapshotState(
        "c1",
        6,
        {
            "a": StoredKey("bad", 2, "good"),
            "b": StoredKey("x\udc80\n\u20ac", 3, "x\udc80\n\u20ac"),
            "c": StoredKey("held", 1, "held", held=True),
        },
    )


def test_cut_anywhere_it_is_a_state_that_was(disk: Disk) -> None:
    """A power cut keeps some first part of what was appended since the last sync, or spoils its end."""
    disk.put(1, "a", StoredKey("first", 1))
    disk.write()
    before = disk.path.stat().st_size
    states = [disk.read()]
    for revision in range(2, 5):
        disk.put(revision, f"k{revision % 3}", StoredKey(f"v{revision}", revision))
        disk.write()
        states.append(disk.read())
    data = disk.path.read_bytes()
    for end, junk in itertools.product(range(before, len(data) + 1, 3), (b"", b"\0" * 40)):
        disk.path.write_bytes(data[:end] + junk)
        assert disk.read() in states


def test_what_follows_a_spoiled_end_is_not_lost(disk: Disk) -> None:
    disk.put(1, "a", StoredKey("first", 1))
    disk.write()
    with disk.path.open("ab") as file:
        file.write(b"0000 half a li")
    again = Disk(disk.path)
    again.state = again.snapshot.load()
    again.put(2, "b", StoredKey("second", 2))
    again.write()
    assert set(again.read().keys) == {"a", "b"}


def test_a_change_costs_its_own_size_and_the_file_does_not_grow_for_ever(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_snapshot, "MIN_REWRITE_BYTES", 1000)
    for n in range(200):
        disk.put(n, f"key{n}", StoredKey("v" * 100, n))
    disk.write()
    size = disk.path.stat().st_size
    disk.put(300, "key5", StoredKey("w" * 100, 300))
    disk.write()
    assert disk.path.stat().st_size - size < 400
    for n in range(400):
        disk.put(n, f"key{n % 200}", StoredKey("v" * 100, n))
        disk.write()
        assert disk.path.stat().st_size < 3 * size
    assert disk.read() == disk.state


def test_another_prefix_or_nonsense_is_nothing(disk: Disk) -> None:
    disk.put(1, "a", StoredKey("first", 1))
    disk.write()
    assert SnapshotFile(disk.path, "/other/", SnapshotState).load() == SnapshotState()
    disk.path.write_bytes(b"\x80nonsense\n")
    assert disk.read() == SnapshotState()
    disk.path.unlink()
    assert disk.read() == SnapshotState()


def test_a_disk_that_takes_nothing_is_told_and_made_good(disk: Disk) -> None:
    disk.path.parent.write_text("in the way")
    disk.put(1, "a", StoredKey("first", 1))
    with pytest.raises(OSError, match=r"snapshot: cannot be written: .*hint"):
        disk.write()
    disk.path.parent.unlink()
    disk.put(2, "b", StoredKey("second", 2))
    disk.write()
    assert set(disk.read().keys) == {"a", "b"}


def test_a_disk_that_takes_nothing_for_a_day_is_said_once_and_tried_now_and_then(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, tried = Supervisor(), 0

    async def at_once(function: Callable[..., object], *arguments: object) -> object:
        nonlocal tried
        tried += 1
        return function(*arguments)

    async def day() -> None:
        running = asyncio.create_task(
            supervisor.run("keeping", Loop(disk.snapshot.run, disk.snapshot.loop_state))
        )
        disk.put(1, "a", StoredKey("first", 1))
        await asyncio.sleep(86_400.0)
        assert "cannot be written" in disk.snapshot.loop_state.fault
        disk.path.parent.unlink()
        await asyncio.sleep(etcd_snapshot.RETRY_SECONDS + 2.0)
        running.cancel()

    disk.path.parent.write_text("in the way")
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    simulate(day())
    assert len(caplog.records) == 1
    assert 1000 < tried < 5000
    assert disk.snapshot.loop_state.fault == ""
    assert disk.read() == disk.state


def test_what_is_accepted_is_on_disk_at_once(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed within the second must not bring an older value back."""

    async def at_once(function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)

    async def scene() -> None:
        running = asyncio.create_task(disk.snapshot.run())
        disk.put(1, "a", StoredKey("first", 1))
        await asyncio.sleep(0.5)
        disk.put(2, "a", StoredKey("second", 2))
        await asyncio.sleep(0.2)  # the services are merged
        disk.snapshot.enqueue(accepted_record(["a"]))
        await asyncio.sleep(0.05)
        assert disk.read().keys["a"].accepted == "second"
        running.cancel()

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    simulate(scene())


def test_a_slow_disk_gets_rests(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that come without end take it for a fifth of the time."""
    writes: list[float] = []

    async def slowly(function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)
        writes.append(asyncio.get_running_loop().time())
        pass_over(0.1)

    async def scene() -> None:
        running = asyncio.create_task(disk.snapshot.run())
        for revision in range(1, 1001):
            disk.put(revision, "a", StoredKey(str(revision), revision))
            await asyncio.sleep(0.01)
        running.cancel()

    monkeypatch.setattr(asyncio, "to_thread", slowly)
    simulate(scene())
    pauses = [after - before for before, after in itertools.pairwise(writes)]
    assert 0.49 < min(pauses) < max(pauses) < 0.55


def test_the_rest_is_written_at_the_end(disk: Disk) -> None:
    async def scene(act: Callable[[], None]) -> None:
        task = asyncio.create_task(disk.snapshot.run())
        await asyncio.sleep(0)
        act()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        disk.snapshot.close()

    asyncio.run(scene(lambda: disk.put(1, "a", StoredKey("first", 1))))
    assert set(disk.read().keys) == {"a"}


def test_a_late_thread_undoes_nothing(disk: Disk) -> None:
    disk.put(1, "a", StoredKey("first", 1))
    disk.write()
    disk.put(2, "a", StoredKey("second", 2))
    late = disk.snapshot._work()
    disk.put(3, "a", StoredKey("third", 3))
    disk.write()
    disk.snapshot._do(late)
    assert disk.read().keys["a"].value == "third"


@pytest.mark.parametrize("more", [True, False])
def test_stopped_in_the_midst_of_a_write_it_still_writes_all(
    more: bool, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread never gets to its turn, as when all of them are busy."""
    monkeypatch.setattr(etcd_snapshot, "WRITE_DELAY_SECONDS", 0.0)
    disk.put(1, "a", StoredKey("first", 1))
    disk.write()

    async def never(function: object, *arguments: object) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        task = asyncio.create_task(disk.snapshot.run())
        disk.put(2, "b", StoredKey("second", 2))
        await asyncio.sleep(0.05)
        if more:
            disk.put(3, "c", StoredKey("third", 3))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        disk.snapshot.close()

    monkeypatch.setattr(asyncio, "to_thread", never)
    asyncio.run(scene())
    assert disk.read() == disk.state
