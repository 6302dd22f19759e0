"""Rates of bytes on the status page: over some readings, since those of open flows come in bursts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from vipd.dataplane.conntrack.entries import Traffic
from vipd.dataplane.counting import Place
from vipd.model import Family, ForwardingKey, Protocol
from vipd.observe.counters.ledger import Ledger
from vipd.observe.counters.traffic import Table
from vipd.observe.metrics.flows import Reading
from vipd.observe.page.flow_history import SAMPLES, FlowHistory

PLACE = Place(ForwardingKey("web", "", Protocol.TCP, Family.IPV4), "10.0.0.1", 80)
START = datetime(2026, 1, 1, tzinfo=UTC)


def test_bytes_a_second_are_averaged_and_end_with_the_traffic() -> None:
    history, ledger = FlowHistory(), Ledger()

    def look(second: int, *, traffic: bool = True) -> list[object]:
        reading = Reading(
            START + timedelta(seconds=second), ledger, Table(1, 2, accounting=True), traffic=traffic
        )
        history.take_in(reading, ["web"])
        found = history.latest.get("web", [])
        assert isinstance(found, list)
        return found[3:]

    ledger.end({PLACE: Traffic(1, 1000, 1, 9000)})
    assert look(0) == [], "what was before is no rate"
    ledger.end({PLACE: Traffic(1, 600, 1, 3000)})
    assert look(1) == [600, 3000]
    assert look(2) == [300, 1500]
    assert look(3, traffic=False) == []
    assert look(4) == []
    ledger.end({PLACE: Traffic(1, 600, 1, 3000)})
    assert look(5) == [600, 3000]
    assert [look(second) for second in range(6, 6 + SAMPLES)][-1] == []


def test_the_first_bytes_of_a_service_that_was_there_are_a_rate() -> None:
    history, ledger = FlowHistory(), Ledger()
    history.take_in(Reading(START, ledger, Table(1, 2, accounting=True), traffic=True), ["web"])
    ledger.end({PLACE: Traffic(1, 600, 1, 3000)})
    second = START + timedelta(seconds=2)
    history.take_in(Reading(second, ledger, Table(1, 2, accounting=True), traffic=True), ["web"])
    assert history.latest["web"][3:] == [300, 1500]  # type: ignore[index]
