"""Verdicts that an older version wrote, and what an older version reads."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from vipd.health.checker import HealthChecker
from vipd.health.flapping import Flapping
from vipd.health.record_cache import SavedRecord
from vipd.health.record_file import encode
from vipd.health.result import ReportedWeight
from vipd.health.state import HealthRecord, HealthState
from vipd.model.check import HttpProbe, TcpProbe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

FAST = Timing(interval=0.2, timeout=0.1, rise=2, fall=3)
TARGET = CheckTarget("10.0.0.1", 80, Protocol.TCP, TcpProbe(), Timing())
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


GOOD = HealthRecord(900.0, HealthState.HEALTHY, last_reason="answered in 1 ms")
OK, NOPE, OTHER = (replace(TARGET, probe=HttpProbe(path=path)) for path in ("/ok", "/nope", "/other"))


def test_the_version_before_reads_the_file() -> None:
    """It is put back over a newer one: entries of 13 fields, of which the last at a place counts for it."""
    read = json.loads(encode([known(1000.0, GOOD, OK), known(1000.0, RECORD, NOPE)], 1000.0, 50_000.0))
    assert read["format"] == 1
    assert [len(entry) for entry in read["verdicts"]] == [13, 13]
    assert [entry[4] for entry in read["verdicts"]] == ["unhealthy", "healthy"]


def test_a_check_that_may_be_another_one_than_an_older_version_knew_is_taken_back(tmp_path: Path) -> None:
    file = tmp_path / "health.json"
    nope, ok = (
        CheckTarget("10.0.0.1", 80, Protocol.TCP, HttpProbe(path=path), FAST) for path in ("/nope", "/ok")
    )
    now = time.monotonic()
    bad = SavedRecord.of(nope, ["z"], now, HealthRecord(now, HealthState.UNHEALTHY, last_reason="status 404"))
    whole = json.loads(encode([bad], now, time.time()))
    file.write_text(json.dumps({key: whole[key] for key in ("format", "verdicts")}))
    alone = HealthChecker(file)
    alone.follow("z", [nope])
    assert alone.status(nope).state is HealthState.UNHEALTHY
    both = HealthChecker(file)
    both.follow("z", [nope])
    both.follow("a", [ok])
    assert {both.status(each).state for each in (nope, ok)} == {HealthState.UNKNOWN}


def test_a_healthy_backend_is_not_said_to_be_held_down() -> None:
    """A hold that is over lasts again by the clock if that was set back before a restart."""
    held = Flapping((1.0,), level=1, held_until=40.0)
    record = HealthRecord(0.0, HealthState.HEALTHY, last_reason="answered", flapping=held)
    assert record.reason(30.0) == "answered"
