"""Rates on the status page, of counts that were read at known times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from vipd.dataplane.conntrack.entries import Traffic
from vipd.dataplane.counting import BackendKey
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import ConntrackTable
from vipd.observe.metrics.flows import FlowReading
from vipd.observe.page.history import FlowHistory

PLACE = BackendKey(ForwardingKey("web", "", Protocol.TCP, Family.IPV4), "10.0.0.1", 80)
START = datetime(2026, 1, 1, tzinfo=UTC)
NOTHING = [0, 0, {}, 0, 0]


class Page:
    """One service, of which a test says what it has counted."""

    def __init__(self) -> None:
        self.history, self.totals = FlowHistory(), FlowTotals()

    def read(self, second: float, new: int = 0, bytes_in: int = 0, **reading: object) -> list[object]:
        """The latest rates after so many more flows and bytes, five times as many out."""
        self.totals.add({PLACE: new})
        if bytes_in:
            self.totals.add_ended({PLACE: Traffic(1, bytes_in, 1, 5 * bytes_in)})
        at, table = START + timedelta(seconds=second), ConntrackTable(1, 2, accounting=True)
        options: dict[str, object] = {"traffic": True, **reading}
        self.history.add_reading(FlowReading(at, self.totals, table, **options), ["web"])  # type: ignore[arg-type]
        latest = self.history.latest.get("web", NOTHING)
        assert isinstance(latest, list)
        return latest

    def speed(self, second: float, bytes_in: int = 0, **reading: object) -> list[object]:
        return self.read(second, 0, bytes_in, **reading)[3:]


def test_bytes_a_second_are_averaged_and_end_with_the_traffic() -> None:
    page = Page()
    assert page.speed(0, 1000) == [0, 0], "what was before is no rate"
    assert [page.speed(1, 600), page.speed(2), page.speed(3, traffic=False), page.speed(4)] == [
        [600, 3000],
        [300, 1500],
        [0, 0],
        [0, 0],
    ]
    assert page.speed(5, 600) == [600, 3000]
    assert [page.speed(second) for second in range(6, 14)][-1] == [0, 0]


def test_the_first_bytes_of_a_service_that_was_there_are_a_rate() -> None:
    page = Page()
    page.speed(0)
    assert page.speed(2, 600) == [300, 1500]


def test_constant_traffic_is_a_constant_rate_however_seldom_open_flows_are_read() -> None:
    page, shown = Page(), []
    for second in range(60):
        read = second - second % 10  # the table is large: its flows are read every ten seconds
        rate = page.speed(second, 6000 * (read == second), traffic_at=START + timedelta(seconds=read))
        shown += [rate] if second >= 20 else []
    assert {tuple(rate) for rate in shown} == {(600, 3000)}


def test_a_clock_that_is_set_back_makes_no_rate_negative_and_none_a_spike() -> None:
    page, at = Page(), 0.0
    rates = []
    for number in range(40):
        at += -0.5 if number == 20 else -5 * 3600.0 if number == 30 else 1.0
        rates.append(page.read(at, 10, 600))
    backends = {"web/tcp/10.0.0.1:80": 10.0}
    assert [number for number, rate in enumerate(rates) if rate != [10.0, 0, backends, 600, 3000]] == [
        0,
        20,
        30,
    ]
    assert rates[0] == rates[20] == rates[30] == NOTHING


def test_refused_flows_are_totals_and_rates_by_limit() -> None:
    page = Page()

    def refused(second: int, **flows: int) -> object:
        counts = {Limit(name): number for name, number in flows.items()}
        page.read(second, refused={"web": counts})
        return page.history.refused

    assert refused(0, connections=0, new_per_client=7) == {"web": {"new_per_client": [7, 0.0]}}
    rates = {"connections": [4, 2.0], "new_per_client": [17, 5.0]}
    assert refused(2, connections=4, new_per_client=17) == {"web": rates}
    rates = {"connections": [4, 0.0], "new_per_client": [17, 0.0]}
    assert refused(3, connections=4, new_per_client=17) == {"web": rates}
    assert refused(4) == {}
