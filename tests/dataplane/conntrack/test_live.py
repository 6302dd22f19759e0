"""How many flows a backend still has: those that lead there and have not ended, of every protocol."""

from __future__ import annotations

import asyncio

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import ESTABLISHED, made
from vipd.dataplane.conntrack.entries import TCP_CLOSE, TCP_TIME_WAIT, Entry, SocketAddress
from vipd.dataplane.conntrack.live import live_flows
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.model.service import Protocol

TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
VIPS = {protocol: (f"10.96.0.{number}", 53) for number, protocol in enumerate((TCP, UDP, SCTP), 1)}
NODE_PORT, HOST = 30053, "10.10.0.1"
B1, B2 = ("10.244.0.1", 5353), ("10.244.0.2", 5353)
FORWARDINGS = [
    forwarding(*vip, B1, B2, protocol=protocol, node_port=NODE_PORT) for protocol, vip in VIPS.items()
]


def flow(
    protocol: Protocol,
    backend: SocketAddress = B1,
    to: SocketAddress | None = None,
    state: int = 0,
    port: int = 40000,
) -> Entry:
    state = state or (ESTABLISHED if protocol is TCP else 0)
    return made(("10.10.0.2", port), to or VIPS[protocol], backend, protocol=protocol, tcp_state=state)


def counted(*entries: Entry, backends: frozenset[SocketAddress] = frozenset({B1})) -> int:
    table = FakeTable(entries)
    return asyncio.run(live_flows(FORWARDINGS, backends, [HOST], table.connect))


@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP])
def test_flows_of_every_protocol_count(protocol: Protocol) -> None:
    assert counted(flow(protocol)) == 1
    assert counted(flow(protocol), flow(protocol, port=40001), flow(protocol, B2)) == 2
    assert counted(flow(protocol), flow(protocol, B2), backends=frozenset({B1, B2})) == 2
    assert counted(flow(protocol, to=(HOST, NODE_PORT))) == 1, "through the node port"
    assert counted() == 0


@pytest.mark.parametrize("state", [TCP_TIME_WAIT, TCP_CLOSE])
def test_what_both_sides_have_closed_does_not_count(state: int) -> None:
    assert counted(flow(TCP, state=state), flow(TCP, port=40001)) == 1


def test_what_did_not_pass_a_forwarding_does_not_count() -> None:
    """Somebody who asks the backend itself, or by way of somebody else's address."""
    assert counted(flow(UDP, to=B1), flow(UDP, to=("10.96.0.99", 53)), flow(UDP, to=(HOST, 99))) == 0


def test_flows_of_each_protocol_are_added_up() -> None:
    assert counted(*map(flow, VIPS)) == len(VIPS)


def test_a_table_that_cannot_be_read_is_no_zero() -> None:
    table = FakeTable([flow(UDP)])
    table.faults = [Fault.REFUSED] * 100
    with pytest.raises(ConntrackError):
        asyncio.run(live_flows(FORWARDINGS, {B1}, [HOST], table.connect))
