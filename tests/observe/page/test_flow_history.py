"""Rates of bytes on the status page: over some readings, since those of open flows come in bursts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from vipd.dataplane.conntrack.entries import Traffic
from vipd.dataplane.counting import BackendKey
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import ConntrackTable
from vipd.observe.metrics.flows import FlowReading
from vipd.observe.page.history import AVERAGED_SECONDS, FlowHistory

PLACE = BackendKey(ForwardingKey("web", "", Protocol.TCP, Family.IPV4), "10.0.0.1", 80)
START = datetime(2026, 1, 1, tzinfo=UTC)


def test_bytes_a_second_are_averaged_and_end_with_the_traffic() -> None:
    history, totals = FlowHistory(), FlowTotals()

    def look(second: int, *, traffic: bool = True) -> list[object]:
        reading = FlowReading(
            START + timedelta(seconds=second), totals, ConntrackTable(1, 2, accounting=True), traffic=traffic
        )
        history.add_reading(reading, ["web"])
        found = history.latest.get("web", [])
        assert isinstance(found, list)
        return found[3:]

    totals.add_ended({PLACE: Traffic(1, 1000, 1, 9000)})
    assert look(0) == [], "what was before is no rate"
    totals.add_ended({PLACE: Traffic(1, 600, 1, 3000)})
    assert look(1) == [600, 3000]
    assert look(2) == [300, 1500]
    assert look(3, traffic=False) == []
    assert look(4) == []
    totals.add_ended({PLACE: Traffic(1, 600, 1, 3000)})
    assert look(5) == [600, 3000]
    assert [look(second) for second in range(6, 8 + int(AVERAGED_SECONDS))][-1] == []


def test_the_first_bytes_of_a_service_that_was_there_are_a_rate() -> None:
    history, totals = FlowHistory(), FlowTotals()
    history.add_reading(
        FlowReading(START, totals, ConntrackTable(1, 2, accounting=True), traffic=True), ["web"]
    )
    totals.add_ended({PLACE: Traffic(1, 600, 1, 3000)})
    second = START + timedelta(seconds=2)
    history.add_reading(
        FlowReading(second, totals, ConntrackTable(1, 2, accounting=True), traffic=True), ["web"]
    )
    assert history.latest["web"][3:] == [300, 1500]  # type: ignore[index]


def test_constant_traffic_is_a_constant_rate_however_seldom_open_flows_are_read() -> None:
    history, totals = FlowHistory(), FlowTotals()
    shown = set()
    for second in range(60):
        read = second - second % 10  # the table is large: its flows are read every ten seconds
        if read == second:
            totals.add_ended({PLACE: Traffic(10, 6000, 10, 30000)})
        at, read_at = START + timedelta(seconds=second), START + timedelta(seconds=read)
        table = ConntrackTable(1, 2, accounting=True)
        history.add_reading(FlowReading(at, totals, table, traffic=True, traffic_at=read_at), ["web"])
        if second >= 20:
            shown.add(tuple(history.latest["web"][3:]))  # type: ignore[index]
    assert shown == {(600, 3000)}


def test_a_clock_that_is_set_back_makes_no_rate_negative_and_none_a_spike() -> None:
    history, totals = FlowHistory(), FlowTotals()
    at = START
    for number in range(40):
        at += timedelta(hours=-5) if number == 20 else timedelta(seconds=1)
        totals.add({PLACE: 10})
        totals.add_ended({PLACE: Traffic(1, 600, 1, 3000)})
        history.add_reading(
            FlowReading(at, totals, ConntrackTable(1, 2, accounting=True), traffic=True), ["web"]
        )
        latest = history.latest.get("web", [0, 0, {}, 0, 0])
        assert isinstance(latest, list)
        rate, _, backends, *traffic = latest
        wanted = [0, 0] if number in (0, 20) else [600, 3000]
        assert (rate, traffic) == (0 if number in (0, 20) else 10, wanted), number
        assert set(backends.values()) <= {10}


def test_many_services_that_go_cost_no_more_each_than_one() -> None:
    """Counted in looks at places, not in time: what is kept of another service is not looked at."""
    history, totals = FlowHistory(), FlowTotals()
    names = [f"s{number}" for number in range(500)]
    places = {name: PLACE._replace(key=PLACE.key._replace(service=name)) for name in names}
    for second in range(2):
        totals.add(dict.fromkeys(places.values(), 1))
        history.add_reading(
            FlowReading(START + timedelta(seconds=second), totals, ConntrackTable(1, 2, accounting=True)),
            names,
        )
    assert len(history._backend_flows) == 500

    class Unseen(dict[str, dict[BackendKey, int]]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("all are looked at")

    history._backend_flows = Unseen(history._backend_flows)
    for name in names:
        history.forget(name)
    assert len(history._backend_flows) == 0


def test_refused_flows_are_totals_and_rates_by_limit() -> None:
    history = FlowHistory()

    def look(second: int, **refused: int) -> object:
        counts = {Limit(name): flows for name, flows in refused.items()}
        at, table = START + timedelta(seconds=second), ConntrackTable(1, 2, accounting=True)
        history.add_reading(FlowReading(at, FlowTotals(), table, refused={"web": counts}), ["web"])
        return history.refused

    assert look(0, connections=0, new_per_client=7) == {"web": {"new_per_client": [7, 0.0]}}
    assert look(2, connections=4, new_per_client=17) == {
        "web": {"connections": [4, 2.0], "new_per_client": [17, 5.0]}
    }
    assert look(3, connections=4, new_per_client=17) == {
        "web": {"connections": [4, 0.0], "new_per_client": [17, 0.0]}
    }
    assert look(4) == {}
