"""Traffic of flows that come and go: never more than has passed, never falling, exact if all is told."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import counters, made, new_request
from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.entries import Entry, Traffic, parse
from vipd.dataplane.conntrack.flow_end import CT_DELETE, FlowEnd, FlowTuple, parse_flow_end
from vipd.dataplane.conntrack.listener import FlowEndListener
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.counting import BackendKey
from vipd.host import netlink
from vipd.host.netlink import ATTRIBUTES, FAMILY_NUMBERS, MalformedMessageError, attribute, nfgenmsg
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.observe.flow_stats import owners
from vipd.observe.flow_stats.totals import KEPT_SECONDS, NO_TRAFFIC, FlowTotals, TrafficTotals
from vipd.observe.flow_stats.traffic import ConntrackTable, FlowTable
from vipd.observe.flow_stats.traffic_counting import TrafficCounting

KEY = ForwardingKey("web", "", Protocol.TCP, Family.IPV4)
ONE, TWO = BackendKey(KEY, "10.0.0.1", 80), BackendKey(KEY, "10.0.0.2", 80)


def traffic(number: int) -> Traffic:
    return Traffic(number, 10 * number, 2 * number, 20 * number)


HAPPENINGS = st.lists(st.tuples(st.sampled_from(["pass", "end", "vanish", "read"]), st.integers(0, 3)))


@given(HAPPENINGS, st.booleans())
def test_a_volume_never_falls_and_never_exceeds_what_has_passed(
    happenings: list[tuple[str, int]], complete: bool
) -> None:
    """Four flows, each begun anew when it ends. One that vanishes has ended without a word."""
    volume, flows, passed, shown = TrafficTotals(), [0, 0, 0, 0], 0, NO_TRAFFIC
    for what, which in happenings:
        if what == "pass":
            flows[which] += which + 1
            passed += which + 1
        elif what == "end" or (what == "vanish" and complete):
            volume.add_ended(traffic(flows[which]))
            flows[which] = 0
        elif what == "vanish":
            flows[which] = 0
        else:
            volume.set_open(traffic(sum(flows)))
        now = volume.now
        assert all(map(int.__ge__, now, shown))
        assert all(map(int.__le__, now, traffic(passed)))
        shown = now
    volume.set_open(traffic(sum(flows)))
    if complete:
        assert volume.now == traffic(passed)


def test_a_ledger_keeps_traffic_over_a_restart_and_a_reboot() -> None:
    totals = FlowTotals()
    totals.set_open({ONE: traffic(5), TWO: traffic(1)})
    totals.add_ended({ONE: traffic(7)})
    totals.add_lost(3)
    assert totals.traffic_of_backend(ONE) == traffic(7)
    assert totals.traffic_of_service("web") == traffic(8)
    again = FlowTotals.from_json(totals.to_json())
    assert (again.to_json(), again.lost) == (totals.to_json(), 3)
    again.set_open({TWO: traffic(4)})
    assert again.traffic_of_service("web") == traffic(7 + 4)
    rebooted = FlowTotals.from_json(totals.to_json())
    rebooted.forget_open_flows()
    rebooted.set_open({TWO: traffic(4)})
    assert rebooted.traffic_of_service("web") == traffic(7 + 1 + 4)


def test_a_backend_with_open_flows_is_not_forgotten_and_a_forgotten_one_leaves_its_traffic() -> None:
    totals = FlowTotals()
    totals.set_open({ONE: traffic(5), TWO: traffic(1)})
    totals.expire({ONE}, 0.0)
    totals.expire({ONE}, KEPT_SECONDS + 1)
    assert totals.traffic_of_backend(TWO) == traffic(1)
    totals.set_open({ONE: traffic(5)})
    totals.expire({ONE}, KEPT_SECONDS + 2)
    assert totals.traffic_of_backend(TWO) == NO_TRAFFIC
    assert totals.traffic_of_service("web") == traffic(6)


def end_message(entry: Entry, number: int, passed: Traffic, *, timeout: bool, zone: int = 0) -> bytes:
    """What the kernel tells of the end of an entry; newer ones tell its timeout, too."""
    ends = new_request(entry, 1)[ATTRIBUTES:][: 2 * (44 + entry.family.bits // 4)]
    body = ends + (attribute(entries.CTA_ZONE, struct.pack(">H", zone)) if zone else b"")
    body += attribute(entries.CTA_ID, struct.pack(">I", number))
    body += attribute(entries.CTA_STATUS, struct.pack(">I", entry.status))
    body += attribute(entries.CTA_TIMEOUT, struct.pack(">I", 30)) if timeout else b""
    body += counters(entries.CTA_COUNTERS_ORIG, *passed[:2]) + counters(
        entries.CTA_COUNTERS_REPLY, *passed[2:]
    )
    return netlink.message(CT_DELETE, 0, 0, nfgenmsg(FAMILY_NUMBERS[entry.family]) + body)


FLOWS = [
    made(("10.1.0.1", 1024), ("10.96.0.10", 80), ("10.0.0.1", 8080)),
    made(("fd00:1::1", 1024), ("fd00:96::10", 80), ("fd00:244::1", 8080), protocol=Protocol.TCP),
]


@pytest.mark.parametrize("entry", FLOWS)
@pytest.mark.parametrize("timeout", [False, True])
@pytest.mark.parametrize("zone", [0, 7])
def test_the_quick_way_reads_what_the_slow_one_does(entry: Entry, timeout: bool, zone: int) -> None:
    message = end_message(entry, 99, traffic(3), timeout=timeout, zone=zone)
    slow = parse(message)
    assert slow is not None
    assert parse_flow_end(message) == FlowEnd(FlowTuple.of(entry), traffic(3), slow.identity)
    assert parse_flow_end(message[:4] + struct.pack("=H", CT_DELETE - 2) + message[6:]) is None


@given(st.sampled_from(FLOWS), st.integers(0, 230), st.binary(max_size=30))
def test_damaged_messages_are_malformed_at_worst(entry: Entry, cut: int, junk: bytes) -> None:
    whole = end_message(entry, 99, traffic(3), timeout=True)
    for message in (whole[:cut], whole[:cut] + junk, whole[:cut] + junk + whole[cut:]):
        try:
            parse_flow_end(message)
        except MalformedMessageError:
            continue


class Played:
    """A FlowEndListener whose words a test says: one list for each time that it is read."""

    def __init__(self, *told: list[FlowEnd] | ConntrackError) -> None:
        self.told, self.lost, self.closed = list(told), 0, False

    def read(self, _: int) -> list[FlowEnd]:
        said = self.told.pop(0) if self.told else []
        if isinstance(said, ConntrackError):
            raise said
        return said

    def close(self) -> None:
        self.closed = True

    def fileno(self) -> int:
        return -1


class Story:
    """One service of which flows are open, and what is told of ends at each reading of the socket."""

    def __init__(self, open_flows: list[Entry], *told: list[FlowEnd] | ConntrackError) -> None:
        self.kernel, self.heard, self.totals = FakeTable(open_flows), Played(*told), FlowTotals()
        made_of = forwarding("10.96.0.10", 80, ("10.0.0.1", 8080), name="web")
        services = {"web": (made_of,)}
        self.place = BackendKey(made_of.key, "10.0.0.1", 8080)
        listen = cast("Callable[[], FlowEndListener]", lambda: self.heard)
        connect = self.kernel.connect
        self.table = FlowTable(lambda: services, frozenset, connect, totals=self.totals, listen=listen)
        self.table.table = lambda: ConntrackTable(1, 2, accounting=True)  # type: ignore[method-assign]
        self.counting = TrafficCounting(self.table, self.totals)

    @property
    def passed(self) -> Traffic:
        return self.totals.traffic_of_service("web")


def flow(port: int, number: int) -> Entry:
    return made(("10.1.0.1", port), ("10.96.0.10", 80), ("10.0.0.1", 8080))._replace(traffic=traffic(number))


def end_of(entry: Entry, at: int, number: int) -> FlowEnd:
    """The end of the flow that stands at a place in the table, counted from one."""
    told = parse_flow_end(end_message(entry, at, traffic(number), timeout=True))
    assert told is not None
    return told


def test_flows_that_end_while_the_table_is_read_count_once() -> None:
    """The first is told of before it is read, as the kernel does; the second ends later with more."""
    first, second, third = flow(1, 10), flow(2, 20), flow(3, 40)
    gone = flow(4, 80)
    at_start, meanwhile = [end_of(gone, 9, 80)], [end_of(first, 1, 10), end_of(second, 2, 25)]

    async def story() -> None:
        world = Story([first, second, third], [], at_start, meanwhile)
        await world.counting.refresh()
        await world.counting.close()
        assert world.passed == traffic(10 + 20 + 40 + 80)
        world.kernel.entries = {3: third}
        await world.table.sums(force=True)
        assert world.passed == traffic(10 + 25 + 40 + 80)
        await world.table.sums(force=True)
        assert world.passed == traffic(10 + 25 + 40 + 80)

    asyncio.run(story())


def test_ends_are_not_kept_while_the_table_cannot_be_read() -> None:
    """It may be so for days; each end counts once all the same."""

    async def story() -> None:
        ends = [[end_of(flow(number, number), number, number)] for number in range(1, 9)]
        world = Story([], [], *ends)
        await world.counting.refresh()
        while world.heard.told:
            world.kernel.faults = [Fault.REFUSED]
            with pytest.raises(ConntrackError):
                await world.table.sums(force=True)
            assert world.table._held == []
        assert world.passed == traffic(sum(range(1, 9)))

    asyncio.run(story())


def test_flows_of_a_frontend_that_is_gone_are_still_its_service_s() -> None:
    async def story() -> None:
        entry = flow(1, 10)
        world = Story([entry], [], [], [], [], [], [end_of(entry, 1, 15)])
        await world.counting.refresh()
        await world.table.sums(force=True)
        services: dict[str, tuple[Forwarding, ...]] = {"web": ()}
        world.table._services = lambda: services
        world.table.stepped()
        while world.heard.told:
            await world.counting.refresh()
        assert world.passed == traffic(15)

    asyncio.run(story())


def test_frontends_that_are_gone_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "MAX_FORMER", 3)
    found, ways = owners.FlowOwners(), []
    for number in range(8):
        address = f"10.96.0.{number}"
        ways.append(FlowTuple(Family.IPV4, Protocol.UDP, (address, 80), ("10.0.0.1", 80)))
        found.update({"web": (forwarding(address, 80, ("10.0.0.1", 80), name="web"),)}, frozenset())
    known = [found.backend_key(way) is not None for way in ways]
    assert known[-2:] == [True, True]
    assert not any(known[:3])


def test_losses_are_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        world = Story([])
        await world.counting.refresh()
        for lost in (4, 4, 9):
            world.heard.lost = lost
            await world.counting.refresh()
        assert world.totals.lost == 9

    asyncio.run(story())
    assert caplog.text.count("a lower bound") == 1


def test_why_traffic_is_not_counted_is_said() -> None:
    def why(table: ConntrackTable, *, wanted: bool = True) -> str:
        uncounted = TrafficCounting(Story([]).table, FlowTotals(), wanted=wanted).uncounted(table)
        return uncounted.hint if uncounted else ""

    assert why(ConntrackTable(1, 2, accounting=True)) == ""
    assert why(ConntrackTable(1, 2, accounting=False)) == "sysctl -w net.netfilter.nf_conntrack_acct=1"
    assert why(ConntrackTable(1, 2, True, events=False)) == "sysctl -w net.netfilter.nf_conntrack_events=1"
    assert "traffic_accounting" in why(ConntrackTable(1, 2, accounting=True), wanted=False)


def test_a_socket_that_fails_is_told_of_and_opened_anew() -> None:
    async def story() -> None:
        world = Story([], ConntrackError("cannot hear", "of it"))
        await world.counting.refresh()
        uncounted = world.counting.uncounted(ConntrackTable(1, 2, accounting=True))
        assert uncounted is not None
        assert uncounted.why == "cannot hear: of it"

    asyncio.run(story())
