"""What is noted while it happens."""

from __future__ import annotations

import asyncio
import logging

from tests.model.samples import broken
from tests.observe.page.examples import mixed
from tests.observe.page.watched import watched
from vipd.dataplane.base import ApplyError
from vipd.host.systemd.fields import Event, fields
from vipd.model.durations import WRITE_BOUNDS, DurationHistogram
from vipd.observe.metrics.event_counts import EventCounts, MetricCounters


def test_durations_are_counted_up_to_each_bound() -> None:
    durations = DurationHistogram(WRITE_BOUNDS)
    for seconds in (0.005, 0.01, 0.3, 99.0):
        durations.add(seconds)
    found = dict(durations.cumulative())
    assert (found["0.01"], found["0.25"], found["0.5"], found["60.0"], found["+Inf"]) == (2, 2, 3, 3, 4)
    assert list(found) == [*map(str, WRITE_BOUNDS), "+Inf"]
    assert durations.total == 0.005 + 0.01 + 0.3 + 99.0


def test_only_writes_have_a_duration_and_only_good_steps_are_a_success() -> None:
    async def story() -> None:
        async with watched(mixed()[:1]) as world:
            tally = MetricCounters(world.reconciler, (world.source,))
            world.reconciler.observers.add(tally)
            await world.step()
            first = tally.last_success
            assert first is not None
            assert tally.durations.cumulative()[-1][1] == 0, "nothing was written"
            await world.declare(mixed()[:3])
            assert tally.durations.cumulative()[-1][1] == 1
            second = tally.last_success
            assert second is not None
            assert second > first
            world.source.candidate = broken("a.yaml")
            await world.step()
            assert tally.last_success == second, "a declaration has a problem"
            world.dataplane.failures = [ApplyError("x", "y")]
            await world.declare(mixed()[:2])
            assert tally.durations.cumulative()[-1][1] == 1
            assert tally.last_success == second

    asyncio.run(asyncio.wait_for(story(), 120))


def test_events_are_counted_one_by_one_and_all_are_there_from_the_start() -> None:
    counts = EventCounts()
    assert counts.counts() == dict.fromkeys((event.value for event in Event), 0)
    logger = logging.getLogger("vipd.tests.tally")
    logger.addHandler(counts)
    try:
        for _ in range(3):
            logger.warning("x", extra=fields(Event.RULES_REPAIRED))
        logger.warning("no event")
    finally:
        logger.removeHandler(counts)
    assert counts.counts()["rules-repaired"] == 3
    assert sum(counts.counts().values()) == 3
