"""The pure parts: rules that come and go, totals that never fall, rates."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.conntrack.forwardings import forwarding
from vipd.cli.rates import Rates
from vipd.dataplane.counting import BackendKey, RefusedKey
from vipd.dataplane.iptables.counters import counter as rule_counter
from vipd.dataplane.iptables.counters import counter_deltas
from vipd.dataplane.iptables.counters.counter import RuleCounter
from vipd.dataplane.iptables.counters.counter_deltas import (
    KEPT_ROUNDS,
    MAX_RULES_OF_CHAIN,
    ChainName,
    CounterDeltas,
)
from vipd.dataplane.iptables.counters.messages import (
    RULE_ADDED,
    RULE_DELETED,
    TABLE_DELETED,
    Counted,
    RuleMessages,
    TableGone,
)
from vipd.dataplane.iptables.counters.reading import read_saved_counts
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.nftables import flow_counter
from vipd.dataplane.nftables.flow_counter import Element, ElementCounter
from vipd.dataplane.nftables.layout import FLOWS, NftSet
from vipd.host.netlink import attribute, split
from vipd.model.flow_limits import Limit
from vipd.model.formatting import per_second, size
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.observe.flow_stats import collector, totals_file
from vipd.observe.flow_stats.collector import FlowCollector
from vipd.observe.flow_stats.refusals import Refusals
from vipd.observe.flow_stats.totals import KEPT_SECONDS, FlowTotals

CHAIN = "VIPD-SEP-AAAAAAAAAAAAAAAA"
NAMES = Names("VIPD")
KEY = ForwardingKey("web", "", Protocol.TCP, Family.IPV4)
ONE, TWO = BackendKey(KEY, "10.0.0.1", 80), BackendKey(KEY, "10.0.0.2", 80)


def counted(handle: int, packets: int, family: Family = Family.IPV4) -> Counted:
    return Counted(family, CHAIN, handle, packets)


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
    for what, number in events:
        if what == "flows":
            packets += number
            total += number
        elif what == "rewrite":
            untold.append(counted(handle, packets))
            handle, packets = handle + 1, 0
        elif what == "tell":
            for each in untold:
                deltas.ended(each)
            untold = []
        else:
            deltas.read(stale)  # a reading that began before what has happened since
            stale = [counted(handle, packets)]
        sum_taken += taken(deltas)
        assert sum_taken <= total
    for each in untold:
        deltas.ended(each)
    deltas.read([counted(handle, packets)])
    assert sum_taken + taken(deltas) == total


def test_a_counter_that_somebody_sets_to_zero_goes_on() -> None:
    deltas = CounterDeltas()
    deltas.read([counted(1, 10)])
    deltas.read([counted(1, 3)])
    assert taken(deltas) == 13


def test_the_same_handle_in_a_new_table_is_another_rule() -> None:
    deltas = CounterDeltas()
    deltas.read([counted(1, 10)])
    deltas.ended(counted(1, 12))
    deltas.reset(Family.IPV4)
    deltas.read([counted(1, 5)])
    assert taken(deltas) == 17


def test_a_restarted_daemon_goes_on_where_the_last_one_was() -> None:
    first, second = CounterDeltas(), CounterDeltas()
    first.read([counted(1, 10), counted(2, 7)])
    first.ended(counted(2, 8))
    assert taken(first) == 18
    second.restore(first.saved_state())
    second.read([counted(1, 11), counted(3, 4)])
    assert taken(second) == 5


def test_rules_that_are_gone_are_forgotten_in_the_end() -> None:
    deltas = CounterDeltas()
    deltas.read([counted(1, 10)])
    for _ in range(KEPT_ROUNDS):
        assert deltas.holds((Family.IPV4, CHAIN))
        deltas.drop_unseen(Family.IPV4, deltas.read_all(Family.IPV4))
    deltas.drop_unseen(Family.IPV4, deltas.read_all(Family.IPV4))
    assert not deltas.holds((Family.IPV4, CHAIN))
    assert deltas.saved_state() == []


def test_a_chain_that_is_only_expected_has_no_rules() -> None:
    deltas, chain = CounterDeltas(), (Family.IPV4, CHAIN)
    deltas.expect([chain])
    assert not deltas.holds(chain)
    deltas.read([counted(1, 10)])
    deltas.drop_unseen(Family.IPV4, deltas.read_all(Family.IPV4))
    deltas.expect([chain])
    assert deltas.holds(chain)
    assert taken(deltas) == 10
    deltas.forget(chain)
    assert not deltas.holds(chain)


def rule(
    kind: int,
    chain: str = CHAIN,
    packets: int = 5,
    *,
    hairpin: bool = False,
    table: str = "nat",
    comment: str = "",
) -> bytes:
    """A message about a rule as the kernel lays it out."""
    numbers = attribute(1, struct.pack(">Q", 999)) + attribute(2, struct.pack(">Q", packets))
    counter = attribute(1, attribute(1, b"counter\0") + attribute(2, numbers))
    jump = attribute(1, attribute(1, b"immediate\0") + attribute(2, attribute(2, b"VIPD-MARK-MASQ\0")))
    target = jump if hairpin else attribute(1, attribute(1, b"target\0"))
    body = attribute(1, table.encode() + b"\0") + attribute(2, chain.encode() + b"\0")
    body += attribute(3, struct.pack(">Q", 77)) + attribute(4, counter + target)
    body += attribute(7, bytes([0, len(comment) + 1]) + comment.encode() + b"\0") if comment else b""
    return struct.pack("=IHHIIBBH", 20 + len(body), kind, 0, 0, 0, 2, 0, 0) + body


def listed(messages: RuleMessages, datagram: bytes) -> list[Counted]:
    """The counts of rules that a listing adds."""
    found = (
        messages.counted(datagram, start, end)
        for kind, *_, start, end in split(datagram)
        if kind == RULE_ADDED
    )
    return [each for each in found if each]


def test_messages_about_translating_rules_are_read() -> None:
    messages = RuleMessages(NAMES)
    deleted = rule(RULE_DELETED, hairpin=True) + rule(RULE_DELETED) + rule(RULE_ADDED, packets=9)
    assert list(messages.ended(deleted)) == [Counted(Family.IPV4, CHAIN, 77, 5)]
    assert listed(messages, deleted) == [Counted(Family.IPV4, CHAIN, 77, 9)]
    others = rule(RULE_DELETED, "VIPD-SVC-AAAAAAAAAAAAAAAA") + rule(RULE_DELETED, table="raw")
    assert list(messages.ended(others)) == []
    table = attribute(1, b"nat\0")
    gone = struct.pack("=IHHIIBBH", 20 + len(table), TABLE_DELETED, 0, 0, 0, 10, 0, 0) + table
    assert list(messages.ended(gone)) == [TableGone(Family.IPV6)]


@given(st.integers(1, 200), st.binary(max_size=40))
def test_messages_that_are_cut_or_garbled_raise_nothing_else(cut: int, garbage: bytes) -> None:
    messages, whole = RuleMessages(NAMES), rule(RULE_DELETED)
    for data in (whole[:-cut], whole + garbage, whole[: cut % len(whole)] + garbage + whole[cut:]):
        try:
            list(messages.ended(data))
        except (ValueError, struct.error):
            continue


def test_saved_rules_are_read() -> None:
    text = (
        "*filter\n[7:7] -A VIPD-SEP-AAAAAAAAAAAAAAAA -j DNAT --x\nCOMMIT\n"
        f"*nat\n:{CHAIN} - [0:0]\n[4:240] -A {CHAIN} -s 10.0.0.1/32 -j VIPD-MARK-MASQ\n"
        f"[12:720] -A {CHAIN} -p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80\n"
        f"[3:1] -A OTHER -m comment --comment {CHAIN} -j DNAT --to-destination 10.0.0.1:80\nCOMMIT\n"
    )
    assert read_saved_counts(text, Family.IPV4, NAMES) == [counted(0, 12)]


def test_rules_of_limits_are_counted_by_their_limit() -> None:
    limits = CHAIN.replace("SEP", "LIM")
    for limit in Limit:
        whole = rule(RULE_DELETED, limits, 7, comment=f"web over {limit}")
        (ended,) = RuleMessages(NAMES).ended(whole)
        assert ended == Counted(Family.IPV4, f"{limits} {limit}", 77, 7)
    assert list(RuleMessages(NAMES).ended(rule(RULE_DELETED, limits, comment="web"))) == []
    text = (
        f'*nat\n[4:240] -A {limits} -m comment --comment "web over connections" -m connlimit -j ACCEPT\n'
        f'[5:240] -A {limits} -m comment --comment "web over connections_per_client" -j ACCEPT\nCOMMIT\n'
    )
    assert [
        (each.chain.split()[1], each.packets) for each in read_saved_counts(text, Family.IPV4, NAMES)
    ] == [
        ("connections", 4),
        ("connections_per_client", 5),
    ]


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

    def count(self, flows: int, endpoint: str = "10.0.0.1", address: str = "10.96.0.10") -> None:
        element = (address, "tcp", "80", endpoint, "80")
        self.counts[element] = self.counts.get(element, 0) + flows

    def serve(self, name: str, *endpoints: str, node_port: int | None = None) -> None:
        ends = tuple((each, 80) for each in endpoints)
        self.forwardings = [
            forwarding("10.96.0.10", 80, *ends, protocol=Protocol.TCP, name=name, node_port=node_port)
        ]

    def counter(self, before: ElementCounter | None = None) -> ElementCounter:
        made = ElementCounter(self.read, lambda: self.forwardings, delete=self.delete)
        if before:
            made.restore(json.loads(json.dumps(before.saved_state())))
        return made


def grown(counter: ElementCounter) -> dict[BackendKey, int]:
    return dict(asyncio.run(counter.take()))


def test_counts_of_the_kernel_become_growth_over_a_restart_too() -> None:
    table = PlayedTable()
    table.serve("web", "10.0.0.1")
    first = table.counter()
    table.count(5)
    assert grown(first) == {ONE: 5}
    table.count(2)
    assert grown(first) == {ONE: 2}
    second = table.counter(first)
    assert grown(second) == {}
    table.counts.clear()
    table.count(1)
    assert grown(second) == {ONE: 1}, "the table began anew"
    second.restore([["nonsense"], None])


def test_what_the_kernel_has_no_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are replaced and backends come and go by the thousand; a reading may also say nothing at all."""
    monkeypatch.setattr(flow_counter, "MAX_FORMER_ELEMENTS", 10)
    table = PlayedTable()
    counter = table.counter()
    for number in range(1, 200):
        endpoint = f"10.0.1.{number}"
        table.serve("web", endpoint)
        table.counts.clear()
        table.count(number, endpoint)
        assert sum(grown(counter).values()) == number
        there, table.counts = table.counts, {}
        assert grown(counter) == {}
        table.counts = there
        assert grown(counter) == {}, "nothing counts twice"
    memory: Any = counter.saved_state()
    assert len(memory["flows"]) <= 12


