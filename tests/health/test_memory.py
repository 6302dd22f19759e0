"""Verdicts outlive a restart, for a while."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.health.servers import PATIENCE, run, until
from vipd.health.checker import HealthChecker
from vipd.health.flapping import NOT_FLAPPING, Flapping
from vipd.health.record_cache import MAX_AGE_SECONDS, RecordCache, SavedRecord, check_id
from vipd.health.record_file import MIN_SAVE_INTERVAL_SECONDS, RecordFile, decode, encode, load
from vipd.health.result import ReportedWeight
from vipd.health.state import HealthRecord, HealthState
from vipd.health.weights import WeightInputs, weights
from vipd.model.check import HttpProbe, TcpProbe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

TARGET = CheckTarget("10.0.0.1", 80, Protocol.TCP, TcpProbe(), Timing())
PLACE = ("10.0.0.1", 80, "tcp")
RECORD = HealthRecord(
    900.0,
    HealthState.UNHEALTHY,
    last_reason="timeout after 2 s, 3 of 3",
    changes=7,
    weight=ReportedWeight(50, True),
    flapping=Flapping((800.0, 900.0), 2, 1100.0),
)


def known(at: float = 1000.0, record: HealthRecord = RECORD, of: CheckTarget = TARGET) -> SavedRecord:
    return SavedRecord.of(of, ["web"], at, record)


def as_older_version(data: bytes) -> bytes:
    """The file as one wrote it that kept one verdict for all checks of a place."""
    whole = json.loads(data)
    del whole["checks"]
    return json.dumps(whole).encode()


def test_what_is_written_is_read_by_another_clock() -> None:
    data = encode([known()], now=1000.0, wall=50_000.0)
    (found,) = decode(data, now=20.0, wall=50_030.0)
    assert (found.place, found.at) == (PLACE, -10.0)
    assert (found.check, found.services) == (check_id(TARGET), ("web",))
    assert found.record == HealthRecord(
        -110.0,
        HealthState.UNHEALTHY,
        last_reason=RECORD.last_reason,
        changes=7,
        weight=RECORD.weight,
        flapping=Flapping((-210.0, -110.0), 2, 90.0),
    )


@pytest.mark.parametrize("wall", [50_000.0 + MAX_AGE_SECONDS + 1, 49_000.0])
def test_nothing_is_trusted_that_is_old_or_from_the_future(wall: float) -> None:
    data = encode([known()], now=1000.0, wall=50_000.0)
    assert decode(data, now=1000.0, wall=wall) == []


def test_each_verdict_has_its_own_age() -> None:
    data = encode([known(500.0), known(999.0)], now=1000.0, wall=50_000.0)
    assert len(decode(data, now=0.0, wall=50_000.0 + MAX_AGE_SECONDS - 100)) == 1


@given(st.binary(max_size=200))
def test_what_is_not_ours_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json has its own subclass)
        decode(data, 0.0, 0.0)


@given(st.data())
def test_no_damage_does_worse_than_being_refused(data: st.DataObject) -> None:
    whole = json.loads(encode([known()], now=1000.0, wall=50_000.0))
    junk = data.draw(
        st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
    )
    entry = whole[data.draw(st.sampled_from(["verdicts", "checks"]))][0]
    entry[data.draw(st.integers(0, len(entry) - 1))] = junk
    try:
        read = decode(json.dumps(whole).encode(), 1000.0, 50_001.0)
    except ValueError:
        return
    for each in read:
        each.record.reason(1000.0)
        datetime.fromtimestamp(each.record.since + 49_000.0, UTC)


def test_a_damaged_file_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "health.json").write_bytes(b'{"format": 1, "verd')
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path / "health.json", 0.0, 0.0) == []
    assert "cannot be used" in caplog.text
    caplog.clear()
    assert load(tmp_path / "none.json", 0.0, 0.0) == []
    assert caplog.text == ""


def test_saving_fails_with_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = RecordFile(tmp_path / "gone" / "health.json", lambda: 1000.0, lambda: 50_000.0)
    for _ in range(3):
        saved.save(lambda: [known()])
    assert len(caplog.records) == 1
    assert saved.due
    (tmp_path / "gone").mkdir()
    saved.save(lambda: [known()])
    assert [path.name for path in (tmp_path / "gone").iterdir()] == ["health.json"]
    assert len(saved.load()) == 1
    assert not saved.due


def test_a_target_that_left_is_remembered_for_a_while() -> None:
    memory = RecordCache()
    memory.put(TARGET, ["web"], RECORD, 1000.0)
    assert memory.take(TARGET, "web", [TARGET], 1001.0 + MAX_AGE_SECONDS) is None
    assert memory.take(TARGET, "other", [TARGET], 1000.0 + MAX_AGE_SECONDS) == RECORD
    memory.put(TARGET, ["web"], RECORD, 1000.0)
    memory.expire(1001.0 + MAX_AGE_SECONDS)
    assert list(memory.records()) == []
    assert not memory._of


def test_without_a_verdict_there_is_nothing_to_remember() -> None:
    memory = RecordCache()
    memory.put(TARGET, ["web"], HealthRecord(0.0), 0.0)
    assert memory.take(TARGET, "web", [TARGET], 0.0) is None


GOOD = HealthRecord(900.0, HealthState.HEALTHY, last_reason="answered in 1 ms")
OK, NOPE, OTHER = (replace(TARGET, probe=HttpProbe(path=path)) for path in ("/ok", "/nope", "/other"))


@pytest.mark.parametrize("order", [(OK, NOPE), (NOPE, OK)])
def test_two_checks_of_one_backend_have_a_verdict_each(order: tuple[CheckTarget, CheckTarget]) -> None:
    """In whatever order they are written, and read."""
    records = {OK: GOOD, NOPE: RECORD}
    data = encode([known(1000.0, records[each], each) for each in order], 1000.0, 50_000.0)
    for asked in (order, order[::-1]):
        memory = RecordCache()
        for each in decode(data, 1000.0, 50_000.0):
            memory.add(each)
        found = {each: memory.take(each, "any", [each], 1000.0) for each in asked}
        assert {each: record and record.state for each, record in found.items()} == {
            OK: HealthState.HEALTHY,
            NOPE: HealthState.UNHEALTHY,
        }


def test_a_check_takes_over_what_the_one_before_it_found_in_its_service_alone() -> None:
    memory = RecordCache()
    memory.add(SavedRecord.of(NOPE, ["shop"], 1000.0, RECORD))
    assert memory.take(OTHER, "web", [OTHER], 1000.0) is None
    assert memory.take(OTHER, "shop", [OTHER, NOPE], 1000.0) is None
    assert memory.take(OTHER, "shop", [OTHER], 1000.0) == RECORD
    memory.add(SavedRecord.of(OK, ["shop"], 1000.0, GOOD))
    assert memory.take(OTHER, "shop", [OTHER], 1000.0) is None, "of two it is not known which one it replaces"


def test_what_an_older_version_wrote_counts_where_one_check_alone_can_have_found_it() -> None:
    data = as_older_version(encode([known(of=NOPE)], 1000.0, 50_000.0))
    doubted: list[CheckTarget] = []
    memory = RecordCache(doubted.append)
    for each in decode(data, 1000.0, 50_000.0):
        memory.add(each)
    slower = replace(NOPE, timing=Timing(interval=9.0))
    for asks_alike in (NOPE, slower):
        found = memory.take(asks_alike, "shop", [asks_alike], 1000.0)
        assert found is not None
        assert found.state is HealthState.UNHEALTHY
    assert memory.take(OK, "web", [OK], 1000.0) is None
    assert doubted == [NOPE, slower]
    assert memory.take(NOPE, "shop", [NOPE], 1000.0) is None


def test_the_version_before_reads_the_file() -> None:
    """It is put back over a newer one: entries of 13 fields, of which the last at a place counts for it."""
    read = json.loads(encode([known(1000.0, GOOD, OK), known(1000.0, RECORD, NOPE)], 1000.0, 50_000.0))
    assert read["format"] == 1
    assert [len(entry) for entry in read["verdicts"]] == [13, 13]
    assert [entry[4] for entry in read["verdicts"]] == ["unhealthy", "healthy"]


def saved_in(path: Path) -> list[HealthState]:
    return [each.record.state for each in load(path, time.monotonic(), time.time())] if path.exists() else []


def test_a_bad_verdict_is_written_at_once(tmp_path: Path) -> None:
    """Also while every thread that others use hangs."""
    file = tmp_path / "health.json"

    async def story() -> None:
        release = threading.Event()
        loop = asyncio.get_running_loop()
        busy = ThreadPoolExecutor(1)
        loop.set_default_executor(busy)
        loop.run_in_executor(None, release.wait)
        saved = RecordFile(file, time.monotonic, time.time)
        record = replace(RECORD, since=time.monotonic(), flapping=NOT_FLAPPING)
        task = asyncio.create_task(saved.run(lambda: lambda: [known(time.monotonic(), record)], PATIENCE))
        await asyncio.sleep(0.05)
        saved.mark_changed(bad=False)
        assert saved.due
        await asyncio.sleep(0.2)
        assert not file.exists(), "what is not urgent waits"
        saved.mark_changed(bad=True)
        await until(lambda: saved_in(file) == [HealthState.UNHEALTHY])
        release.set()
        task.cancel()

    run(story())


def test_ten_thousand_bad_verdicts_are_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    count = 0
    monkeypatch.setattr(
        "vipd.health.record_file.save", lambda path, data: written.append(len(decode_all(data)))
    )

    def decode_all(data: bytes) -> list[SavedRecord]:
        return decode(data, time.monotonic(), time.time())

    async def story() -> float:
        nonlocal count
        saved = RecordFile(tmp_path / "health.json", time.monotonic, time.time)
        record = replace(RECORD, since=time.monotonic(), flapping=NOT_FLAPPING)

        def now_known() -> list[SavedRecord]:
            return [
                known(time.monotonic(), record, replace(TARGET, port=n + 1)) for n in range(min(count, 50))
            ]

        task = asyncio.create_task(saved.run(lambda: now_known, PATIENCE))
        began = time.monotonic()
        for _ in range(10_000):
            count += 1
            saved.mark_changed(bad=True)
            await asyncio.sleep(0)
        await until(lambda: written[-1:] == [50])  # not while the last one is being written
        task.cancel()
        return time.monotonic() - began

    took = run(story())
    assert 1 <= len(written) <= 2 + took / MIN_SAVE_INTERVAL_SECONDS
    assert written[-1] == 50


def test_a_save_that_hangs_is_told_and_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr("vipd.health.record_file.save", lambda path, data: release.wait(PATIENCE))
    monkeypatch.setattr("vipd.health.record_file.HANGS_SECONDS", 0.1)
    monkeypatch.setattr("vipd.health.record_file.LAST_SECONDS", 0.1)

    async def story() -> None:
        saved = RecordFile(tmp_path / "health.json", time.monotonic, time.time)
        task = asyncio.create_task(saved.run(lambda: list, PATIENCE))
        await asyncio.sleep(0)
        saved.mark_changed(bad=True)
        await until(lambda: bool(saved.fault))
        assert "the disk has not answered" in saved.fault
        task.cancel()
        saved.save(list)
        release.set()

    run(story())


def test_a_slow_start_goes_on_over_a_restart(tmp_path: Path) -> None:
    """Begun 40 of its 60 seconds ago, by a clock that began anew."""
    back = HealthRecord(970.0, HealthState.HEALTHY, changes=2, serves_since=970.0)
    file = tmp_path / "health.json"
    file.write_bytes(encode([known(record=back)], now=1000.0, wall=50_000.0))
    later = HealthChecker(file, clock=lambda: 20.0, wall=lambda: 50_010.0)
    later.follow("web", [TARGET])
    since = later.status(TARGET).serves_since
    assert since == -20.0
    assert weights([WeightInputs(100, None, since)], 60, 20.0) == ((70,), 22.0)
