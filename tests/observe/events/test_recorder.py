"""What repeats itself is one event, and what is kept on disk is bounded, fair to authors, and whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.lab.cached import cached
from vipd.observe.events.dedup import Deduplicator
from vipd.observe.events.event import EventRecord
from vipd.observe.events.event_log import EventLog
from vipd.observe.events.recorder import Recorder
from vipd.sources.cache import Cache

START = datetime(2026, 1, 1, tzinfo=UTC)
LARGEST = 64 << 10
SEPARATE = 5
"""So many equal events of a kind that somebody intends, or that changes a state, are told singly."""
WEB: dict[str, Any] = {"services": ("web",), "backends": ("10.0.0.1:80",), "cause": "check tcp"}


class Clock:
    """Seconds since 1970 that pass when a test says so."""

    def __init__(self) -> None:
        self.now = START.timestamp()

    def __call__(self) -> float:
        return self.now


def event(second: float = 0, kind: str = "backend-health", **more: Any) -> EventRecord:
    """An event so many seconds after the start."""
    return EventRecord(id=0, at=START + timedelta(seconds=second), event=kind, **more)


def recording(
    directory: Path, story: Callable[[Recorder, Clock], Awaitable[None]], clock: Clock | None = None
) -> None:
    """One life of a daemon."""
    clock = clock or Clock()

    async def live() -> None:
        cache = Cache(directory / "cache.db")
        recorder = Recorder(EventLog(cache, LARGEST), asyncio.get_running_loop(), clock)
        try:
            await story(recorder, clock)
        finally:
            recorder.close()
            cache.close()

    asyncio.run(asyncio.wait_for(live(), 120))


def record(directory: Path, *events: EventRecord, clock: Clock | None = None) -> None:
    async def story(recorder: Recorder, _: Clock) -> None:
        for one in events:
            recorder.record(one)

    recording(directory, story, clock)


def kept(directory: Path) -> list[EventRecord]:
    """What a daemon that starts now has."""
    events: list[EventRecord] = []

    async def story(recorder: Recorder, _: Clock) -> None:
        events.extend(recorder.read())

    recording(directory, story)
    return events


def reasons(directory: Path) -> list[str]:
    return [one.reason for one in kept(directory)]


def numbered(number: int) -> EventRecord:
    return event(number, services=(f"s{number}",), unit="file:/a.yaml", reason=f"number {number}")


def counts(*events: EventRecord) -> list[int]:
    """How many events each stands for, as it is told."""
    deduplicator = Deduplicator()
    return [deduplicator.deduplicate(replace(one, id=n + 1)).count for n, one in enumerate(events)]


REPAIRED = "rules-repaired"
HOUR = range(200, 200 + 3720, 30)
REPEATED = {
    "a failure and the recovery from it are two events each time": (
        [
            event(n, reason=f"{'un' * (n % 2)}healthy: {n} of 3", level=("info", "warning")[n % 2], **WEB)
            for n in range(4)
        ],
        [1, 1, 1, 1],
    ),
    "only numbers may differ": (
        [event(n, REPAIRED, reason=r) for n, r in enumerate(["3 of nat", "4 of nat", "3 of filter"])],
        [1, 2, 1],
    ),
    "intended changes are told singly until they are many, whatever the pid": (
        [event(n, "service-changed", services=("web",), cause=f"user root (pid {n})") for n in range(8)],
        [1] * SEPARATE + [2, 3, 4],
    ),
    "those of another user are others": (
        [
            *(event(n, "service-changed", cause="user root (pid 1)") for n in range(SEPARATE + 1)),
            event(9, "service-changed", cause="user ann (pid 1)"),
        ],
        [1] * SEPARATE + [2, 1],
    ),
    "a repetition ends with a pause of more than a minute": (
        [event(n, REPAIRED) for n in (0, 60, 121)],
        [1, 2, 1],
    ),
    "and after an hour": ([event(n, REPAIRED) for n in HOUR], [*range(1, 122), *range(1, len(HOUR) - 120)]),
}


def test_what_is_told_as_one() -> None:
    assert {fact: counts(*events) for fact, (events, _) in REPEATED.items()} == {
        fact: wanted for fact, (_, wanted) in REPEATED.items()
    }


def test_a_flapping_backend_is_a_bounded_number_of_events_that_say_how_it_is_now(tmp_path: Path) -> None:
    def flap(number: int) -> str:
        return "unhealthy: refused" if number % 2 else "healthy: connected"

    async def story(recorder: Recorder, clock: Clock) -> None:
        for number in range(1, 18):
            clock.now += 2
            recorder.record(event(2 * number, reason=flap(number), **WEB))
        recorder.record(event(40, **{**WEB, "backends": ("10.0.0.2:80",)}))
        *mine, other = recorder.read()
        assert [(one.count, one.reason) for one in mine[-2:]] == [(4, flap(0)), (5, flap(1))]
        assert (sum(one.count for one in mine), other.count) == (17, 1)
        assert (mine[-1].since, mine[-1].at) == (event(2 * (2 * SEPARATE - 1)).at, event(34).at)

    recording(tmp_path, story)


@pytest.mark.parametrize("back", [0, -86400], ids=["steady clock", "clock set back"])
def test_news_of_what_repeats_itself_are_paced_and_the_last_is_told_in_the_end(
    back: int, tmp_path: Path
) -> None:
    async def story(recorder: Recorder, clock: Clock) -> None:
        with recorder.subscribe() as follower:
            recorder.record(event(0, REPAIRED, reason="the same"))
            clock.now += back
            for number in range(1000):
                clock.now += 0.001
                recorder.record(event(back + number / 1000, REPAIRED, reason="the same"))
            clock.now += 5
            reported: list[EventRecord] = []
            while not reported or reported[-1].count < 1000:
                news = await follower.next(60)
                assert news is not None
                reported.append(news)
        assert len(reported) <= 5
        assert [one.id for one in reported] == sorted({one.id for one in reported})
        assert all(one.since is None or one.since <= one.at for one in reported)
        assert [one.count for one in recorder.read()][-1] >= 1000

    recording(tmp_path, story)


def test_however_many_events_there_are_they_stay_within_the_bound_and_the_newest_are_kept(
    tmp_path: Path,
) -> None:
    record(tmp_path, *map(numbered, range(4_000)))
    assert sum(map(len, cached(tmp_path, "event").values())) <= LARGEST
    newest = reasons(tmp_path)
    assert len(newest) > LARGEST // 1000
    assert newest == [f"number {n}" for n in range(4_000 - len(newest), 4_000)]


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ({"unit": "file:/a.yaml", "cause": "file /a.yaml:{}"}, {"unit": "file:/b.yaml"}),
        ({"unit": "etcd:/vipd/v1/services/a/s{}"}, {"unit": "etcd:/vipd/v1/services/b/s"}),
        ({"unit": "cli", "cause": "user ann (pid {})"}, {"unit": "cli", "cause": "user bob (pid 7)"}),
    ],
    ids=["files", "folders of etcd", "users"],
)
def test_however_many_events_one_author_causes_the_newest_of_another_stay(
    mine: dict[str, str], others: dict[str, str], tmp_path: Path
) -> None:
    def flood(number: int) -> EventRecord:
        author = {key: text.format(number) for key, text in mine.items()}
        return event(3 + number, services=(f"a{number}",), reason=f"flood {number}", **author)

    few = [event(n, services=("b",), reason=f"few {n}", **others) for n in range(3)]
    # A third had many before, and has none later.
    many = [event(3, services=(f"c{n}",), reason="many", unit="file:/c.yaml") for n in range(200)]
    record(tmp_path, *few, *many, *map(flood, range(2000)))
    newest = reasons(tmp_path)
    assert (newest[:3], newest[-1]) == (["few 0", "few 1", "few 2"], "flood 1999")
    assert 0 < newest.count("many") < 100
    assert len(newest) > LARGEST // 1000


def test_ids_grow_over_restarts_also_when_the_clock_goes_back_or_the_events_are_lost(tmp_path: Path) -> None:
    clock = Clock()
    record(tmp_path, numbered(1), numbered(2), clock=clock)
    clock.now -= 3600
    record(tmp_path, numbered(3), clock=clock)
    ids = [one.id for one in kept(tmp_path)]
    assert len(ids) == 3
    assert ids == sorted(set(ids))
    for path in tmp_path.iterdir():
        path.unlink()
    clock.now += 7200
    record(tmp_path, numbered(4), clock=clock)
    assert kept(tmp_path)[0].id > ids[-1]