def test_counts_of_backends_that_are_gone_are_deleted_and_none_is_lost() -> None:
    table, total, sum_grown = PlayedTable(), 0, 0
    counter = table.counter()
    for number in range(1, 40):
        endpoints = [f"10.0.{part}.{number}" for part in (1, 2)]
        table.serve("web", *endpoints)
        for endpoint in endpoints:
            table.count(5, endpoint)
            total += 5
        sum_grown += sum(grown(counter).values())
        table.serve("web", endpoints[0])
        table.count(1, endpoints[1])  # one was on its way
        total += 1
        sum_grown += sum(asyncio.run(counter.collect_garbage()).values())
        assert {element[3] for element in table.counts} == {endpoints[0]}
        assert sum_grown == total
    # It comes back: its count begins at zero, whatever it was before.
    table.serve("web", "10.0.2.1")
    table.count(100, "10.0.2.1")
    assert sum(grown(counter).values()) == 100
    again = table.counter(counter)
    table.count(1, "10.0.2.1")
    assert sum(grown(again).values()) == 1


def test_counts_of_services_that_may_only_be_missing_are_kept_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = PlayedTable()
    table.count(5)
    counter = table.counter()
    assert grown(counter) == {}
    asyncio.run(counter.collect_garbage())
    table.serve("web", "10.0.0.1")
    assert grown(counter) == {ONE: 5}
    monkeypatch.setattr(flow_counter, "FLOWS", replace(FLOWS, size=10))
    for number in range(6):
        table.count(1, address=f"10.96.1.{number}")
    grown(counter)
    asyncio.run(counter.collect_garbage())
    assert len(table.counts) == 1


