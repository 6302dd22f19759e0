"""What is remembered between runs: nothing is lost by failures, nothing is done too early or for ever."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import made
from vipd.dataplane.conntrack import scheduler as keeping
from vipd.dataplane.conntrack.checkpoint import FILE_NAME, Checkpoint
from vipd.dataplane.conntrack.cleaner import CleanupResult, Connect, clean
from vipd.dataplane.conntrack.entries import Entry, SocketAddress
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.conntrack.scheduler import KEEP_REMOVED_SECONDS, UNHURRIED_SECONDS, ConntrackScheduler
from vipd.dataplane.conntrack.stale import (
    Destination,
    FlowTarget,
    FlowTargets,
    Reason,
    default_target,
    flow_targets,
)
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Protocol

CLIENT, DNS, OTHER = ("10.10.0.2", 40000), ("10.96.0.10", 53), ("10.96.0.11", 53)
B1, B2, B3 = ("10.244.0.1", 53), ("10.244.0.2", 53), ("10.244.0.3", 53)
INTERVAL = 300.0


def flow(to: SocketAddress, backend: SocketAddress, source_port: int = 40000) -> Entry:
    return made(("10.10.0.2", source_port), to, backend, replied=True)


class Bench:
    """A keeper over a fake table with a clock of its own."""

    def __init__(self, *entries: Entry, checkpoint: Checkpoint | None = None) -> None:
        self.now = 1000.0
        self.table = FakeTable(entries)
        self.keeper = ConntrackScheduler(
            lambda: self.now, INTERVAL, self.table.connect, checkpoint=checkpoint
        )

    def become(self, *changes: Forwarding | ForwardingKey) -> None:
        """Tell what is new or gone, and that the rules are so."""
        self.update(*changes)
        self.keeper.applied(wrote=True)

    def update(self, *changes: Forwarding | ForwardingKey) -> None:
        self.keeper.services_changed(
            {c.key: c for c in changes if isinstance(c, Forwarding)}
            | dict.fromkeys(c for c in changes if isinstance(c, ForwardingKey))
        )

    def clean(self) -> CleanupResult:
        async def work() -> CleanupResult:
            cleaned = await self.keeper.clean()
            await self.keeper.save()
            return cleaned

        return asyncio.run(work())

    def due(self) -> bool:
        return self.keeper.due

    @property
    def left(self) -> list[SocketAddress]:
        """The backends of the flows that are left."""
        return [entry.reply_source for entry in self.table.entries.values()]


def test_a_run_is_due_after_a_change_is_written_and_then_on_the_timer() -> None:
    bench = Bench()
    bench.update(forwarding(*DNS, B1))
    assert not bench.due(), "the rules are not written yet"
    bench.keeper.applied(wrote=True)
    assert bench.due()
    bench.clean()
    assert not bench.due()
    bench.keeper.applied(wrote=False)
    assert not bench.due()
    bench.keeper.applied(wrote=True)
    assert bench.due(), "rules were missing for a while"
    bench.clean()
    bench.now += INTERVAL - 1
    assert not bench.due()
    bench.now += 1
    assert bench.due()


def test_a_change_after_which_every_flow_may_go_on_hurries_no_run() -> None:
    """As an etcd has ten of in a second: a weight, a backend more, or one less of a TCP service."""
    bench = Bench()
    web = ("10.96.0.20", 80)

    def tcp(*backends: SocketAddress) -> Forwarding:
        return forwarding(*web, *backends, protocol=Protocol.TCP, node_port=30080)

    bench.become(forwarding(*DNS, B1), tcp(B1))
    bench.clean()
    for change in (tcp(B1, B2), tcp(B2), forwarding(*DNS, B1, B2)):
        bench.become(change)
        assert not bench.due()
        bench.now += UNHURRIED_SECONDS
        assert bench.due()
        bench.clean()
    ending = replace(tcp(B2, B3), ends_flows=True)
    limited = replace(forwarding(*DNS, B1, B2), allow_from=("10.10.0.0/24",))
    changes: tuple[Forwarding | ForwardingKey, ...] = (
        ending,
        replace(ending, endpoints=ending.endpoints[:1]),
        limited,
        forwarding(*DNS, B2),
        forwarding(*DNS),
        forwarding(*DNS, B2),
        forwarding(*OTHER, B1),
        replace(ending, node_port=30081),
        ending.key,
    )
    for each in changes:
        bench.become(each)
        assert bench.due(), each
        bench.clean()
        assert not bench.due()


def test_nothing_is_due_while_a_change_is_not_written() -> None:
    bench = Bench()
    bench.become(forwarding(*DNS, B1))
    bench.update(forwarding(*DNS, B2))
    bench.now += 10 * INTERVAL
    assert not bench.due()


def test_each_family_is_cleaned_once_its_own_rules_are_written() -> None:
    dns6, one6, two6 = ("fd00:96::10", 53), ("fd00:1::1", 53), ("fd00:1::2", 53)
    client6 = ("fd00:10::2", 40000)
    bench = Bench(flow(DNS, B1), made(client6, dns6, one6, replied=True))
    bench.become(forwarding(*DNS, B1, B2), forwarding(*dns6, one6, two6))
    bench.clean()
    bench.update(forwarding(*DNS, B2), forwarding(*dns6, two6))
    bench.keeper.applied(True, [Family.IPV4])
    assert bench.due()
    bench.clean()
    assert bench.left == [one6], "its rules still lead there"
    bench.keeper.applied(True, [Family.IPV6])
    assert bench.due()
    bench.clean()
    assert bench.left == []


def test_flows_to_a_backend_that_left_end() -> None:
    bench = Bench(flow(DNS, B1), flow(DNS, B2))
    bench.become(forwarding(*DNS, B1, B2))
    assert bench.clean().deleted == {}
    bench.become(forwarding(*DNS, B2))
    cleaned = bench.clean()
    assert cleaned.deleted == {Reason.BACKEND_GONE: 1}
    assert cleaned.examined == 2
    assert bench.left == [B2]


def test_flows_to_a_removed_service_end_and_those_of_its_successor_stay() -> None:
    gone = forwarding(*DNS, B1)
    bench = Bench(flow(DNS, B1), flow(DNS, B3), flow(OTHER, B1))
    bench.become(gone, forwarding(*OTHER, B1))
    bench.become(gone.key)
    assert bench.clean().deleted == {Reason.BACKEND_GONE: 1}
    assert bench.left == [B3, B1]


def test_a_node_port_that_is_given_up_is_cleaned() -> None:
    bench = Bench(flow(("10.10.0.1", 30053), B1))
    bench.keeper.host_changed(frozenset(["10.10.0.1"]))
    bench.become(forwarding(*DNS, B1, node_port=30053))
    bench.become(forwarding(*DNS, B1))
    assert bench.clean().deleted == {Reason.BACKEND_GONE: 1}


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.SILENCE])
def test_a_failed_run_stays_due_and_loses_nothing(fault: Fault) -> None:
    """The backends of a removed service must be known although they left while runs failed."""
    bench = Bench(flow(DNS, B1), flow(DNS, B2))
    first = forwarding(*DNS, B1, B2)
    bench.become(first)
    bench.clean()
    for change in (forwarding(*DNS, B2), first.key):
        bench.become(change)
        bench.table.faults = [fault]
        with pytest.raises(ConntrackError):
            bench.clean()
        assert bench.due()
    assert bench.clean().deleted == {Reason.BACKEND_GONE: 2}
    assert not bench.due()


def test_a_deletion_that_fails_is_tried_again() -> None:
    bench = Bench(flow(DNS, B1))
    bench.become(forwarding(*DNS, B2))
    bench.table.faults = [Fault.LATE, Fault.REFUSED]
    with pytest.raises(ConntrackError):
        bench.clean()
    assert bench.left == [B1]
    assert bench.due()
    bench.clean()
    assert bench.left == []


def test_a_change_during_a_run_makes_another_one_due() -> None:
    bench = Bench(flow(DNS, B1))
    bench.become(forwarding(*DNS, B1))

    async def change_meanwhile() -> None:
        run = asyncio.create_task(bench.keeper.clean())
        await asyncio.sleep(0)
        bench.become(forwarding(*DNS, B2))
        await run

    asyncio.run(change_meanwhile())
    assert bench.due()
    bench.clean()
    assert bench.left == []


def test_a_run_in_progress_never_finds_a_frontend_missing_that_stays() -> None:
    seen = []

    def look(each: Forwarding) -> FlowTarget:
        seen.append(keeper.flow_targets.targets.get(Destination(Family.IPV4, Protocol.UDP, *DNS)))
        return default_target(each)

    keeper = ConntrackScheduler(lambda: 0.0, INTERVAL, FakeTable().connect, look)
    for change in (forwarding(*DNS, B1), forwarding(*DNS, B2)):
        keeper.services_changed({change.key: change})
    assert seen == [None, default_target(forwarding(*DNS, B1))]


def test_a_cancelled_run_is_due_again() -> None:
    bench = Bench(flow(DNS, B1), *(flow(OTHER, B1, 1000 + n) for n in range(20)))
    begun, released, connect = threading.Event(), threading.Event(), bench.table.connect

    def wait_and_connect() -> object:
        begun.set()
        released.wait(60)
        return connect()

    keeper = ConntrackScheduler(lambda: bench.now, INTERVAL, wait_and_connect)  # type: ignore[arg-type]
    keeper.services_changed({(f := forwarding(*DNS, B2)).key: f})
    keeper.applied(wrote=True)

    async def cancel() -> None:
        run = asyncio.create_task(keeper.clean())
        await asyncio.to_thread(begun.wait, 60)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        released.set()

    asyncio.run(cancel())
    assert keeper.due
    assert len(bench.left) == 21, "the run went on after it was cancelled"
    assert bench.table.reads == 1, "it went on reading"


def test_removed_frontends_are_forgotten_but_not_before_a_good_run_long_after_the_rules() -> None:
    gone = forwarding(*DNS, B1)
    bench = Bench()
    bench.become(gone)
    bench.update(gone.key)
    bench.now += 10 * KEEP_REMOVED_SECONDS
    bench.keeper.applied(wrote=True)
    bench.clean()
    bench.now += KEEP_REMOVED_SECONDS - 1
    bench.clean()
    assert bench.keeper.flow_targets.targets
    bench.now += 1
    bench.table.faults = [Fault.REFUSED]
    with pytest.raises(ConntrackError):
        bench.clean()
    assert bench.keeper.flow_targets.targets
    bench.clean()
    assert not bench.keeper.flow_targets.targets


def test_a_frontend_that_comes_back_is_in_use_and_not_forgotten() -> None:
    one = forwarding(*DNS, B1)
    bench = Bench()
    bench.become(one)
    bench.become(one.key)
    bench.become(one)
    bench.now += 2 * KEEP_REMOVED_SECONDS
    bench.clean()
    assert bench.keeper.flow_targets == flow_targets([one], [])


def test_a_frontend_may_pass_to_another_service() -> None:
    bench = Bench(flow(DNS, B1))
    old, new = forwarding(*DNS, B1, name="old"), forwarding(*DNS, B2, name="new")
    bench.become(old)
    bench.become(new, old.key)
    assert bench.keeper.flow_targets == flow_targets([new], [])
    bench.become(forwarding(*DNS, B1, name="third"))
    bench.become(new.key)
    assert bench.keeper.flow_targets == flow_targets([forwarding(*DNS, B1)], []), (
        "it is the third service's now"
    )


@pytest.mark.parametrize("lost", [False, True], ids=["cleaned", "killed before it cleaned"])
def test_what_ended_before_this_process_began_is_known_from_the_checkpoint(
    tmp_path: Path, lost: bool
) -> None:
    entries = flow(DNS, B1), flow(DNS, B3, 40002), flow(OTHER, B1, 40001)
    first = Bench(*entries, checkpoint=Checkpoint(tmp_path))
    before = forwarding(*DNS, B1)
    first.become(before, forwarding(*OTHER, B1))
    first.clean()
    if lost:
        first.become(before.key)
        first.table.faults = [Fault.REFUSED]
        with pytest.raises(ConntrackError):
            first.clean()
    second = Bench(*entries, checkpoint=Checkpoint(tmp_path))
    second.become(forwarding(*OTHER, B1))
    assert second.clean().deleted == {Reason.BACKEND_GONE: 1}
    assert second.left == [B3, B1], "what vipd did not lead there is somebody else's"
    second.now += 2 * KEEP_REMOVED_SECONDS
    second.clean()
    assert second.keeper.flow_targets == flow_targets([forwarding(*OTHER, B1)], [])
    assert {place.address for place in Checkpoint(tmp_path).read()} == {OTHER[0]}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b'[["4","udp","a",1,[]]]', b'[[4,"udp","a",1,[["b"]]]]', b"[" * 100_000]
)
def test_a_checkpoint_that_cannot_be_read_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(data)
    bench = Bench(flow(DNS, B2), checkpoint=Checkpoint(tmp_path))
    bench.become(forwarding(*DNS, B1))
    assert bench.clean().deleted == {Reason.BACKEND_GONE: 1}
    assert "cannot be read" in caplog.text
    assert len(Checkpoint(tmp_path).read()) == 1


def test_a_checkpoint_that_cannot_be_written_keeps_nobody_from_cleaning(tmp_path: Path) -> None:
    bench = Bench(checkpoint=Checkpoint(tmp_path / "missing"))
    for backend in (B1, B2):
        bench.become(forwarding(*DNS, backend))
        with pytest.raises(OSError, match="cannot be written"):
            bench.clean()
        assert not bench.due(), "it has been cleaned"
    (tmp_path / "missing").mkdir()
    bench.clean()  # although nothing has changed since
    assert Checkpoint(tmp_path / "missing").read()


def test_a_checkpoint_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vipd.dataplane.conntrack.checkpoint.MAX_BACKENDS", 2)
    written = Checkpoint(tmp_path)
    written.write(flow_targets([forwarding(*DNS, B1, B2), forwarding(*OTHER, B3)], []).targets)
    assert [place.address for place in Checkpoint(tmp_path).read()] == [DNS[0]]


def test_a_run_deletes_no_more_than_it_may_and_says_so() -> None:
    table = FakeTable(flow(DNS, B1, 1000 + n) for n in range(20))
    wanted = flow_targets([forwarding(*DNS, B2)], [])
    first = asyncio.run(clean(wanted, table.connect, max_deletions=16))
    assert first.deleted == {Reason.BACKEND_GONE: 16}
    assert not first.complete
    rest = asyncio.run(clean(wanted, table.connect, max_deletions=16))
    assert rest.deleted == {Reason.BACKEND_GONE: 4}
    assert rest.complete


def test_after_a_run_that_left_some_another_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bounded(wanted: FlowTargets, connect: Connect) -> CleanupResult:
        return await clean(wanted, connect, max_deletions=2)

    monkeypatch.setattr("vipd.dataplane.conntrack.scheduler.clean", bounded)
    gone = forwarding(*DNS, B1)
    bench = Bench(*(flow(DNS, B1, 1000 + n) for n in range(5)))
    bench.become(gone)
    bench.become(gone.key)
    for left in (3, 1, 0):
        assert bench.due()
        bench.now += 2 * KEEP_REMOVED_SECONDS
        bench.clean()
        assert len(bench.left) == left
    assert not bench.due()


def test_with_nothing_to_judge_the_kernel_is_not_asked() -> None:
    table = FakeTable()
    asyncio.run(clean(flow_targets([forwarding(*DNS, B1, protocol=Protocol.SCTP)], []), table.connect))
    assert table.dumps == 0


def test_while_no_run_is_good_not_everything_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection tracking may be unreadable for days, while services and backends come and go."""
    monkeypatch.setattr(keeping, "MAX_REMOVED", 20)
    monkeypatch.setattr(keeping, "MAX_FORMER_BACKENDS", 30)
    bench = Bench()
    for number in range(1, 200):
        service = forwarding(f"10.96.1.{number}", 53, B1, name=f"s{number}")
        bench.become(service, forwarding(*DNS, (f"10.244.1.{number}", 53)))
        bench.become(service.key)
    keeper = bench.keeper
    assert len(keeper._removed) == 20
    assert len(keeper._targets) == 21
    assert len(keeper._former) <= 21
    assert max(map(len, keeper._former.values())) <= 31
    assert Destination(Family.IPV4, Protocol.UDP, "10.96.1.199", 53) in keeper._targets
    bench.clean()
    bench.now += KEEP_REMOVED_SECONDS + 1
    bench.clean()
    assert (len(keeper._removed), len(keeper._former), len(keeper._targets)) == (0, 0, 1)
