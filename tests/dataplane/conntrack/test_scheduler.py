"""What is remembered between runs: nothing is lost by failures, nothing is done too early or for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import made
from tests.lab.cached import cached, spoil
from vipd.dataplane.conntrack.cleaner import CleanupResult, Connect, clean
from vipd.dataplane.conntrack.entries import Entry, SocketAddress
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.conntrack.scheduler import (
    KEEP_REMOVED_SECONDS,
    MAX_REMOVED,
    MAX_RESETS,
    RESET_SECONDS,
    UNHURRIED_SECONDS,
    ConntrackScheduler,
)
from vipd.dataplane.conntrack.stale import FlowTargets, flow_targets
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.sources.cache import Cache

DNS, OTHER, WEB = ("10.96.0.10", 53), ("10.96.0.11", 53), ("10.96.0.20", 80)
B1, B2, B3 = ("10.244.0.1", 53), ("10.244.0.2", 53), ("10.244.0.3", 53)
INTERVAL = 300.0
ONE_GONE, GONE = {"backend gone": 1}, "backend gone"


def flow(to: SocketAddress, backend: SocketAddress, source_port: int = 40000) -> Entry:
    return made(("10.10.0.2", source_port), to, backend, replied=True)


def tcp(*backends: SocketAddress, at: SocketAddress = WEB, **more: object) -> Forwarding:
    """A TCP service that wants its flows ended."""
    return replace(forwarding(*at, *backends, protocol=Protocol.TCP), ends_flows=True, **more)  # type: ignore[arg-type]


class Bench:
    """A scheduler over a fake table with a clock of its own."""

    def __init__(self, *entries: Entry, checkpoint: Path | None = None, now: float = 1000.0) -> None:
        self.now = now
        self.table = FakeTable(entries)
        self.cache = Cache(checkpoint / "cache.db") if checkpoint else None
        self.scheduler = ConntrackScheduler(lambda: self.now, INTERVAL, self.table.connect, cache=self.cache)
        asyncio.run(self.scheduler.load())

    def become(self, *changes: Forwarding | ForwardingKey) -> None:
        """Tell what is new or gone, and that the rules are so."""
        self.update(*changes)
        self.scheduler.applied(wrote=True)

    def update(self, *changes: Forwarding | ForwardingKey) -> None:
        self.scheduler.services_changed(
            {c.key: c for c in changes if isinstance(c, Forwarding)}
            | dict.fromkeys(c for c in changes if isinstance(c, ForwardingKey))
        )

    def clean(self) -> dict[str, int]:
        """A run; how many flows it has ended, by reason."""

        async def work() -> CleanupResult:
            return await self.scheduler.clean()

        ended = asyncio.run(work()).deleted
        if self.cache:
            self.cache.write()
        return {str(reason): number for reason, number in ended.items()}

    def fail(self, *faults: Fault) -> None:
        """A run that fails."""
        self.table.faults = list(faults or [Fault.REFUSED])
        with pytest.raises(ConntrackError):
            self.clean()
        assert self.is_due()

    def is_due(self) -> bool:
        return self.scheduler.due

    @property
    def left(self) -> list[SocketAddress]:
        """The backends of the flows that are left."""
        return [entry.reply_source for entry in self.table.entries.values()]

    @property
    def resets(self) -> list[tuple[str, int]]:
        """The removed frontends whose clients are reset."""
        return [(place.address, place.port) for place in self.scheduler.resets()]


def test_a_run_is_due_after_a_change_is_written_and_then_on_the_timer() -> None:
    bench = Bench()
    bench.update(forwarding(*DNS, B1))
    assert not bench.is_due(), "the rules are not written yet"
    bench.scheduler.applied(wrote=True)
    assert bench.is_due()
    bench.clean()
    assert not bench.is_due()
    bench.scheduler.applied(wrote=False)
    assert not bench.is_due()
    bench.scheduler.applied(wrote=True)
    assert bench.is_due(), "rules were missing for a while"
    bench.clean()
    bench.now += INTERVAL - 1
    assert not bench.is_due()
    bench.now += 1
    assert bench.is_due()
    bench.update(forwarding(*DNS, B2))
    bench.now += 10 * INTERVAL
    assert not bench.is_due(), "the change is not written"


def test_a_change_after_which_every_flow_may_go_on_hurries_no_run() -> None:
    """As an etcd has ten of in a second: a weight, a backend more, or one less of a TCP service."""
    bench = Bench()
    lasting = [
        replace(tcp(*backends, node_port=30080), ends_flows=False) for backends in ((B1,), (B1, B2), (B2,))
    ]
    bench.become(forwarding(*DNS, B1), lasting[0])
    bench.clean()
    for change in (*lasting[1:], forwarding(*DNS, B1, B2)):
        bench.become(change)
        assert not bench.is_due()
        bench.now += UNHURRIED_SECONDS
        assert bench.is_due()
        bench.clean()
    ending = tcp(B2, B3, node_port=30080)
    changes: tuple[Forwarding | ForwardingKey, ...] = (
        ending,
        replace(ending, endpoints=ending.endpoints[:1]),
        replace(forwarding(*DNS, B1, B2), allow_from=("10.10.0.0/24",)),
        forwarding(*DNS, B2),
        forwarding(*DNS),
        forwarding(*DNS, B2),
        forwarding(*OTHER, B1),
        replace(ending, node_port=30081),
        ending.key,
    )
    for each in changes:
        bench.become(each)
        assert bench.is_due(), each
        bench.clean()
        assert not bench.is_due()


def test_each_family_is_cleaned_once_its_own_rules_are_written() -> None:
    dns6, one6, two6 = ("fd00:96::10", 53), ("fd00:1::1", 53), ("fd00:1::2", 53)
    bench = Bench(flow(DNS, B1), made(("fd00:10::2", 40000), dns6, one6, replied=True))
    bench.become(forwarding(*DNS, B1, B2), forwarding(*dns6, one6, two6))
    bench.clean()
    bench.update(forwarding(*DNS, B2), forwarding(*dns6, two6))
    for family, left in ((Family.IPV4, [one6]), (Family.IPV6, [])):
        bench.scheduler.applied(True, [family])
        assert bench.is_due()
        bench.clean()
        assert bench.left == left, "the rules of the other still lead there"


def test_flows_to_what_left_end_and_those_of_others_stay() -> None:
    gone = forwarding(*DNS, B1, B2)
    bench = Bench(flow(DNS, B1), flow(DNS, B2), flow(DNS, B3), flow(OTHER, B1))
    bench.become(gone, forwarding(*OTHER, B1))
    bench.become(gone.key)  # B3 is its successor's
    assert bench.clean() == {GONE: 2}
    assert bench.left == [B3, B1]
    bench = Bench(flow(("10.10.0.1", 30053), B1))
    bench.scheduler.host_changed(frozenset(["10.10.0.1"]))
    bench.become(forwarding(*DNS, B1, node_port=30053))
    bench.become(forwarding(*DNS, B1))
    assert bench.clean() == ONE_GONE, "a node port that is given up"


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.SILENCE])
def test_a_failed_run_stays_due_and_loses_nothing(fault: Fault) -> None:
    """The backends of a removed service must be known although they left while runs failed."""
    bench = Bench(flow(DNS, B1), flow(DNS, B2))
    first = forwarding(*DNS, B1, B2)
    bench.become(first)
    bench.clean()
    for change in (forwarding(*DNS, B2), first.key):
        bench.become(change)
        bench.fail(fault)
    assert bench.clean() == {GONE: 2}
    assert not bench.is_due()
    bench = Bench(flow(DNS, B1))
    bench.become(forwarding(*DNS, B2))
    bench.fail(Fault.LATE, Fault.REFUSED)  # of the deletion
    assert bench.left == [B1]
    bench.clean()
    assert bench.left == []


def test_a_change_during_a_run_makes_another_one_due() -> None:
    bench = Bench(flow(DNS, B1))
    bench.become(forwarding(*DNS, B1))

    async def change_meanwhile() -> None:
        run = asyncio.create_task(bench.scheduler.clean())
        await asyncio.sleep(0)
        bench.become(forwarding(*DNS, B2))
        await run

    asyncio.run(change_meanwhile())
    assert bench.is_due()
    bench.clean()
    assert bench.left == []


def test_a_cancelled_run_is_due_again() -> None:
    bench = Bench(flow(DNS, B1), *(flow(OTHER, B1, 1000 + n) for n in range(20)))
    begun, released, connect = threading.Event(), threading.Event(), bench.table.connect

    def wait_and_connect() -> object:
        begun.set()
        released.wait(60)
        return connect()

    bench.scheduler = ConntrackScheduler(lambda: bench.now, INTERVAL, wait_and_connect)  # type: ignore[arg-type]
    bench.become(forwarding(*DNS, B2))

    async def cancel() -> None:
        run = asyncio.create_task(bench.scheduler.clean())
        await asyncio.to_thread(begun.wait, 60)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        released.set()

    asyncio.run(cancel())
    assert bench.is_due()
    assert len(bench.left) == 21, "the run went on after it was cancelled"
    assert bench.table.reads == 1, "it went on reading"


def ends_flows_of(bench: Bench, place: SocketAddress, backend: SocketAddress) -> bool:
    """Whether a run ends a flow there."""
    bench.table.entries[999] = flow(place, backend)
    bench.clean()
    return bench.table.entries.pop(999, None) is None


def test_removed_frontends_are_forgotten_but_not_before_a_good_run_long_after_the_rules() -> None:
    gone = forwarding(*DNS, B1)

    def removed(seconds: float) -> Bench:
        """One whose last good run was so long after the rules without it were written."""
        bench = Bench()
        bench.become(gone)
        bench.update(gone.key)
        bench.now += 10 * KEEP_REMOVED_SECONDS
        bench.scheduler.applied(wrote=True)
        bench.clean()
        bench.now += seconds
        return bench

    early, late = removed(KEEP_REMOVED_SECONDS - 1), removed(KEEP_REMOVED_SECONDS)
    early.clean()
    assert ends_flows_of(early, DNS, B1)
    late.table.faults = [Fault.REFUSED]
    with pytest.raises(ConntrackError):
        late.clean()
    assert ends_flows_of(late, DNS, B1), "no run was good since"
    assert not ends_flows_of(late, DNS, B1)
    back = Bench()
    back.become(gone)
    back.become(gone.key)
    back.become(gone)
    assert not ends_flows_of(back, DNS, B1), "it is in use again"
    assert ends_flows_of(back, DNS, B2)


def test_a_frontend_may_pass_to_another_service() -> None:
    bench = Bench()
    old, new = forwarding(*DNS, B1, name="old"), forwarding(*DNS, B2, name="new")
    bench.become(old)
    bench.become(new, old.key)
    assert ends_flows_of(bench, DNS, B1)
    assert not ends_flows_of(bench, DNS, B2)
    bench.become(forwarding(*DNS, B1, name="third"))
    bench.become(new.key)
    assert not ends_flows_of(bench, DNS, B1), "it is the third service's now"
    assert ends_flows_of(bench, DNS, B2)


@pytest.mark.parametrize("lost", [False, True], ids=["cleaned", "killed before it cleaned"])
def test_what_ended_before_this_process_began_is_known_from_the_checkpoint(
    tmp_path: Path, lost: bool
) -> None:
    entries = flow(DNS, B1), flow(DNS, B3, 40002), flow(OTHER, B1, 40001)
    first = Bench(*entries, checkpoint=tmp_path)
    before = forwarding(*DNS, B1)
    first.become(before, forwarding(*OTHER, B1))
    first.clean()
    if lost:
        first.become(before.key)
        first.fail()
    assert first.cache
    first.cache.close()
    second = Bench(*entries, checkpoint=tmp_path)
    second.become(forwarding(*OTHER, B1))
    assert second.clean() == ONE_GONE
    assert second.left == [B3, B1], "what vipd did not lead there is somebody else's"
    second.now += 2 * KEEP_REMOVED_SECONDS
    second.clean()
    assert not ends_flows_of(second, DNS, B1)
    assert second.cache
    second.cache.close()
    assert [OTHER[0] in key for key in cached(tmp_path, "flow_target")] == [True]


@pytest.mark.parametrize("value", ["", "{", "[1]", '[[["b"]],null]', "[" * 100_000])
def test_entries_that_cannot_be_read_hold_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    first = Bench(checkpoint=tmp_path)
    first.become(forwarding(*DNS, B1), forwarding(*OTHER, B1))
    assert first.cache
    first.cache.close()
    spoil(tmp_path, "flow_target", value)
    bench = Bench(flow(DNS, B2), checkpoint=tmp_path)
    assert "flows of a removed service may go on" in caplog.text
    bench.become(forwarding(*DNS, B1))
    assert bench.clean() == ONE_GONE


def test_after_a_run_that_left_some_another_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bounded(wanted: FlowTargets, connect: Connect) -> CleanupResult:
        return await clean(wanted, connect, max_deletions=2)

    monkeypatch.setattr("vipd.dataplane.conntrack.scheduler.clean", bounded)
    gone = forwarding(*DNS, B1)
    bench = Bench(*(flow(DNS, B1, 1000 + n) for n in range(5)))
    bench.become(gone)
    bench.become(gone.key)
    for left in (3, 1, 0):
        assert bench.is_due()
        bench.now += 2 * KEEP_REMOVED_SECONDS
        bench.clean()
        assert len(bench.left) == left
    assert not bench.is_due()


READ: dict[str, tuple[Callable[[], Forwarding], int]] = {
    "UDP": (lambda: forwarding(*DNS, B1), 2),
    "UDP without backends": (lambda: forwarding(*DNS), 2),
    "TCP": (lambda: replace(tcp(B1), ends_flows=False), 1),
    "TCP without backends": (lambda: replace(tcp(), ends_flows=False), 0),
    "TCP that wants its flows ended": (lambda: tcp(B1), 2),
    "SCTP": (lambda: forwarding(*DNS, B1, protocol=Protocol.SCTP), 0),
}


def test_only_what_can_hold_something_to_judge_is_read() -> None:
    """Of one answered flow and one unanswered one, of each protocol."""
    for name, (service, number) in READ.items():
        table = FakeTable(
            made(("10.10.0.2", port), ("10.96.0.99", 1), protocol=protocol, replied=replied)
            for port, replied in ((1, True), (2, False))
            for protocol in Protocol
        )
        result = asyncio.run(clean(flow_targets([service()], []), table.connect))
        assert (result.examined, table.dumps) == (number, bool(number)), name


def test_while_no_run_is_good_not_everything_is_remembered() -> None:
    """Connection tracking may be unreadable for days, while services come and go."""
    bench = Bench()
    services = [
        forwarding(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 53, B1) for n in range(MAX_REMOVED + 100)
    ]
    bench.become(*services)
    bench.fail()
    for part in (services[:200], services[200:]):
        bench.become(*(each.key for each in part))
    for number, ended in ((0, False), (99, False), (100, True), (MAX_REMOVED, True)):
        bench.table.entries[number + 1] = flow((services[number].addresses[0], 53), B1)
        assert bench.clean() == (ONE_GONE if ended else {}), number
    bench, (first, second) = (
        Bench(),
        ([(f"10.{n}.{i >> 8}.{i & 255}", 53) for i in range(7000)] for n in (1, 2)),
    )
    for nodes in (first, second):
        bench.become(forwarding(*DNS, *nodes))
        bench.fail()
    bench.become(forwarding(*DNS).key)
    bench.table.entries = {1: flow(DNS, first[0]), 2: flow(DNS, second[0])}
    assert bench.clean() == ONE_GONE
    assert bench.left == first[:1]


def removed(bench: Bench, service: Forwarding) -> None:
    bench.become(service)
    bench.clean()
    bench.become(service.key)
    bench.clean()


def test_clients_of_removed_tcp_services_that_want_it_are_reset_for_a_while() -> None:
    bench = Bench()
    for service in (forwarding("10.96.0.1", 53, B1), replace(tcp(B1), ends_flows=False)):
        removed(bench, service)
    assert bench.resets == []
    removed(bench, tcp(B1, node_port=30080))
    assert set(bench.resets) == {WEB, ("", 30080)}
    bench.now += RESET_SECONDS - 1
    bench.clean()
    assert set(bench.resets) == {WEB, ("", 30080)}
    bench.become(forwarding(*WEB, B1, protocol=Protocol.TCP, name="new"))
    assert bench.resets == [("", 30080)], "whoever has the frontend then ends it"
    bench.now += 2
    bench.clean()
    assert bench.resets == []
    many = [tcp(B1, at=(f"10.97.{n >> 8}.{n & 255}", 80)) for n in range(MAX_RESETS + 3)]
    bench.become(*many)
    bench.become(*(each.key for each in many[:5]))
    bench.become(*(each.key for each in many[5:]))
    assert len(bench.resets) == MAX_RESETS
    assert bench.resets[-1] == (many[-1].addresses[0], 80)


@pytest.mark.parametrize(
    ("removed_before", "passed", "left"),
    [(True, 100, [WEB]), (True, RESET_SECONDS + 1, []), (True, -5000, []), (False, 100, [WEB])],
    ids=["soon", "late", "reboot", "removed while vipd was away"],
)
def test_the_next_process_goes_on_with_what_is_left_of_it(
    tmp_path: Path, removed_before: bool, passed: float, left: list[SocketAddress]
) -> None:
    service, other = tcp(B1), forwarding(*OTHER, B1)
    first = Bench(checkpoint=tmp_path)
    first.now += 10_000
    first.become(service, other)
    first.clean()
    if removed_before:
        first.become(service.key)
        first.clean()
    second = Bench(checkpoint=tmp_path, now=first.now + passed)
    second.become(other)
    second.clean()
    assert second.resets == left
