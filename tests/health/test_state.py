"""Verdicts follow rows of answers: never sooner, never later, and coming back may be held."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vipd.health.flapping import (
    FLAPPING_CHANGES,
    MAX_HOLD_SECONDS,
    NOT_FLAPPING,
    Flapping,
    hold_seconds,
    window,
)
from vipd.health.result import ProbeResult, ReportedWeight
from vipd.health.state import HealthRecord, HealthState, apply_result, reset_streak
from vipd.model.check import InitialHealth, Timing

GOOD = ProbeResult.success(0.003)
BAD = ProbeResult.failure("connection refused")
UNASKED = ProbeResult.not_probed("too many open files")
TIMING = Timing(interval=5.0, rise=2, fall=3)

timings = st.builds(
    Timing,
    interval=st.sampled_from((0.1, 1.0, 5.0, 60.0)),
    rise=st.integers(1, 5),
    fall=st.integers(1, 5),
    start=st.sampled_from(InitialHealth),
)
answers = st.lists(st.sampled_from((GOOD, BAD, UNASKED)), max_size=120)
alternations = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60).map(
    lambda rows: [GOOD if good else BAD for good, length in rows for _ in range(length)]
)


def record_after(
    results: list[ProbeResult], timing: Timing = TIMING, record: HealthRecord | None = None
) -> HealthRecord:
    """The record after these answers, one an interval."""
    record, now = record or HealthRecord(0.0), 0.0
    for result in results:
        now += timing.interval
        record = apply_result(record, result, timing, now)
    return record


@given(timings, answers | alternations)
def test_a_verdict_changes_only_after_enough_answers_in_a_row(
    timing: Timing, results: list[ProbeResult]
) -> None:
    record, row = HealthRecord(0.0), []
    for number, result in enumerate(results):
        before, record = record, apply_result(record, result, timing, number * timing.interval)
        row += [result.good] if result.good is not None else []
        if before.state == record.state:
            continue
        needed = timing.rise if record.state is HealthState.HEALTHY else timing.fall
        assert row[-needed:] == [record.state is HealthState.HEALTHY] * needed
        assert len(row) >= needed


@given(timings, answers | alternations)
def test_going_down_takes_fall_bad_answers_and_never_more(timing: Timing, results: list[ProbeResult]) -> None:
    """Whatever was before, flapping included."""
    record = record_after([*results, *[BAD] * timing.fall], timing)
    assert record.state is HealthState.UNHEALTHY
    assert not record.counts_healthy(timing.start)


@given(timings, answers | alternations)
def test_who_answers_well_comes_back_within_the_longest_hold(
    timing: Timing, results: list[ProbeResult]
) -> None:
    record = record_after(results, timing)
    now = len(results) * timing.interval + max(
        MAX_HOLD_SECONDS, (timing.rise + timing.fall) * timing.interval
    )
    for _ in range(timing.rise):
        record = apply_result(record, GOOD, timing, now)
    assert record.state is HealthState.HEALTHY


@given(timings, answers)
def test_not_being_able_to_ask_changes_no_verdict_and_breaks_no_row(
    timing: Timing, results: list[ProbeResult]
) -> None:
    asked = [result for result in results if result.good is not None]
    one, other = HealthRecord(0.0), HealthRecord(0.0)
    for now, result in enumerate(asked):
        one = apply_result(one, result, timing, now)
        other = apply_result(apply_result(other, UNASKED, timing, now), result, timing, now)
    assert one == other
    assert apply_result(one, UNASKED, timing, 1e6).state == one.state


def test_reasons_count_the_row() -> None:
    reasons = []
    record = record_after([GOOD, GOOD])
    for result in (BAD, BAD, BAD, BAD, GOOD, GOOD, GOOD):
        record = apply_result(record, result, TIMING, 100.0)
        reasons.append(record.reason(100.0))
    assert reasons == [
        "connection refused, 1 of 3",
        "connection refused, 2 of 3",
        "connection refused, 3 of 3",
        "connection refused, 3 of 3",
        "answered in 3.0 ms, 1 of 2",
        "answered in 3.0 ms",
        "answered in 3.0 ms",
    ]


def test_what_keeps_from_asking_is_told_until_an_answer_comes() -> None:
    record = record_after([GOOD, GOOD, UNASKED])
    assert record.reason(20.0) == "cannot be asked: too many open files; answered in 3.0 ms"
    assert record.state is HealthState.HEALTHY
    assert "cannot" not in apply_result(record, GOOD, TIMING, 20.0).reason(20.0)


def test_until_the_first_verdict_the_check_says_what_it_counts_as() -> None:
    record = record_after([BAD, GOOD, BAD])
    assert record.state is HealthState.UNKNOWN
    assert str(record.state) == "unknown", "the word of the API"
    assert record.counts_healthy(InitialHealth.HEALTHY)
    assert not record.counts_healthy(InitialHealth.UNHEALTHY)
    assert record_after([GOOD, GOOD]).counts_healthy(InitialHealth.UNHEALTHY)


def test_the_first_verdict_is_no_change() -> None:
    for record in (record_after([GOOD] * 2), record_after([BAD] * 3)):
        assert (record.changes, record.flapping) == (0, NOT_FLAPPING)
    assert record_after([BAD] * 3 + [GOOD] * 2 + [BAD] * 3).changes == 2


def test_slow_start_begins_when_it_serves_having_not_served() -> None:
    assert record_after([GOOD] * 2).serves_since is None
    assert record_after([BAD] * 3 + [GOOD] * 2).serves_since == 25.0
    assert record_after([BAD] * 3 + [GOOD] * 2 + [BAD] * 3).serves_since is None
    waiting = replace(TIMING, start=InitialHealth.UNHEALTHY)
    assert record_after([GOOD] * 2, waiting).serves_since == 10.0


def test_the_said_weight_is_that_of_the_last_good_answer() -> None:
    half = ReportedWeight(50, percent=True)
    record = record_after([ProbeResult.success(0.1, half), BAD, UNASKED])
    assert record.weight == half
    assert apply_result(record, GOOD, TIMING, 20.0).weight is None


def test_another_check_keeps_the_verdict_and_begins_to_count_anew() -> None:
    record = reset_streak(record_after([GOOD, GOOD, BAD, BAD]), "another check")
    assert record.state is HealthState.HEALTHY
    record = record_after([BAD, BAD], record=record)
    assert record.state is HealthState.HEALTHY
    assert apply_result(record, BAD, TIMING, 30.0).state is HealthState.UNHEALTHY


class Flapper:
    """A backend that goes down and up as fast as it can."""

    def __init__(self, timing: Timing) -> None:
        self.timing, self.record, self.now = timing, HealthRecord(0.0), 0.0
        self.until(HealthState.HEALTHY, GOOD)

    def until(self, state: HealthState, result: ProbeResult) -> float:
        """Give one answer until it has that state; the seconds that took."""
        began = self.now
        while self.record.state is not state:
            self.now += self.timing.interval
            self.record = apply_result(self.record, result, self.timing, self.now)
        return self.now - began

    def cycle(self) -> float:
        """Down and up; the seconds it was kept down."""
        self.until(HealthState.UNHEALTHY, BAD)
        return self.until(HealthState.HEALTHY, GOOD)


def test_a_flapping_backend_is_held_down_longer_each_time() -> None:
    flapper = Flapper(TIMING)
    kept = [flapper.cycle() for _ in range(10)]
    usual = TIMING.rise * TIMING.interval
    free = FLAPPING_CHANGES // 2
    assert kept[: free - 1] == [usual] * (free - 1)
    held = [seconds for seconds in kept if seconds > usual]
    assert held[:4] == [25.0, 50.0, 100.0, 200.0]
    assert max(kept) == MAX_HOLD_SECONDS
    assert kept[-2:] == [MAX_HOLD_SECONDS] * 2


def test_the_hold_is_told_and_going_down_is_not_delayed() -> None:
    flapper = Flapper(TIMING)
    while not flapper.record.flapping.level:
        flapper.cycle()
    assert flapper.until(HealthState.UNHEALTHY, BAD) == TIMING.fall * TIMING.interval
    flapper.now += 10.0
    record = apply_result(flapper.record, GOOD, TIMING, flapper.now)
    changes = len(record.flapping.changes)
    span = flapper.now - record.flapping.changes[0]
    left = hold_seconds(2, TIMING) - 10.0
    wanted = f"flapping: {changes} changes in {span:.0f} s, held down for {left:.0f} s; "
    assert record.reason(flapper.now) == f"{wanted}answered in 3.0 ms, 1 of 2"
    assert changes >= FLAPPING_CHANGES


def test_a_healthy_backend_is_not_said_to_be_held_down() -> None:
    """A hold that is over lasts again by the clock if that was set back before a restart."""
    held = Flapping((1.0,), level=1, held_until=40.0)
    assert (
        HealthRecord(0.0, HealthState.HEALTHY, last_reason="answered", flapping=held).reason(30.0)
        == "answered"
    )


def test_after_quiet_time_it_comes_back_as_fast_as_any() -> None:
    flapper = Flapper(TIMING)
    for _ in range(6):
        flapper.cycle()
    level = flapper.record.flapping.level
    assert level > 1
    flapper.now += window(TIMING)
    one_less = flapper.cycle()
    assert one_less == hold_seconds(level, TIMING)
    flapper.now += (level + 2) * window(TIMING)
    assert flapper.cycle() == TIMING.rise * TIMING.interval


def test_slow_changes_are_no_flapping() -> None:
    flapper = Flapper(TIMING)
    for _ in range(30):
        flapper.now += window(TIMING) / 2
        assert flapper.cycle() == TIMING.rise * TIMING.interval