def test_rules_that_end_while_readings_fail_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_deltas, "MAX_ENDED", 50)
    deltas = CounterDeltas()
    deltas.read([counted(0, 7)])
    for handle in range(1, 1000):
        deltas.ended(counted(handle, 1))
        assert sum(map(len, deltas._rules.values())) <= 52
    assert taken(deltas) == 7 + 999


def test_a_chain_that_is_rewritten_all_the_time_has_few_known_rules() -> None:
    deltas = CounterDeltas()
    for handle in range(1, 1000):
        deltas.ended(counted(handle, 1))
    deltas.read([counted(1000, 5)])
    assert max(map(len, deltas._rules.values())) == MAX_RULES_OF_CHAIN
    assert taken(deltas) == 999 + 5
    deltas.read([counted(1000, 7)])
    deltas.ended(counted(999, 1))
    assert taken(deltas) == 2


def test_a_backend_that_has_left_counts_to_its_end() -> None:
    table = PlayedTable()
    table.serve("web", "10.0.0.1", "10.0.0.2")
    counter = table.counter()
    table.count(5)
    table.serve("web", "10.0.0.2")
    assert grown(counter) == {ONE: 5}
    table.count(1)
    table.forwardings = []
    assert grown(counter) == {ONE: 1}, "the service had the frontend last"
    table.count(1)
    assert grown(table.counter(counter)) == {ONE: 1}


