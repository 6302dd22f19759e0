"""Arithmetic of counters: rules and elements come and go, totals never fall; what is forgotten, and when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.conntrack.forwardings import forwarding
from vipd.dataplane.counting import BackendKey, RefusedKey
from vipd.dataplane.iptables.counters.counter_deltas import CounterDeltas
from vipd.dataplane.iptables.counters.messages import TABLE_DELETED, Counted, RuleMessages, TableGone
from vipd.dataplane.iptables.counters.reading import read_saved_counts
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.nftables.flow_counter import Element, ElementCounter
from vipd.dataplane.nftables.layout import NftSet
from vipd.host.netlink import attribute, message, nfgenmsg
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.observe.flow_stats.collector import FlowCollector
from vipd.observe.flow_stats.refusals import Refusals
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.sources.cache import Cache

HOUR = 3600.0
CHAIN = "VIPD-SEP-AAAAAAAAAAAAAAAA"
KEY = ForwardingKey("web", "", Protocol.TCP, Family.IPV4)
ONE, TWO = BackendKey(KEY, "10.0.0.1", 80), BackendKey(KEY, "10.0.0.2", 80)


def counted(handle: int, packets: int) -> Counted:
    return Counted(Family.IPV4, CHAIN, handle, packets)


def taken(deltas: CounterDeltas) -> int:
    return sum(deltas.take(lambda _: True, deltas.grown()).values())


@given(st.lists(st.tuples(st.sampled_from(["flows", "rewrite", "read", "tell"]), st.integers(0, 9))))
def test_every_order_of_readings_and_notifications_counts_each_flow_once(
    events: list[tuple[str, int]],
) -> None:
    """The kernel's side is played here: a rule counts, is replaced, and its end is told some time later."""
    deltas, total, handle, packets, sum_taken = CounterDeltas(), 0, 1, 0, 0
    untold: list[Counted] = []
    stale = [counted(handle, 0)]
    for event, number in events:
        if event == "flows":
            packets += number
            total += number
        elif event == "rewrite":
            untold.append(counted(handle, packets))
            handle, packets = handle + 1, 0
        elif event == "tell":
            for item in untold:
                deltas.ended(item)
            untold = []
        else:
            deltas.read(stale)  # a reading that began before what has happened since
            stale = [counted(handle, packets)]
        sum_taken += taken(deltas)
        assert sum_taken <= total
    for item in untold:
        deltas.ended(item)
    deltas.read([counted(handle, packets)])
    assert sum_taken + taken(deltas) == total


def test_what_a_rule_has_counted_before_and_what_it_is_no_more() -> None:
    deltas, again = CounterDeltas(), CounterDeltas()
    deltas.read([counted(1, 10)])
    deltas.read([counted(1, 3)])
    assert taken(deltas) == 13, "somebody has set it to zero"
    deltas.ended(counted(1, 5))
    deltas.read([counted(1, 4)])
    assert taken(deltas) == 2, "a reading that began before the rule ended"
    deltas.reset(Family.IPV4)
    deltas.read([counted(1, 5), counted(2, 7)])
    assert taken(deltas) == 5 + 7, "the same handle in a new table is another rule"
    deltas.ended(counted(2, 8))
    assert taken(deltas) == 1
    again.restore(deltas.saved_state())
    again.read([counted(1, 6), counted(3, 4)])
    assert taken(again) == 5, "a restarted daemon goes on where the last one was"


def test_rules_that_are_rewritten_all_the_time_or_are_gone_are_few_and_none_counts_twice() -> None:
    def remembered() -> int:
        state: Any = deltas.saved_state()
        return len(state)

    deltas = CounterDeltas()
    for handle in range(1, 1000):
        deltas.ended(counted(handle, 1))
    deltas.read([counted(1000, 5)])
    assert (taken(deltas), remembered() <= 100) == (999 + 5, True)
    deltas.read([counted(1000, 7)])
    deltas.ended(counted(999, 1))
    assert taken(deltas) == 2
    for _ in range(5):
        deltas.drop_unseen(Family.IPV4, deltas.read_all(Family.IPV4))
    assert deltas.saved_state() == []


