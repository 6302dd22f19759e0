"""Verdicts outlive a restart, for a while."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipd.checks import TcpProbe, Timing
from vipd.health.flapping import Flapping
from vipd.health.memory import TRUSTED_SECONDS, Memory, SavedVerdicts, decode, encode, load
from vipd.health.result import SaidWeight
from vipd.health.state import Record, State
from vipd.health.targets import Target
from vipd.model import Protocol

TARGET = Target("10.0.0.1", 80, Protocol.TCP, TcpProbe(), Timing())
PLACE = ("10.0.0.1", 80, "tcp")
RECORD = Record(
    900.0,
    State.UNHEALTHY,
    last="timeout after 2 s, 3 of 3",
    changes=7,
    weight=SaidWeight(50, True),
    flapping=Flapping((800.0, 900.0), 2, 1100.0),
)


def test_what_is_written_is_read_by_another_clock() -> None:
    data = encode([(PLACE, 1000.0, RECORD)], now=1000.0, wall=50_000.0)
    ((place, at, record),) = decode(data, now=20.0, wall=50_030.0)
    assert (place, at) == (PLACE, -10.0)
    assert record == Record(
        -110.0,
        State.UNHEALTHY,
        last=RECORD.last,
        changes=7,
        weight=RECORD.weight,
        flapping=Flapping((-210.0, -110.0), 2, 90.0),
    )


@pytest.mark.parametrize("wall", [50_000.0 + TRUSTED_SECONDS + 1, 49_000.0])
def test_nothing_is_trusted_that_is_old_or_from_the_future(wall: float) -> None:
    data = encode([(PLACE, 1000.0, RECORD)], now=1000.0, wall=50_000.0)
    assert decode(data, now=1000.0, wall=wall) == []


def test_each_verdict_has_its_own_age() -> None:
    data = encode([(PLACE, 500.0, RECORD), (PLACE, 999.0, RECORD)], now=1000.0, wall=50_000.0)
    assert len(decode(data, now=0.0, wall=50_000.0 + TRUSTED_SECONDS - 100)) == 1


@given(st.binary(max_size=200))
def test_what_is_not_ours_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json has its own subclass)
        decode(data, 0.0, 0.0)


@given(st.data())
def test_no_damage_does_worse_than_being_refused(data: st.DataObject) -> None:
    whole = json.loads(encode([(PLACE, 1000.0, RECORD)], now=1000.0, wall=50_000.0))
    junk = data.draw(
        st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
    )
    entry = whole["verdicts"][0]
    entry[data.draw(st.integers(0, len(entry) - 1))] = junk
    try:
        known = decode(json.dumps(whole).encode(), 1000.0, 50_001.0)
    except ValueError:
        return
    for _, _, record in known:
        record.reason(1000.0)
        datetime.fromtimestamp(record.since + 49_000.0, UTC)


def test_a_damaged_file_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "health.json").write_bytes(b'{"format": 1, "verd')
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path / "health.json", 0.0, 0.0) == []
    assert "cannot be used" in caplog.text
    caplog.clear()
    assert load(tmp_path / "none.json", 0.0, 0.0) == []
    assert caplog.text == ""


def test_saving_fails_with_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = SavedVerdicts(tmp_path / "gone" / "health.json", lambda: 1000.0, lambda: 50_000.0)
    for _ in range(3):
        saved.save([(PLACE, 1000.0, RECORD)])
    assert len(caplog.records) == 1
    assert saved.due
    (tmp_path / "gone").mkdir()
    saved.save([(PLACE, 1000.0, RECORD)])
    assert [path.name for path in (tmp_path / "gone").iterdir()] == ["health.json"]
    assert len(saved.load()) == 1
    assert not saved.due


def test_a_target_that_left_is_remembered_for_a_while() -> None:
    memory = Memory()
    memory.remember(TARGET, RECORD, 1000.0)
    assert memory.recall(TARGET, 1000.0 + TRUSTED_SECONDS) == RECORD
    assert memory.recall(TARGET, 1001.0 + TRUSTED_SECONDS) is None
    memory.tidy(1001.0 + TRUSTED_SECONDS)
    assert list(memory.known()) == []


def test_without_a_verdict_there_is_nothing_to_remember() -> None:
    memory = Memory()
    memory.remember(TARGET, Record(0.0), 0.0)
    assert memory.recall(TARGET, 0.0) is None