def test_who_takes_over_a_frontend_begins_at_zero() -> None:
    table = PlayedTable()
    table.serve("web", "10.0.0.1")
    counter = table.counter()
    table.count(5)
    assert grown(counter) == {ONE: 5}
    table.serve("other", "10.0.0.1")
    table.count(3)
    assert grown(counter) == {BackendKey(KEY._replace(service="other"), "10.0.0.1", 80): 3}


def test_a_service_that_is_not_known_yet_has_its_flows_when_it_is() -> None:
    table = PlayedTable()
    counter = table.counter()
    table.count(5)
    assert grown(counter) == {}
    table.serve("web", "10.0.0.1")
    assert grown(counter) == {ONE: 5}


def test_a_node_port_counts_at_any_address() -> None:
    table = PlayedTable()
    table.serve("web", "10.0.0.1", node_port=80)
    table.count(5, address="192.0.2.1")
    table.count(1)
    assert grown(table.counter()) == {ONE: 6}


def test_a_service_keeps_the_flows_of_backends_that_are_forgotten() -> None:
    totals = FlowTotals()
    totals.add({ONE: 5, TWO: 6})
    totals.expire({ONE}, 0.0)
    totals.expire({ONE}, KEPT_SECONDS)
    assert totals.flows_of_backend(TWO) == 6
    totals.expire({ONE}, KEPT_SECONDS + 1)
    assert (totals.flows_of_backend(TWO), totals.flows_of_service("web")) == (0, 11)
    totals.expire({ONE}, 2 * KEPT_SECONDS)
    totals.expire(set(), 2 * KEPT_SECONDS)
    assert totals.flows_of_service("web") == 11
    totals.expire(set(), 3 * KEPT_SECONDS + 1)
    assert totals.flows_of_service("web") == 0


def test_a_backend_that_comes_back_in_time_goes_on() -> None:
    totals = FlowTotals()
    totals.add({ONE: 5})
    totals.expire(set(), 0.0)
    totals.expire({ONE}, KEPT_SECONDS)
    totals.expire(set(), KEPT_SECONDS + 1)
    totals.expire(set(), 2 * KEPT_SECONDS)
    assert totals.flows_of_backend(ONE) == 5


def test_the_book_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, boot = tmp_path / "counters.json", tmp_path / "boot"
    boot.write_text("one")
    assert totals_file.read(path, boot).totals.flows_of_service("web") == 0
    totals = FlowTotals()
    totals.add({ONE: 5, TWO: 6})
    totals.expire({TWO}, 3.0)
    refusals = Refusals()
    refusals.add({RefusedKey(KEY, Limit.CONNECTIONS): 4})
    saved = totals_file.SavedTotals(totals, refusals, [1, 2])
    totals_file.write(path, asyncio.run(totals_file.value_of(saved, boot)))
    page = totals_file.read(path, boot)
    assert (page.totals.to_json(), page.counter_state) == (totals.to_json(), [1, 2])
    assert page.refusals.to_json() == {"web": {"connections": 4}}
    boot.write_text("another boot: the kernel's counters began anew")
    assert totals_file.read(path, boot).counter_state is None
    assert totals_file.read(path, boot).totals.flows_of_service("web") == 11


