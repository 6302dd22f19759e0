"""Live flows lower the shares of busy backends, on the way that checks and slow start take."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace
from types import MappingProxyType

from tests.dataplane.conntrack.fake_table import FakeTable
from tests.dataplane.conntrack.kernel import ESTABLISHED, made
from vipd.control import connection_balancer
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.connection_balancer import ConnectionBalancer
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.conntrack.entries import TCP_TIME_WAIT
from vipd.dataplane.conntrack.live_counts import LiveCounts, live_counts
from vipd.dataplane.counting import BackendKey
from vipd.model.backend_status import AdminState, BackendStatus, BackendStatuses
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Backend, Balance, Family, Masquerade, Protocol, Service, ServicePort

POLICY = SelectionPolicy(dict.fromkeys(Family, Masquerade.FORWARDED))
A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
PORTS = (ServicePort(80, Protocol.TCP), ServicePort(443, Protocol.TCP))
WEB = Service(
    "web", ("10.96.0.10",), PORTS, (Backend(A), Backend(B), Backend(C)), balance=Balance.LEAST_CONNECTIONS
)


class Programmed:
    """A reconciler that selects at once, and a table whose flows the test sets."""

    def __init__(self, service: Service = WEB, statuses: BackendStatuses = MappingProxyType({})) -> None:
        self.tracker = BackendStatusTracker()
        self.services, self.statuses = {service.name: service}, statuses
        self.tracker.follow({service.name: service})
        self.forwardings: dict[str, tuple[Forwarding, ...]] = {}
        self.host_addresses = frozenset({"10.10.0.1"})
        self.flows: dict[tuple[str, int], int] = {}
        self.syncs = self.reads = 0
        self.seconds = 0.0
        self._select()

    def _select(self) -> None:
        for name, service in self.services.items():
            found = {**self.tracker.backend_statuses(service), **self.statuses}
            self.forwardings[name] = select_backends(service, POLICY, found)

    def request_sync(self) -> int:
        self.syncs += 1
        self._select()
        return self.syncs

    async def wait_synced(
        self, generation: int, timeout: float, services: Collection[str] | None = None
    ) -> bool:
        return True

    async def count(self, forwardings: Iterable[Forwarding], own: Collection[str]) -> LiveCounts:
        self.reads += 1
        found = {
            BackendKey(f.key, address, port): number
            for f in forwardings
            for (address, port), number in self.flows.items()
            if f.port == port
        }
        return LiveCounts(found, self.seconds)

    def shares(self) -> dict[str, float]:
        endpoints = self.forwardings["web"][0].endpoints
        total = sum(each.weight for each in endpoints)
        return {each.address: each.weight / total for each in endpoints}


def steps(programmed: Programmed, number: int, balancer: ConnectionBalancer | None = None) -> None:
    connection_balancer.STEP_SECONDS, before = 0.0, connection_balancer.STEP_SECONDS
    balancer = balancer or ConnectionBalancer(programmed, programmed.tracker, programmed.count)

    async def run() -> None:
        for _ in range(number):
            await balancer.run(asyncio.Event())

    try:
        asyncio.run(run())
    finally:
        connection_balancer.STEP_SECONDS = before


def test_the_flows_of_all_ports_lower_a_share_and_the_reason_says_so() -> None:
    programmed = Programmed()
    programmed.flows = {(A, 80): 400, (A, 443): 400, (B, 80): 100, (C, 443): 100}
    steps(programmed, 10)
    shares = programmed.shares()
    assert 0 < shares[A] < 0.05
    assert shares[B] == shares[C]
    assert "of its weight, for its live flows" in programmed.tracker.backend_statuses(WEB)[A].reason
    assert programmed.tracker.backend_statuses(WEB)[A].shown_weight == 1


def test_weights_are_respected_and_what_balances_is_not_written_again() -> None:
    weighted = replace(WEB, backends=(Backend(A, weight=3), Backend(B), Backend(C, weight=0)))
    programmed = Programmed(weighted)
    programmed.flows = {(A, 80): 300, (B, 80): 100}
    steps(programmed, 10)
    assert programmed.shares() == {A: 0.75, B: 0.25}
    assert programmed.syncs == 0


def test_a_constant_load_is_written_a_few_times_and_then_not_again() -> None:
    programmed = Programmed()
    programmed.flows = {(A, 80): 300, (B, 80): 100, (C, 80): 100}
    balancer = ConnectionBalancer(programmed, programmed.tracker, programmed.count)
    steps(programmed, 20, balancer)
    written = programmed.syncs
    assert 0 < written < 15
    steps(programmed, 20, balancer)
    assert programmed.syncs == written


def test_a_draining_backend_takes_no_part() -> None:
    programmed = Programmed(statuses={A: BackendStatus(admin=AdminState.DRAINING)})
    programmed.flows = {(A, 80): 5000, (B, 80): 100, (C, 80): 100}
    steps(programmed, 5)
    assert programmed.shares() == {B: 0.5, C: 0.5}
    assert programmed.syncs == 0


def test_a_service_that_balances_otherwise_again_has_its_weights_back() -> None:
    programmed = Programmed()
    programmed.flows = {(A, 80): 800}
    balancer = ConnectionBalancer(programmed, programmed.tracker, programmed.count)
    steps(programmed, 5, balancer)
    assert programmed.shares()[A] < 0.1
    other = replace(WEB, balance=Balance.RANDOM)
    programmed.services = {"web": other}
    programmed.tracker.follow(programmed.services)
    steps(programmed, 1, balancer)
    assert programmed.shares() == dict.fromkeys((A, B, C), 1 / 3)


def test_without_such_services_the_table_is_not_read() -> None:
    programmed = Programmed(replace(WEB, balance=Balance.RANDOM))
    woken = asyncio.Event()

    async def run() -> None:
        balancer = ConnectionBalancer(programmed, programmed.tracker, programmed.count)
        waiting = asyncio.create_task(balancer.run(woken))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        woken.set()
        await waiting

    asyncio.run(run())
    assert programmed.reads == 0


def test_closed_flows_and_those_of_others_do_not_count() -> None:
    (f, _) = select_backends(WEB, POLICY)
    vip, here = ("10.96.0.10", 80), ("10.10.0.2", 40000)
    table = FakeTable(
        [
            made(here, vip, (A, 80), protocol=Protocol.TCP, tcp_state=ESTABLISHED),
            made(("10.10.0.2", 40001), vip, (A, 80), protocol=Protocol.TCP, tcp_state=TCP_TIME_WAIT),
            made(("10.10.0.2", 40002), vip, (B, 80), protocol=Protocol.TCP, tcp_state=ESTABLISHED),
            made(
                ("10.10.0.2", 40003),
                ("10.96.0.11", 80),
                (B, 80),
                protocol=Protocol.TCP,
                tcp_state=ESTABLISHED,
            ),
            made(("10.10.0.2", 40004), (A, 80), (A, 80), protocol=Protocol.TCP, tcp_state=ESTABLISHED),
        ]
    )
    key = ForwardingKey("web", "80", Protocol.TCP, Family.IPV4)
    found = asyncio.run(live_counts([f], (), table.connect)).flows
    assert found == {BackendKey(key, A, 80): 1, BackendKey(key, B, 80): 1}
