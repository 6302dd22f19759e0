"""The time to confirm a change holds however the time of day is set, and over a reboot."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from vipd.sources.confirmation import Clocks, Confirmation

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(seconds=60)
DAY = timedelta(days=1)


def clocks(uptime: float, boot: str = "first", clock: timedelta = timedelta()) -> Clocks:
    """A host's clocks: its uptime, and how far the time of day is from the moment of the change."""
    return Clocks(lambda: START + clock, lambda: uptime, lambda: boot)


@pytest.mark.parametrize(
    ("now", "left"),
    [
        pytest.param(clocks(1000), 60, id="at once"),
        pytest.param(clocks(1020, clock=timedelta(seconds=20)), 40, id="later"),
        pytest.param(clocks(1060), 0, id="at its end"),
        pytest.param(clocks(9999), 0, id="long after it"),
        pytest.param(clocks(1000, clock=-400 * DAY), 60, id="the time of day is set back"),
        pytest.param(clocks(1000, clock=400 * DAY), 60, id="the time of day is set forward"),
        pytest.param(clocks(5, "second", timedelta(seconds=20)), 40, id="after a reboot"),
        pytest.param(clocks(5, "second", MINUTE), 0, id="over during the reboot"),
        pytest.param(clocks(5, "second", -DAY), 0, id="a reboot to a time before the change"),
        pytest.param(clocks(5, "second", 9000 * DAY), 0, id="a reboot to a time long after it"),
        pytest.param(clocks(1000, "", timedelta(seconds=20)), 40, id="no boot id"),
    ],
)
def test_how_much_time_is_left(now: Clocks, left: float) -> None:
    confirmation = Confirmation.begin(7, 60, clocks(1000))
    assert confirmation.in_this_boot(now).seconds_left(now) == left


def test_after_a_reboot_the_uptime_counts_again() -> None:
    booted = clocks(5, "second", timedelta(seconds=20))
    confirmation = Confirmation.begin(7, 60, clocks(1000)).in_this_boot(booted)
    later = clocks(25, "second", -DAY)
    assert confirmation.in_this_boot(later).seconds_left(later) == 20
