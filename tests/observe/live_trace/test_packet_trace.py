"""Events of a real kernel, recorded, put together to traces."""

from __future__ import annotations

import pytest

from tests.observe.live_trace.recorded import RECORDED, events, table_of, traces
from vipd.host.netlink import MalformedMessageError
from vipd.model.service import Protocol
from vipd.observe.live_trace.events import Chain, EventKind, TraceVerdict, logged_events, trace_events
from vipd.observe.live_trace.packet_trace import LOGGED_SECONDS, QUIET_SECONDS, PacketTrace, TraceAssembler
from vipd.observe.live_trace.packets import Headers, read_packet

CLIENT, BACKEND = "10.10.0.2", "10.244.0.11"
DATAPLANES = ("iptables", "legacy", "nftables")


def only(name: str) -> PacketTrace:
    (trace,) = traces(name, legacy=name.startswith("legacy"))
    return trace


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_a_forwarded_packet(dataplane: str) -> None:
    trace = only(f"{dataplane}-forwarded")
    start, end = trace.start, trace.end
    assert (start.source, start.destination, start.port) == (CLIENT, "10.96.0.20", 80)
    assert (end.source, end.destination, end.port) == ("10.244.0.1", BACKEND, 8080)
    assert (trace.passed, trace.translated, trace.forwarded) == (True, True, True)
    assert (trace.mark, start.protocol) == (0, Protocol.TCP)


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_a_refused_packet(dataplane: str) -> None:
    trace = only(f"{dataplane}-refused")
    assert (trace.passed, trace.translated) == (False, False)
    last = trace.events[-1].event
    assert last.chain.name == ("refuse" if dataplane == "nftables" else "VIPD-SERVICES")
    assert last.verdict is (TraceVerdict.UNSAID if dataplane == "legacy" else TraceVerdict.DROP)


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_a_packet_that_stays_here_is_one_journey(dataplane: str) -> None:
    """It has one number on its way out, and another when it comes in again."""
    name = f"{dataplane}-loopback"
    assert len({event.id for event in events(name) if event.id}) == 2
    trace = only(name)
    assert trace.end.receiver == "192.0.2.2:53"
    assert (trace.passed, trace.forwarded) == (True, False)
    if dataplane != "nftables":
        assert {"OUTPUT", "POSTROUTING", "INPUT"} <= {m.event.chain.name for m in trace.events}


def test_ipv6() -> None:
    trace = only("iptables-ipv6")
    assert trace.start.receiver == "[fd00:96::20]:80"
    assert trace.end.receiver == "[fd00:244::11]:80"
    assert {moment.event.chain.family for moment in trace.events} == {"ip6"}


def test_our_own_table_is_no_part_of_a_journey() -> None:
    for path in RECORDED.glob("*.txt"):
        table = table_of(path.stem)
        assert all(m.event.chain.table != table for m in only(path.stem).events)


def test_the_kernel_says_the_end_of_a_chain() -> None:
    ends = [event for event in events("iptables-forwarded") if event.kind is EventKind.RETURN]
    assert ends
    assert not any(event.rule for event in ends)
    rules = [event for event in events("iptables-forwarded") if event.kind is EventKind.RULE]
    assert all(event.rule for event in rules)


def test_legacy_events() -> None:
    logged = [event for event in events("legacy-forwarded") if event.chain.legacy]
    assert logged[0].chain == Chain("legacy", "nat", "PREROUTING")
    assert [event.mark for event in logged][-1] == 0
    assert 0x4000 in {event.mark for event in logged}


def test_packets_of_other_tracers_are_no_journeys() -> None:
    put_together = TraceAssembler("vipd-trace-1")
    for event in events("iptables-forwarded"):
        put_together.take(event, 0.0)
    assert put_together.finished(QUIET_SECONDS) == []


def test_a_journey_is_given_once_and_when_it_is_over() -> None:
    put_together = TraceAssembler(table_of("iptables-forwarded"))
    *first, last = events("iptables-forwarded")
    for event in first:
        put_together.take(event, 0.0)
    assert put_together.finished(0.1) == []
    put_together.take(last, 0.1)
    assert len(put_together.finished(0.1)) == 1
    assert put_together.finished(9.0) == []


def test_a_packet_that_vanishes_is_over_after_silence() -> None:
    put_together = TraceAssembler(table_of("iptables-forwarded"))
    for event in list(events("iptables-forwarded"))[:12]:
        put_together.take(event, 5.0)
    assert put_together.finished(5.0 + QUIET_SECONDS / 2) == []
    (trace,) = put_together.finished(5.0 + QUIET_SECONDS)
    assert not trace.passed


def test_packets_of_older_flows_are_counted_only() -> None:
    name = "iptables-forwarded"
    put_together = TraceAssembler(table_of(name))
    for event in events(name):
        older = event.chain.name == "tracked-prerouting" and event.kind is EventKind.RULE
        put_together.take(event._replace(jump_target="earlier") if older else event, 0.0)
    assert put_together.finished(0.0) == []
    assert put_together.older == 1


def test_logs_of_unknown_packets_are_forgotten() -> None:
    name = "legacy-forwarded"
    put_together = TraceAssembler(table_of(name), legacy=True)
    for event in events(name):
        if event.chain.legacy:
            put_together.take(event, 0.0)
    put_together.finished(LOGGED_SECONDS)
    for event in events(name):
        if not event.chain.legacy:
            put_together.take(event, LOGGED_SECONDS)
    (trace,) = put_together.finished(LOGGED_SECONDS + QUIET_SECONDS)
    assert trace.events == ()


@pytest.mark.parametrize("reader", [trace_events, logged_events])
def test_malformed_datagrams(reader: type) -> None:
    datagram = bytes.fromhex((RECORDED / "legacy-forwarded.txt").read_text().splitlines()[1].split()[1])
    with pytest.raises(MalformedMessageError):
        list(reader(datagram[:-8]))


def test_headers_of_a_packet() -> None:
    packet = bytes.fromhex("4500002800004000400600000a0a00020a600014") + b"\x9c\x40\x00\x50" + bytes(16)
    assert read_packet(packet) == Headers("10.10.0.2", 40000, "10.96.0.20", 80, Protocol.TCP)
    assert read_packet(packet[:9] + b"\x01" + packet[10:]) is None
    assert read_packet(packet[:21]) is None
    assert read_packet(b"") is None
