"""The ring on disk: bounded, and whole after any crash."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.observe.events.made import Clock, occurrence, recorder
from vipd.observe.events.event import EventRecord
from vipd.observe.events.event_log import CURRENT, OLDER, EventLog

SEGMENT = 64 << 10


def kept(directory: Path) -> list[EventRecord]:
    """What a daemon that starts now finds there."""

    async def read() -> list[EventRecord]:
        found = recorder(directory)
        try:
            return found.read()
        finally:
            found.close()

    return asyncio.run(read())


def record(directory: Path, *occurrences: EventRecord, clock: Clock | None = None) -> None:
    """Record as one life of a daemon."""

    async def live() -> None:
        made = recorder(directory, clock, SEGMENT)
        for each in occurrences:
            made.record(each)
        made.close()

    asyncio.run(live())


def numbered(number: int) -> EventRecord:
    return occurrence(number, services=(f"s{number}",), unit="file:/a.yaml", reason=f"number {number}")


def test_twenty_thousand_events_stay_within_the_bound_and_the_newest_are_kept(tmp_path: Path) -> None:
    record(tmp_path, *map(numbered, range(20_000)))
    sizes = [(tmp_path / name).stat().st_size for name in (CURRENT, OLDER)]
    assert all(size <= SEGMENT for size in sizes)
    assert {path.name for path in tmp_path.iterdir()} == {CURRENT, OLDER}
    reasons = [each.reason for each in kept(tmp_path)]
    assert len(reasons) > SEGMENT // 500
    assert reasons == [f"number {n}" for n in range(20_000 - len(reasons), 20_000)]


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ({"unit": "file:/a.yaml", "cause": "file /a.yaml:{}"}, {"unit": "file:/b.yaml"}),
        ({"unit": "etcd:/vipd/v1/services/a/s{}"}, {"unit": "etcd:/vipd/v1/services/b/s"}),
        ({"unit": "cli", "cause": "user ann (pid {})"}, {"unit": "cli", "cause": "user bob (pid 7)"}),
    ],
)
def test_however_many_events_one_author_causes_the_newest_of_another_stay(
    mine: dict[str, str], others: dict[str, str], tmp_path: Path
) -> None:
    few = [occurrence(n, services=("b",), reason=f"few {n}", **others) for n in range(3)]
    flood = [
        occurrence(
            3 + n, services=(f"a{n}",), reason=f"flood {n}", **{k: v.format(n) for k, v in mine.items()}
        )
        for n in range(5000)
    ]
    record(tmp_path, *few, *flood)
    reasons = [each.reason for each in kept(tmp_path)]
    assert reasons[:3] == ["few 0", "few 1", "few 2"]
    assert reasons[-1] == "flood 4999"
    assert len(reasons) > SEGMENT // 500


def test_a_torn_last_line_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    record(tmp_path, numbered(1), numbered(2))
    path = tmp_path / CURRENT
    os.truncate(path, path.stat().st_size - 7)
    assert [each.reason for each in kept(tmp_path)] == ["number 1"]
    record(tmp_path, numbered(3))
    assert [each.reason for each in kept(tmp_path)] == ["number 1", "number 3"]


@pytest.mark.parametrize(
    "rubbish", [b"\0" * 4096, b'{"id": 5}\n', b"[]\n", b"\xff\xfe\n", b'{"id": "x', b"7\n"]
)
def test_rubbish_between_is_left_out(rubbish: bytes, tmp_path: Path) -> None:
    record(tmp_path, numbered(1))
    with (tmp_path / CURRENT).open("ab") as file:
        file.write(rubbish)
    record(tmp_path, numbered(2))
    assert [each.reason for each in kept(tmp_path)] == ["number 1", "number 2"]


def test_ids_grow_over_restarts_also_when_the_clock_goes_back_or_the_ring_is_lost(tmp_path: Path) -> None:
    clock = Clock()
    record(tmp_path, numbered(1), numbered(2), clock=clock)
    clock.now -= 3600
    record(tmp_path, numbered(3), clock=clock)
    ids = [each.id for each in kept(tmp_path)]
    assert ids == sorted(set(ids))
    assert len(ids) == 3
    for name in (CURRENT, OLDER):
        (tmp_path / name).unlink(missing_ok=True)
    clock.now += 7200
    record(tmp_path, numbered(4), clock=clock)
    assert kept(tmp_path)[0].id > ids[-1]


def test_a_disk_that_takes_nothing_is_told_once_and_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        made = recorder(tmp_path / "later")
        made.record(numbered(1))
        made.record(numbered(2))
        await asyncio.sleep(0)
        (tmp_path / "later").mkdir()
        made.record(numbered(3))
        made.close()

    asyncio.run(live())
    assert len(caplog.messages) == 1
    assert "events cannot be kept" in caplog.messages[0]
    assert [each.reason for each in kept(tmp_path / "later")] == ["number 3"]


def test_a_line_that_found_no_room_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = EventLog(tmp_path)
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:4]))
    with pytest.raises(OSError, match="only 4 of"):
        ring.append(b'{"torn": 1}\n')
    monkeypatch.undo()
    ring.append(b"whole\n")
    ring.close()
    assert ring.data().split(b"\n") == [b"", b'{"to', b"whole", b""]