def test_a_table_that_is_gone_is_told() -> None:
    """Of rules that are gone, and of their counts: test_new_flows.py."""
    told = message(TABLE_DELETED, 0, 0, nfgenmsg(10) + attribute(1, b"nat\0"))
    assert list(RuleMessages(Names("VIPD")).ended(told)) == [TableGone(Family.IPV6)]


def test_saved_rules_of_limits_are_read() -> None:
    """Of backends: test_legacy.py."""
    chain, limits = CHAIN.replace("SEP", "LIM"), {"connections": 6, "connections_per_client": 5}
    lines = (f'[{n}:1] -A {chain} -m comment --comment "web over {x}" -j ACCEPT' for x, n in limits.items())
    found = read_saved_counts("\n".join(["*nat", *lines, "COMMIT"]), Family.IPV4, Names("VIPD"))
    assert found == [Counted(Family.IPV4, f"{chain} {x}", 0, n) for x, n in limits.items()]


class PlayedTable:
    """The nftables dataplane's counts, and who has which frontend."""

    def __init__(self) -> None:
        self.counts: dict[Element, int] = {}
        self.forwardings: list[Forwarding] = []

    async def read(self) -> dict[Element, int]:
        return dict(self.counts)

    async def delete(self, _: NftSet, keys: Collection[Element]) -> dict[Element, int]:
        """As the kernel does: nothing if one is missing; else each with its last count."""
        return {key: self.counts.pop(key) for key in keys} if {*keys} <= self.counts.keys() else {}

    def count(self, flows: int, endpoint: str = "10.0.0.1") -> None:
        element = ("10.96.0.10", "tcp", "80", endpoint, "80")
        self.counts[element] = self.counts.get(element, 0) + flows

    def serve(self, *endpoints: str) -> None:
        backends = tuple((item, 80) for item in endpoints)
        self.forwardings = [forwarding("10.96.0.10", 80, *backends, protocol=Protocol.TCP, name="web")]

    def counter(self, before: ElementCounter | None = None) -> ElementCounter:
        made = ElementCounter(self.read, lambda: self.forwardings, delete=self.delete)
        if before:
            made.restore(json.loads(json.dumps(before.saved_state())))
        return made


def grown(counter: ElementCounter) -> int:
    return sum(asyncio.run(counter.take()).values())


def test_counts_of_backends_that_are_gone_are_deleted_and_none_is_lost() -> None:
    table, total, sum_grown = PlayedTable(), 0, 0
    counter = table.counter()
    for number in range(1, 40):
        endpoints = [f"10.0.{part}.{number}" for part in (1, 2)]
        table.serve(*endpoints)
        for endpoint in endpoints:
            table.count(5, endpoint)
        sum_grown += grown(counter)
        table.serve(endpoints[0])
        table.count(1, endpoints[1])  # one was on its way
        total += 11
        sum_grown += sum(asyncio.run(counter.collect_garbage()).values())
        assert {element[3] for element in table.counts} == {endpoints[0]}
        assert sum_grown == total
    # It comes back: its count begins at zero, whatever it was before.
    table.serve("10.0.2.1")
    table.count(100, "10.0.2.1")
    assert grown(counter) == 100
    again = table.counter(counter)
    table.count(1, "10.0.2.1")
    assert grown(again) == 1


def test_totals_are_kept_for_an_hour_after_a_backend_or_a_service_is_gone() -> None:
    totals = FlowTotals()
    totals.add({ONE: 5, TWO: 6})

    def after(hours: float, *there: BackendKey) -> tuple[int, int, int]:
        totals.expire(set(there), hours * HOUR)
        flows = totals.flows_of_backend
        return flows(ONE), flows(TWO), totals.flows_of_service("web")

    assert after(0.0, ONE) == after(1.0, ONE) == (5, 6, 11)
    assert after(1.01, ONE) == (5, 0, 11), "its service keeps the flows"
    assert after(2.0) == (5, 0, 11)
    assert after(2.5, ONE) == after(3.2) == after(4.0) == (5, 0, 11), "it came back in time"
    assert after(4.5) == (0, 0, 0)
    totals.add({ONE: 1})
    totals.expire((), 1e9)
    assert after(1) == (1, 0, 1), "the clock was set back"
    assert after(2.01) == (0, 0, 0)