@pytest.mark.parametrize("text", ["", "[]", "{", '{"services": 3}', '{"services": {"web": {"former": 1}}}'])
def test_a_damaged_book_is_a_value_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counters.json"
    path.write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011 (whatever it says, it is told in the log)
        totals_file.read(path)


class Scripted:
    """A FlowCounter that tells what the test says."""

    def __init__(self) -> None:
        self.flows: dict[BackendKey, int] | OSError = {}
        self.remembered: object = None
        self.deleted: list[int] = []
        self.on_disk: Callable[[], int] = int
        self.seconds = 0.0

    async def take(self) -> dict[BackendKey, int]:
        if isinstance(self.flows, OSError):
            raise self.flows
        taken, self.flows = self.flows, {}
        return taken

    async def refused(self) -> dict[RefusedKey, int]:
        """No limits."""
        return {}

    async def collect_garbage(self) -> dict[BackendKey, int]:
        """What is deleted must be on disk."""
        self.deleted.append(self.on_disk())
        return {}

    def saved_state(self) -> object:
        return ["what was taken"]

    def restore(self, memory: object) -> None:
        self.remembered = memory


def test_a_closed_count_is_gone_on_with(tmp_path: Path) -> None:
    async def run(counter: Scripted, flows: dict[BackendKey, int]) -> int:
        counting = FlowCollector(counter, tmp_path / "counters.json", list)
        counter.flows = flows
        await counting.close()
        return counting.totals.flows_of_service("web")

    assert asyncio.run(run(Scripted(), {ONE: 5})) == 5
    again = Scripted()
    assert asyncio.run(run(again, {ONE: 2, TWO: 3})) == 10
    assert again.remembered == ["what was taken"]


def test_counts_leave_the_kernel_only_when_they_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "counters.json"
    monkeypatch.setattr(collector, "EXPIRE_EVERY_SECONDS", 0.0)

    async def run(counter: Scripted) -> None:
        counting = FlowCollector(counter, path, list)
        counter.flows = {ONE: 5}
        await counting.collect_now()
        counter.flows = {ONE: 2}
        await counting.collect_now()  # not written yet: the last time was a moment ago
        assert counter.deleted == [5]
        monkeypatch.setattr(collector, "WRITE_EVERY_SECONDS", 0.0)
        monkeypatch.setattr(collector, "WRITE_TIME_SHARE", 1e9)
        await counting.collect_now()
        assert counter.deleted == [5, 7]
        path.unlink()
        path.mkdir()
        counter.flows = {ONE: 1}
        await counting.collect_now()
        assert counter.deleted == [5, 7], "the disk does not take it"

    counter = Scripted()
    counter.on_disk = lambda: totals_file.read(path).totals.flows_of_service("web")
    asyncio.run(run(counter))


def test_a_damaged_book_means_counting_from_what_the_kernel_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "counters.json"
    path.write_text("{")
    counter = Scripted()
    assert FlowCollector(counter, path, list).totals.flows_of_service("web") == 0
    assert counter.remembered is None
    assert f"{path} cannot be read" in caplog.text


def test_a_kernel_that_cannot_be_read_is_for_the_loop_to_report(tmp_path: Path) -> None:
    async def run() -> None:
        counter = Scripted()
        counting = FlowCollector(counter, tmp_path / "counters.json", list)
        counter.flows = OSError(1, "not permitted")
        await counting.refresh()
        await counting.collect_now()
        await counting.close()
        with pytest.raises(OSError, match="not permitted"):
            await counting.run()

    asyncio.run(run())


def stats_answer(second: int, conntrack_second: int, new: int, bytes_in: int | None) -> dict[str, object]:
    row = {"name": "web", "new_flows": new, "flows": 1, "bytes_in": bytes_in}
    row |= dict.fromkeys(("packets_in", "packets_out", "bytes_out"))
    at = f"2026-01-01T00:00:{second:02d}.000Z"
    return {"at": at, "conntrack": {"at": f"2026-01-01T00:00:{conntrack_second:02d}.000Z"}, "services": [row]}


