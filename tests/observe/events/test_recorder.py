"""What repeats itself is told as one, and followers hear of everything else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.observe.events.made import Clock, occurrence, recorder
from vipd.host.systemd.fields import Event, fields
from vipd.observe.events.dedup import MAX_DURATION, MAX_SEPARATE, WINDOW, Deduplicator
from vipd.observe.events.event import MAX_TEXT_LENGTH, EventRecord, decode, encode
from vipd.observe.events.log_handler import recording
from vipd.observe.events.recorder import Recorder, Subscription

log = logging.getLogger("vipd.test_recorder")

REPAIRED = "rules-repaired"


def run_story(story: Callable[[Recorder, Clock], Awaitable[None]], directory: Path) -> None:
    """Run a story beside a recorder."""

    async def run() -> None:
        clock = Clock()
        made = recorder(directory, clock)
        try:
            await story(made, clock)
        finally:
            made.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def is_over(follower: Subscription) -> bool:
    """Whether there is nothing more to read."""
    return follower.finished


def flap(number: int) -> dict[str, Any]:
    """What differs between one change of a flapping backend and the next."""
    return {"reason": "unhealthy: refused" if number % 2 else "healthy: connected", "cause": "check tcp"}


def test_a_flapping_backend_is_a_bounded_number_of_events_that_say_how_often_and_how_it_is_now(
    tmp_path: Path,
) -> None:
    async def story(made: Recorder, clock: Clock) -> None:
        for number in range(1, 18):
            clock.now += 2
            made.record(occurrence(2 * number, services=("web",), backends=("10.0.0.1:80",), **flap(number)))
        made.record(occurrence(40, services=("web",), backends=("10.0.0.2:80",), **flap(1)))
        *mine, other = made.read()
        assert [(one.count, one.reason) for one in mine[-2:]] == [
            (8 - MAX_SEPARATE + 1, "healthy: connected"),
            (9 - MAX_SEPARATE + 1, "unhealthy: refused"),
        ]
        assert (sum(one.count for one in mine), other.count) == (17, 1)
        assert mine[-1].since == occurrence(2 * (2 * MAX_SEPARATE - 1)).at
        assert mine[-1].at == occurrence(34).at

    run_story(story, tmp_path)


def test_news_of_what_repeats_itself_are_paced_and_the_last_is_told_in_the_end(tmp_path: Path) -> None:
    async def story(made: Recorder, clock: Clock) -> None:
        with made.subscribe() as follower:
            for number in range(1000):
                clock.now += 0.001
                made.record(occurrence(number / 1000, REPAIRED, services=("web",), **flap(1)))
            clock.now += 5
            told: list[EventRecord] = []
            while not told or told[-1].count < 1000:
                found = await follower.next(60)
                assert found is not None
                told.append(found)
        assert len(told) <= 4
        assert len({each.group_id for each in told}) == 1
        assert [each.id for each in told] == sorted({each.id for each in told})

    run_story(story, tmp_path)


def test_a_failure_and_the_recovery_from_it_are_two_events(tmp_path: Path) -> None:
    async def story(made: Recorder, clock: Clock) -> None:
        web: dict[str, Any] = {"services": ("web",), "backends": ("10.0.0.1:80",), "cause": "check tcp"}
        made.record(occurrence(0, reason="unhealthy: refused, 3 of 3", level="warning", **web))
        made.record(occurrence(6, reason="healthy: connected in 3 ms", **web))
        made.record(occurrence(20, reason="unhealthy: refused, 3 of 3", level="warning", **web))
        made.record(occurrence(26, reason="healthy: connected in 7 ms", **web))
        assert [(one.count, one.reason.partition(":")[0]) for one in made.read()] == [
            (1, "unhealthy"),
            (1, "healthy"),
            (1, "unhealthy"),
            (1, "healthy"),
        ]

    run_story(story, tmp_path)


def test_only_equal_events_are_told_as_one_but_for_numbers() -> None:
    folds = Deduplicator()
    counts = [
        folds.deduplicate(occurrence(number, REPAIRED, reason=reason)).count
        for number, reason in enumerate(["3 rules of nat", "4 rules of nat", "3 rules of filter"])
    ]
    assert counts == [1, 2, 1]


def test_a_clock_that_is_set_back_holds_nothing_up(tmp_path: Path) -> None:
    async def story(made: Recorder, clock: Clock) -> None:
        with made.subscribe() as follower:
            for back in (0, -86400):
                clock.now += back
                for number in range(100):
                    clock.now += 1
                    made.record(occurrence(back + number, REPAIRED, reason="the same"))
            clock.now += 5
            told: list[EventRecord] = []
            while not told or told[-1].at < occurrence(-86400 + 99).at or told[-1].count < 100:
                found = await follower.next(60)
                assert found is not None
                told.append(found)
            assert all(each.since is None or each.since <= each.at for each in told)
            assert [each.id for each in told] == sorted({each.id for each in told})
        assert [each.count for each in made.read()] == [100, 100]

    run_story(story, tmp_path)


def test_intended_changes_are_told_singly_until_they_are_many() -> None:
    folds = Deduplicator()
    changes = [
        occurrence(n, "service-changed", services=("web",), cause=f"user root (pid {n})") for n in range(20)
    ]
    counts = [folds.deduplicate(replace(each, id=n + 1)).count for n, each in enumerate(changes)]
    assert counts[:MAX_SEPARATE] == [1] * MAX_SEPARATE
    assert counts[MAX_SEPARATE:] == list(range(2, 22 - MAX_SEPARATE))
    by_other = occurrence(20, "service-changed", services=("web",), cause="user alice (pid 7)")
    assert folds.deduplicate(by_other).count == 1


def test_repetition_ends_with_a_pause_and_after_an_hour() -> None:
    folds = Deduplicator()
    assert folds.deduplicate(occurrence(0, REPAIRED)).count == 1
    assert folds.deduplicate(occurrence(WINDOW.total_seconds(), REPAIRED)).count == 2
    assert folds.deduplicate(occurrence(2 * WINDOW.total_seconds() + 1, REPAIRED)).count == 1
    steps = range(200, 200 + int(MAX_DURATION.total_seconds()) + 120, 30)
    assert [n for n in steps if folds.deduplicate(occurrence(n, REPAIRED)).count == 1][1:] == [200 + 3630]


def test_a_follower_that_does_not_read_costs_a_bounded_queue_and_others_nothing(tmp_path: Path) -> None:
    async def story(made: Recorder, clock: Clock) -> None:
        with made.subscribe(Subscription(10)) as idle, made.subscribe() as reader:
            for number in range(2000):
                made.record(occurrence(number, services=(f"s{number}",), reason=str(number)))
                found = await reader.next(60)
                assert found is not None
                assert found.reason == str(number)
            assert idle.overflowed
            assert not is_over(idle)
            assert [(await idle.next(0)) is not None for _ in range(11)] == [True] * 10 + [False]
            assert is_over(idle)
        assert made.subscriptions == 0

    run_story(story, tmp_path)


def test_a_follower_waits_and_is_woken_by_the_end() -> None:
    async def story() -> None:
        follower = Subscription()
        waiting = asyncio.ensure_future(follower.next(60))
        await asyncio.sleep(0)
        follower.end()
        assert await waiting is None
        assert follower.finished

    asyncio.run(story())


def test_the_log_is_where_events_come_from_whatever_its_level(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.level

    async def story() -> None:
        with recording(tmp_path) as made:
            more = fields(
                Event.SERVICE_ADDED, service="dns", unit="cli", cause="user root (pid 1)", reason="1"
            )
            log.info("service dns added", extra=more)
            log.info("not an event")
            log.info("a step on the way", extra=fields(Event.RULES_APPLIED))
            log.error("it is\n\x1b[31mred", extra=fields(Event.APPLY_FAILED))
            log.error("long", extra=fields(Event.APPLY_FAILED, cause="x", reason="y" * 5000))
            await asyncio.to_thread(log.warning, "of a thread", extra=fields(Event.BACKEND_HEALTH))
            added, failed, long, threaded = made.read()
        log.info("after the end", extra=fields(Event.STOPPED))
        assert (added.event, added.services, added.cause, added.reason, added.level) == (
            "service-added",
            ("dns",),
            "user root (pid 1)",
            "1",
            "info",
        )
        assert (failed.reason, failed.level) == (r"it is \x1b[31mred", "error")
        assert len(long.reason) == MAX_TEXT_LENGTH
        assert (threaded.reason, threaded.level) == ("of a thread", "warning")
        assert [decode(encode(each)) for each in (added, failed)] == [
            replace(each, first=each.id, since=each.at) for each in (added, failed)
        ]

    root.setLevel(logging.ERROR)
    try:
        asyncio.run(story())
    finally:
        root.setLevel(before)


@pytest.mark.parametrize("damage", [b"", b"{}", b"null", b'"x"', b"[1]", b"[" * 100_000])
def test_what_is_no_event_is_refused(damage: bytes) -> None:
    with pytest.raises(ValueError, match=r"no event|Expecting"):
        decode(damage)
