"""Traffic of flows that come and go: never more than has passed, never falling; and how ends are told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import counters, made, new_request
from tests.dataplane.namespace import inside
from tests.lab.topology import Lab
from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.entries import Entry, Traffic, parse
from vipd.dataplane.conntrack.flow_end import CT_DELETE, FlowEnd, FlowTuple, parse_flow_end
from vipd.dataplane.conntrack.listener import open_flow_end_listener
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.counting import BackendKey
from vipd.host import netlink
from vipd.host.netlink import ATTRIBUTES, FAMILY_NUMBERS, attribute, nfgenmsg
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import ConntrackTable, FlowTable
from vipd.observe.flow_stats.traffic_counting import TrafficCounting

ONE = BackendKey(ForwardingKey("web", "", Protocol.TCP, Family.IPV4), "10.0.0.1", 80)
HAPPENINGS = st.lists(st.tuples(st.sampled_from(["pass", "end", "vanish", "read"]), st.integers(0, 3)))


def traffic(number: int) -> Traffic:
    return Traffic(number, 10 * number, 2 * number, 20 * number)


@given(HAPPENINGS, st.booleans())
def test_traffic_never_falls_and_never_exceeds_what_has_passed_also_over_restarts(
    happenings: list[tuple[str, int]], complete: bool
) -> None:
    """Four flows, each begun anew when it ends. One that vanishes has ended without a word."""
    totals, flows, passed, shown = FlowTotals(), [0, 0, 0, 0], 0, traffic(0)
    for event, which in happenings:
        if event == "pass":
            flows[which] += which + 1
            passed += which + 1
        elif event == "end" or (event == "vanish" and complete):
            totals.add_ended({ONE: traffic(flows[which])})
            flows[which] = 0
        elif event == "vanish":
            flows[which] = 0
        else:
            totals.set_open({ONE: traffic(sum(flows))})
        totals = FlowTotals.from_json(totals.to_json())
        now = totals.traffic_of_service("web")
        assert all(map(int.__ge__, now, shown))
        assert all(map(int.__le__, now, traffic(passed)))
        shown = now
    totals.set_open({ONE: traffic(sum(flows))})
    if complete:
        assert totals.traffic_of_backend(ONE) == traffic(passed)
    before = totals.traffic_of_service("web")
    totals.forget_open_flows()  # a reboot
    totals.set_open({ONE: traffic(4)})
    assert totals.traffic_of_service("web") == Traffic(*map(int.__add__, before, traffic(4)))


def end_message(entry: Entry, number: int, passed: Traffic, *, timeout: bool, zone: int = 0) -> bytes:
    """What the kernel tells of the end of an entry; newer ones tell its timeout, too."""
    ends = new_request(entry, 1)[ATTRIBUTES:][: 2 * (44 + entry.family.bits // 4)]
    body = ends + (attribute(entries.CTA_ZONE, struct.pack(">H", zone)) if zone else b"")
    body += attribute(entries.CTA_ID, struct.pack(">I", number))
    body += attribute(entries.CTA_STATUS, struct.pack(">I", entry.status))
    body += attribute(entries.CTA_TIMEOUT, struct.pack(">I", 30)) if timeout else b""
    body += counters(entries.CTA_COUNTERS_ORIG, *passed[:2])
    body += counters(entries.CTA_COUNTERS_REPLY, *passed[2:])
    return netlink.message(CT_DELETE, 0, 0, nfgenmsg(FAMILY_NUMBERS[entry.family]) + body)


FLOWS = [
    made(("10.1.0.1", 1024), ("10.96.0.10", 80), ("10.0.0.1", 8080)),
    made(("fd00:1::1", 1024), ("fd00:96::10", 80), ("fd00:244::1", 8080), protocol=Protocol.TCP),
]


def test_the_quick_way_reads_what_the_slow_one_does() -> None:
    for entry in FLOWS:
        for timeout in (False, True):
            for zone in (0, 7):
                message = end_message(entry, 99, traffic(3), timeout=timeout, zone=zone)
                slow = parse(message)
                assert slow is not None
                assert parse_flow_end(message) == FlowEnd(FlowTuple.of(entry), traffic(3), slow.identity)
                assert parse_flow_end(message[:4] + struct.pack("=H", CT_DELETE - 2) + message[6:]) is None


class Ends:
    """A listener that is told of these ends, or fails, once for each time that it is read."""

    def __init__(self, *ends: list[FlowEnd] | ConntrackError) -> None:
        self.ends, self.lost = list(ends), 0

    def read(self, _: int) -> list[FlowEnd]:
        ends = self.ends.pop(0) if self.ends else []
        if isinstance(ends, ConntrackError):
            raise ends
        return ends

    def close(self) -> None:
        """Nothing is open."""

    def fileno(self) -> int:
        return -1


def flow(port: int, number: int) -> Entry:
    return made(("10.1.0.1", port), ("10.96.0.10", 80), ("10.0.0.1", 8080))._replace(traffic=traffic(number))


def end_of(entry: Entry, position: int, number: int) -> FlowEnd:
    """The end of the flow that stands at a position of the table, counted from one."""
    end = parse_flow_end(end_message(entry, position, traffic(number), timeout=True))
    assert end is not None
    return end


@pytest.mark.parametrize("readable", [True, False])
def test_flows_that_end_while_the_table_is_read_count_once_whether_it_can_be_read_or_not(
    readable: bool,
) -> None:
    """The first is told of before it is read, the second ends later with more, two are never read."""
    first, second, gone, late = flow(1, 10), flow(2, 20), flow(4, 80), flow(5, 160)
    kernel, totals = FakeTable([first, second, flow(3, 40)]), FlowTotals()
    meanwhile = [end_of(first, 1, 10), end_of(second, 2, 25), end_of(late, 8, 160)]
    heard = Ends([], [end_of(gone, 9, 80)], meanwhile)
    services = {"web": (forwarding("10.96.0.10", 80, ("10.0.0.1", 8080), name="web"),)}
    table = FlowTable(
        lambda: services, frozenset, kernel.connect, totals=totals, listen=cast("Any", lambda: heard)
    )

    async def story() -> None:
        table.start_listening()
        await table.count_ended()
        kernel.faults = [] if readable else [Fault.REFUSED]
        with contextlib.nullcontext() if readable else pytest.raises(ConntrackError):
            await table.sums(force=True)
        kernel.entries, kernel.faults = {3: flow(3, 40)}, []
        for _ in range(3):
            await table.sums(force=True)
            assert totals.traffic_of_service("web") == traffic(10 + 25 + 40 + 80 + 160)

    asyncio.run(story())


def test_lost_ends_are_counted_and_logged_once_and_a_socket_that_fails_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = [Ends(ConntrackError("cannot hear", "of it")), Ends()]
    kernel, totals = FakeTable([]), FlowTotals()
    listen = cast("Any", lambda: opened[0])
    table = FlowTable(dict, frozenset, kernel.connect, totals=totals, listen=listen)
    state = ConntrackTable(1, 2, accounting=True)
    table.table = lambda: state  # type: ignore[method-assign]
    counting = TrafficCounting(table, totals)

    async def story() -> None:
        await counting.refresh()
        uncounted = counting.uncounted(state)
        assert uncounted is not None
        assert uncounted.why == "cannot hear: of it"
        await table.stop_listening()
        del opened[0]
        for lost in (0, 4, 4, 9):
            opened[0].lost = lost
            await counting.refresh()
        assert counting.uncounted(state) is None
        assert totals.lost == 9

    asyncio.run(story())
    assert caplog.text.count("a lower bound") == 1


@pytest.mark.root
def test_ends_that_find_no_room_are_counted_and_those_of_other_flows_are_not_told(lab: Lab) -> None:
    lab.host.run("nft", "-f", "-", text=TRANSLATING)
    for name in ("net.ipv4.ip_forward", "net.netfilter.nf_conntrack_acct"):
        lab.host.sysctl(name, 1)
    hearing = inside(lab.host.namespace, open_flow_end_listener)
    try:
        hearing._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)  # the least that there is
        lab.host.run("ping", "-c1", "-q", "10.244.0.11")
        # The client has so many open at a time: each has a port of its own.
        lab.client.send("10.96.0.10", 80, "udp", count=32).all_answered()
        lab.host.run("conntrack", "-F")
        heard = hearing.read(1000)
        assert {end.flow.destination for end in heard} == {("10.96.0.10", 80)}
        assert 0 < len(heard) < 32
        assert len(heard) + hearing.lost == 32
    finally:
        hearing.close()


TRANSLATING = """table ip translating {
    chain prerouting {
        type nat hook prerouting priority -100; policy accept;
        ip daddr 10.96.0.10 dnat to 10.244.0.11
    }
}
"""