def test_refused_flows_go_on_in_the_next_run_and_are_reported_at_once_then_seldom() -> None:
    def refused(service: str, flows: int, limit: Limit = Limit.CONNECTIONS) -> dict[RefusedKey, int]:
        return {RefusedKey(KEY._replace(service=service), limit): flows}

    before, refusals = Refusals(), Refusals()
    before.add(refused("web", 5) | refused("dns", 0) | refused("web", 1, Limit.NEW_PER_CLIENT))
    refusals.restore(json.loads(json.dumps(before.to_json())))
    refusals.restore([{"nonsense": 1}, {"web": {"connections": -1, "other": 3}}])
    assert refusals.services() == {}, "no service is known yet"
    refusals.add(refused("web", 2) | refused("dns", 0))
    assert refusals.services() == {"web": {"connections": 7, "new_per_client": 1}, "dns": {"connections": 0}}
    assert refusals.take_report(100.0) == {"web": {"connections": 2}}
    for second in (101.0, 699.0):
        refusals.add(refused("web", 1))
        assert refusals.take_report(second) == {}
    assert refusals.take_report(700.0) == {"web": {"connections": 2}}
    refusals.add(refused("dns", 0))
    refusals.expire()
    refusals.expire()
    assert refusals.services().keys() <= {"dns"}, "a service without limits is forgotten"


class Scripted:
    """A counter of which a test says what it has counted."""

    def __init__(self, on_disk: Path) -> None:
        self.flows: dict[BackendKey, int] | OSError = {}
        self.on_disk, self.seconds, self.now = on_disk, 0.0, 0.0
        self.deleted: list[bool] = []
        """Of each time that counts were deleted, whether those taken before were on disk."""

    async def take(self) -> dict[BackendKey, int]:
        if isinstance(self.flows, OSError):
            raise self.flows
        taken, self.flows = self.flows, {}
        return taken

    async def refused(self) -> dict[RefusedKey, int]:
        """No limits."""
        return {}

    async def collect_garbage(self) -> dict[BackendKey, int]:
        self.deleted.append(self.on_disk.is_file())
        return {}

    def saved_state(self) -> object:
        """Writing takes a second of the test's time, so that it is seldom."""
        self.now += 1.0
        return []

    def restore(self, memory: object) -> None:
        """It counts from zero."""


def test_counts_leave_the_kernel_only_when_they_are_on_disk_and_a_failed_reading_is_of_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.db"
    counter = Scripted(path)
    monkeypatch.setattr(time, "monotonic", lambda: counter.now)

    async def story() -> None:
        collector = FlowCollector(counter, Cache(path), list)

        async def collect(flows: dict[BackendKey, int] | OSError, seconds: float = 150.0) -> int:
            counter.flows, counter.now = flows, counter.now + seconds
            await collector.collect_now()
            return len(counter.deleted)

        assert await collect({ONE: 5}) == 1
        assert await collect({ONE: 1}, 50.0) == 1, "it has just been written"
        good = collector.read_at
        assert await collect(OSError(1, "not permitted")) == 1
        assert collector.read_at == good, "what comes next is spread over all the time since"
        path.unlink()
        path.mkdir()
        assert await collect({ONE: 2}) == 1, "the disk does not take it"
        path.rmdir()
        assert await collect({ONE: 2}) == 2
        assert collector.totals.flows_of_service("web") == 10
        assert all(counter.deleted)
        assert await collect({ONE: 3}, 50.0) == 2
        written = path.read_bytes()
        counter.flows = OSError(1, "not permitted")
        await collector.close()
        assert path.read_bytes() == written, "the last reading failed: what is saved must lack nothing"
        with pytest.raises(OSError, match="not permitted"):
            await collector.run()

    asyncio.run(story())