def test_rates_are_of_the_time_between_two_readings() -> None:
    rates = Rates()
    rates.take(stats_answer(0, 0, 10, 1000))
    assert rates.of(("web",))["new_flows"] is None
    rates.take(stats_answer(2, 0, 30, 1000))
    assert (rates.of(("web",))["new_flows"], rates.of(("web",))["bytes_in"]) == (10.0, None)
    rates.take(stats_answer(2, 4, 99, 3000))
    assert (rates.of(("web",))["new_flows"], rates.of(("web",))["bytes_in"]) == (10.0, 500.0)
    rates.take(stats_answer(3, 5, 30, 100))
    assert (rates.of(("web",))["new_flows"], rates.of(("web",))["bytes_in"]) == (0.0, 0.0)
    rates.take(stats_answer(4, 6, 30, None))
    assert rates.of(("web",))["bytes_in"] is None


def test_numbers_are_short() -> None:
    sizes = [0, 999, 1000, 1024, 10 * 1024, 1023 * 1024, 5 * 2**30, 2**70]
    assert [size(n) for n in sizes] == ["0", "999", "1.0K", "1.0K", "10K", "1.0M", "5.0G", "1048576P"]
    assert [per_second(n) for n in (0, 0.04, 0.5, 9.94, 9.96, 1520)] == [
        "0",
        "0.0",
        "0.5",
        "9.9",
        "10",
        "1520",
    ]


def test_a_reading_that_fails_is_of_no_time(tmp_path: Path) -> None:
    """So that what comes with the next one is spread over all the time since the last good one."""

    async def run() -> None:
        counter = Scripted()
        counting = FlowCollector(counter, tmp_path / "counters.json", list)
        await counting.collect_now()
        good = counting.read_at
        counter.flows = OSError(1, "not permitted")
        await counting.collect_now()
        assert counting.read_at == good
        counter.flows = {ONE: 5}
        await counting.collect_now()
        assert counting.read_at > good

    asyncio.run(run())


def test_what_is_gone_is_forgotten_although_the_clock_was_set_back() -> None:
    totals = FlowTotals()
    totals.add({ONE: 1})
    totals.expire((), 1e9)
    totals.expire((), 1000.0)
    totals.expire((), 1000.0 + KEPT_SECONDS + 1)
    assert totals.flows_of_service("web") == 0


def test_the_copy_of_many_totals_lets_other_tasks_run() -> None:
    """At 10,000 services one piece held the event loop for a tenth of a second."""
    totals, number = FlowTotals(), 20 * totals_file.COPIED_AT_ONCE
    keys = (ForwardingKey(f"s{n}", "", Protocol.TCP, Family.IPV4) for n in range(number))
    totals.add({BackendKey(key, "10.244.0.1", 80): 7 for key in keys})

    async def story() -> int:
        turns = 0
        copying = asyncio.ensure_future(
            totals_file.value_of(totals_file.SavedTotals(totals, Refusals(), None))
        )
        while not copying.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await copying)["totals"] == totals.to_json()
        return turns

    assert asyncio.run(story()) >= 20


def test_counters_of_many_rules_are_entered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 100,000 services one piece held the event loop for half a second and more."""
    monkeypatch.setattr(rule_counter, "ENTERED_AT_ONCE", 10)
    number, counter = 100, RuleCounter(Names("VIPD"))
    made = [
        forwarding(f"10.96.1.{n}", 80, ("10.0.0.1", 80), protocol=Protocol.TCP, name=f"s{n}")
        for n in range(1, number + 1)
    ]
    counter.use(Family.IPV4, None)
    counter.update({each.key: each for each in made})

    def read(family: Family, known: Sequence[ChainName]) -> tuple[list[Counted], float]:
        return [Counted(family, chain, at, 7) for at, (_, chain) in enumerate(known)], 0.0

    monkeypatch.setattr(counter, "_read_kernel", read)

    async def story() -> int:
        turns, taking = 0, asyncio.ensure_future(counter.take())
        while not taking.done():
            await asyncio.sleep(0)
            turns += 1
        assert sorted((await taking).values()) == [7] * number
        return turns

    assert asyncio.run(story()) >= 2 * number / 10
