"""The log tells of verdicts, and is not flooded by them."""

from __future__ import annotations

import logging

import pytest

from vipd.health.state import HealthRecord, HealthState
from vipd.health.verdict_log import CALM_SECONDS, LINES, PERIOD_SECONDS, HealthLog
from vipd.model.check import TcpProbe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

DEAD = HealthRecord(0.0, HealthState.UNHEALTHY, last_reason="connection refused, 3 of 3")


def target(number: int) -> CheckTarget:
    return CheckTarget(f"10.0.{number // 250}.{number % 250}", 80, Protocol.TCP, TcpProbe(), Timing())


def test_a_verdict_is_a_line_but_for_the_first_good_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = HealthLog()
    log.write([(target(1), DEAD)], 5.0)
    log.write([(target(1), HealthRecord(0.0, HealthState.HEALTHY, last_reason="answered in 1 ms"))], 5.0)
    log.write(
        [(target(1), HealthRecord(0.0, HealthState.HEALTHY, last_reason="answered in 2 ms", changes=1))], 5.0
    )
    assert caplog.messages == [
        "tcp 10.0.0.1:80 is unhealthy: connection refused, 3 of 3",
        "tcp 10.0.0.1:80 is healthy: answered in 2 ms",
    ]
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING, logging.INFO]


def test_thousands_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = HealthLog()
    for number in range(5000):
        log.write([(target(number), DEAD)], 100.0 + number / 1000)
    assert len(caplog.messages) == LINES
    log.write((), 101.0)
    assert len(caplog.messages) == LINES
    log.write((), 100.0 + PERIOD_SECONDS)
    assert caplog.messages[LINES:] == [
        f"of other backends, {5000 - LINES} became unhealthy; hint: vipctl list -o wide"
    ]
    log.write([(target(1), DEAD)], 111.0)
    assert len(caplog.messages) == LINES + 2


def test_late_checks_are_told_once_until_they_were_in_time_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = HealthLog()
    with caplog.at_level(logging.INFO):
        for now in (0.0, 5.0, 10.0):
            log.log_late(["32 exec checks at once are all there is room for"], now)
        log.log_late([], 15.0)
        log.log_late(["32 exec checks at once are all there is room for"], 20.0)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        log.log_late([], 20.0 + CALM_SECONDS)
        log.log_late([], 90.0 + CALM_SECONDS)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
