"""Live flows lower the shares of busy backends, on the way that checks and slow start take."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace
from types import MappingProxyType

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable
from tests.dataplane.conntrack.kernel import ESTABLISHED, made
from tests.lab.simulated_time import simulate
from vipd.control import connection_balancer
from vipd.control.announcements import why_unserved
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.connection_balancer import REPORT_EVERY_SECONDS, ConnectionBalancer
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.control.service_status import service_status
from vipd.dataplane.conntrack.entries import TCP_TIME_WAIT
from vipd.dataplane.conntrack.live_counts import LiveCounts, live_counts
from vipd.dataplane.counting import BackendKey
from vipd.host.systemd.fields import ATTRIBUTE
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
        self.waited: list[int] = []
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
        self.waited.append(generation)
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
    before = connection_balancer.STEP_SECONDS, connection_balancer.LOOK_SECONDS
    connection_balancer.STEP_SECONDS = connection_balancer.LOOK_SECONDS = 0.0
    balancer = balancer or ConnectionBalancer(programmed, programmed.tracker, programmed.count)

    async def run() -> None:
        for _ in range(number):
            await balancer.run(asyncio.Event())

    try:
        asyncio.run(run())
    finally:
        connection_balancer.STEP_SECONDS, connection_balancer.LOOK_SECONDS = before


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
    steps(programmed, 60, balancer)
    written = programmed.syncs
    assert 0 < written < 10
    steps(programmed, 20, balancer)
    assert programmed.syncs == written


def test_each_reading_waits_for_the_rules_of_the_one_before() -> None:
    programmed = Programmed()
    programmed.flows = {(A, 80): 800}
    steps(programmed, 3)
    assert programmed.waited == [*range(1, programmed.syncs + 1)] != []


def test_a_table_that_takes_long_to_read_is_read_seldom() -> None:
    async def reads_in_a_minute(seconds: float) -> int:
        programmed = Programmed()
        programmed.seconds = seconds
        balancer = ConnectionBalancer(programmed, programmed.tracker, programmed.count)
        loop = asyncio.get_running_loop()
        while loop.time() < 59.5:
            await balancer.run(asyncio.Event())
        return programmed.reads

    assert simulate(reads_in_a_minute(0.0)) == 60
    assert simulate(reads_in_a_minute(0.5)) == 6, "10 s apart: a twentieth of the time"


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


LIMITED = replace(
    WEB, balance=Balance.RANDOM, backends=(Backend(A, max_connections=100), Backend(B), Backend(C))
)


def test_a_backend_with_its_maximum_of_flows_gets_none_until_a_twentieth_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    programmed = Programmed(LIMITED)
    balancer = ConnectionBalancer(programmed, programmed.tracker, programmed.count)
    programmed.flows = {(A, 80): 50, (A, 443): 49, (B, 80): 5000}
    steps(programmed, 1, balancer)
    assert programmed.shares() == dict.fromkeys((A, B, C), 1 / 3)
    programmed.flows = {(A, 80): 50, (A, 443): 50}
    steps(programmed, 2, balancer)
    assert programmed.shares() == dict.fromkeys((B, C), 1 / 2)
    assert programmed.forwardings["web"][0].without_new_flows[0].address == A, "its flows go on"
    assert programmed.tracker.backend_statuses(LIMITED)[A].reason == "full: it has its 100 connections"
    programmed.flows = {(A, 80): 96}
    steps(programmed, 1, balancer)
    assert A not in programmed.shares()
    programmed.flows = {(A, 80): 95}
    steps(programmed, 1, balancer)
    assert A in programmed.shares()
    assert programmed.syncs == 2
    programmed.flows = {(A, 80): 100}
    steps(programmed, 1, balancer)
    assert [record.message for record in caplog.records] == [
        f"web: {A} has its 100 connections, and gets no new flows"
    ], "at most once in ten minutes"


def test_a_burst_goes_little_above_a_maximum_and_rules_are_written_once_or_twice_a_second() -> None:
    """120 flows in a second to a backend that takes 20. Then single flows end and begin all the time."""
    programmed = Programmed(replace(LIMITED, backends=(Backend(A, max_connections=20), Backend(B))))

    async def story() -> tuple[int, int]:
        balancer = ConnectionBalancer(
            programmed, programmed.tracker, programmed.count, lambda: 1000 + sum(programmed.flows.values())
        )
        running = asyncio.create_task(forever(balancer))
        most = 0
        for _ in range(120):
            if A in programmed.shares():
                programmed.flows[A, 80] = most = programmed.flows.get((A, 80), 0) + 1
            await asyncio.sleep(1 / 120)
        reads = programmed.reads
        for number in range(100):
            programmed.flows[A, 80] = 19 if number % 2 else 20
            await asyncio.sleep(0.1)
        assert programmed.reads - reads <= 60
        reads = programmed.reads
        programmed.flows[A, 80] = 3
        await asyncio.sleep(10)
        assert programmed.reads - reads <= 12, "while little comes the table is read once a second"
        running.cancel()
        return most, programmed.syncs

    most, syncs = simulate(story())
    assert 20 <= most <= 20 + 13
    assert syncs <= 24


async def forever(balancer: ConnectionBalancer) -> None:
    while True:
        await balancer.run(asyncio.Event())


def test_only_backends_that_have_just_become_full_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    backends = (Backend(A, max_connections=1), Backend(B, max_connections=1), Backend(C, max_connections=1))
    programmed = Programmed(replace(LIMITED, backends=backends))

    async def run() -> None:
        balancer = ConnectionBalancer(programmed, programmed.tracker, programmed.count)
        for flows in ({(A, 80): 1}, {(A, 80): 1, (B, 80): 1, (C, 80): 1}):
            programmed.flows = flows
            await balancer.run(asyncio.Event())
            await asyncio.sleep(REPORT_EVERY_SECONDS)

    simulate(run())
    first, second = (getattr(record, ATTRIBUTE) for record in caplog.records)
    assert caplog.records[0].message == f"web: {A} has its 1 connection, and gets no new flows"
    assert (first["VIPD_BACKEND"], first["VIPD_CAUSE"]) == ((A,), ("max_connections",))
    assert first["VIPD_REASON"] == ("it has its 1 connection",)
    assert second["VIPD_BACKEND"] == (B, C)
    assert second["VIPD_REASON"] == (f"{B} has its 1 connection, {C} has its 1 connection",)


def test_a_service_without_limits_any_more_has_its_backends_back() -> None:
    programmed = Programmed(LIMITED)
    balancer = ConnectionBalancer(programmed, programmed.tracker, programmed.count)
    programmed.flows = {(A, 80): 100}
    steps(programmed, 1, balancer)
    assert A not in programmed.shares()
    programmed.services = {"web": replace(WEB, balance=Balance.RANDOM)}
    programmed.tracker.follow(programmed.services)
    steps(programmed, 1, balancer)
    assert A in programmed.shares()


@pytest.mark.parametrize("keeps", [False, True])
def test_while_all_are_full_flows_are_refused_and_the_address_stays_announced(*, keeps: bool) -> None:
    backends = (Backend(A, max_connections=1), Backend(B, max_connections=2), Backend(C))
    service = replace(LIMITED, backends=backends, keeps_unhealthy=keeps)
    programmed = Programmed(service, {C: BackendStatus(healthy=False)})
    programmed.flows = {(A, 80): 1, (B, 80): 2}
    steps(programmed, 1)
    (first, _) = programmed.forwardings["web"]
    assert (first.endpoints, first.has_endpoints) == ((), False), "nor does an unhealthy one serve"
    assert why_unserved([(first, False)]) is None
    told = service_status(
        service, programmed.forwardings["web"], programmed.tracker.backend_statuses(service)
    )
    assert (told.state, told.message.rpartition("; ")[2]) == ("no-backends", "2 full")


def test_backups_serve_while_the_others_are_full() -> None:
    backends = (Backend(A, max_connections=1), Backend(B, backup=True, max_connections=7))
    programmed = Programmed(replace(LIMITED, backends=backends))
    programmed.flows = {(A, 80): 1}
    steps(programmed, 1)
    assert programmed.shares() == {B: 1.0}
