"""Small changes are written before large ones, which follow, and nothing that moves is parted."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tests.control.reconciling import IsolatedReconciler, run_story
from tests.dataplane.fake_dataplane import FakeDataplane, FakePlan
from tests.model.samples import declared, service
from vipd.control import write_order
from vipd.control.write_order import LARGE, MAX_SMALL_PER_STEP, MAX_WORK_PER_STEP, Backlog, WriteOrder
from vipd.dataplane.base import ApplyError
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import ExternalAddress, Family, Masquerade, Origin, Protocol, Service, ServicePort

SMALL = service("small", "10.96.0.10")


def backends(count: int) -> list[str]:
    return [f"10.{100 + (n >> 16)}.{n >> 8 & 255}.{n & 255}" for n in range(count)]


def large(ports: int, count: int = MAX_WORK_PER_STEP, address: str = "10.96.0.20") -> Service:
    """A service each of whose ports takes a step of its own."""
    named = tuple(ServicePort(80 + n, Protocol.TCP, name=f"p{n}") for n in range(ports))
    return replace(service("large", address, "", 1, *backends(count)), ports=named)


def forwarding(name: str, address: str, count: int = 1, port: int = 80) -> Forwarding:
    key = ForwardingKey(name, "", Protocol.TCP, Family.IPV4)
    return Forwarding(
        key, (address,), port, tuple(Endpoint(a, 80) for a in backends(count)), Masquerade.HAIRPIN
    )


def test_what_is_small_is_in_the_kernel_while_what_is_large_is_being_written() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        reconciler = isolated.reconciler
        await isolated.settled(reconciler.request_sync())
        isolated.dataplane.gate, isolated.dataplane.entered = asyncio.Event(), asyncio.Event()
        isolated.source.candidate = declared(SMALL, large(3))
        applied = reconciler.request_sync()
        await isolated.dataplane.entered.wait()  # the first of the three ports
        isolated.source.candidate = declared(SMALL, service("new", "10.96.0.11"), large(3))
        added = reconciler.request_sync()
        isolated.dataplane.gate.set()
        assert await reconciler.wait_synced(added, 60.0, ["new"])
        assert "new" in isolated.names()
        assert reconciler.progress.postponed == {"large"}
        assert reconciler.progress.state == "pending"
        assert [reconciler.progress.is_pending(name) for name in ("small", "new", "large")] == [
            False,
            False,
            True,
        ]
        assert len(isolated.dataplane.kernel) == 3, "two small ones and a part of the large one"
        assert await reconciler.wait_synced(applied, 60.0, ["large"])
        assert len(isolated.dataplane.kernel) == 5
        assert await reconciler.wait_synced(added, 60.0), "of all services"
        assert not reconciler.progress.postponed
        assert reconciler.progress.state == "in-sync"
        assert isolated.dataplane.updates[1:] == [{"large"}, {"new"}, {"large"}, {"large"}]

    run_story(story, SMALL)


def test_a_small_change_is_written_between_the_parts_of_another_author_s_load() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        reconciler = isolated.reconciler
        await isolated.settled(reconciler.request_sync())
        isolated.dataplane.gate, isolated.dataplane.entered = asyncio.Event(), asyncio.Event()
        load = [service(f"s{n}", f"10.98.{n >> 8}.{n & 255}") for n in range(5 * MAX_SMALL_PER_STEP)]
        isolated.source.candidate = declared(SMALL, *load)
        applied = reconciler.request_sync()
        await isolated.dataplane.entered.wait()
        other = replace(service("other", "10.96.0.11"), origin=Origin("file", "other.yaml"))
        isolated.source.candidate = declared(SMALL, *load, other)
        added = reconciler.request_sync()
        isolated.dataplane.gate.set()
        assert await reconciler.wait_synced(added, 60.0, ["other"])
        assert "other" in isolated.names()
        assert len(isolated.dataplane.kernel) < len(load), "parts of the load are not written"
        assert await reconciler.wait_synced(applied, 60.0)
        assert len(isolated.dataplane.kernel) == len(load) + 2

    run_story(story, SMALL)


def test_a_part_of_a_load_has_a_share_for_each_author() -> None:
    heavy = [forwarding(f"s{n}", f"10.98.{n >> 8}.{n & 255}") for n in range(2 * MAX_SMALL_PER_STEP)]
    light = [forwarding(f"t{n}", f"10.97.{n >> 8}.{n & 255}") for n in range(MAX_SMALL_PER_STEP // 3)]
    changes = {each.key: each for each in (*heavy, *light)}
    later = WriteOrder().postponed(changes, lambda _: None, lambda name: name[0])
    assert {key.service[0] for key in later} == {"s"}
    assert len(changes) - len(later) == MAX_SMALL_PER_STEP


def test_a_small_change_goes_between_the_parts_of_a_removal_and_each_part_is_small() -> None:
    load = [service(f"s{n}", f"10.98.{n >> 8}.{n & 255}") for n in range(4 * MAX_SMALL_PER_STEP)]

    async def story(isolated: IsolatedReconciler) -> None:
        reconciler = isolated.reconciler
        await isolated.settled(reconciler.request_sync())
        isolated.dataplane.gate, isolated.dataplane.entered = asyncio.Event(), asyncio.Event()
        isolated.source.candidate = declared(SMALL)
        removed = reconciler.request_sync()
        await isolated.dataplane.entered.wait()
        other = replace(service("other", "10.96.0.11"), origin=Origin("file", "other.yaml"))
        isolated.source.candidate = declared(SMALL, other)
        added = reconciler.request_sync()
        isolated.dataplane.gate.set()
        assert await reconciler.wait_synced(added, 60.0, ["other"])
        assert "other" in isolated.names()
        assert len(isolated.dataplane.kernel) > len(load) // 4, "parts of the load are still there"
        assert await reconciler.wait_synced(removed, 60.0)
        assert isolated.names() == {"small", "other"}
        assert max(map(len, isolated.dataplane.updates[1:])) <= MAX_SMALL_PER_STEP

    run_story(story, SMALL, *load)


def test_the_users_of_the_store_have_a_share_each() -> None:
    backlog, services = (
        Backlog(),
        {f"s{n}": service(f"s{n}", f"10.98.{n >> 8}.{n & 255}") for n in range(9000)},
    )
    services["other"] = service("other", "10.96.0.11")
    users = dict.fromkeys(services, "user ann") | {"other": "user bob"}
    none = dict[str, Service]().get
    due = backlog.divide(list(services), none, services.get, lambda each: users[each.name])
    assert due == ["other"], "who has little comes first, alone"
    due = backlog.divide([], services.get, services.get)
    assert len(due) == MAX_SMALL_PER_STEP
    assert len(backlog.services) == 9000 - MAX_SMALL_PER_STEP


@pytest.mark.parametrize("seed", range(10))
def test_no_frontend_is_ever_missing_or_twice_while_changes_wait(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services exchange their addresses at random, faster than steps write them."""
    monkeypatch.setattr(write_order, "MAX_SMALL_PER_STEP", 5)
    source, backlog = random.Random(seed), Backlog()
    names = [f"s{n}" for n in range(30)]
    written: dict[str, Service] = {}
    wanted: dict[str, Service] = {}
    for step in range(200):
        before = dict(wanted)
        if step < 150 and source.random() < 0.7:
            addresses = [f"10.96.0.{n}" for n in source.sample(range(40), 40)]
            for name in source.sample(names, source.choice((1, 2, 10, 30))):
                taken = {each.addresses[0] for other, each in wanted.items() if other != name}
                free = [a for a in addresses if a not in taken]
                if source.random() < 0.3:
                    wanted.pop(name, None)
                elif free:
                    origin = Origin("file", f"{int(name[1:]) % 3}.yaml")
                    wanted[name] = replace(service(name, free[0]), origin=origin)
        changed = [n for n in names if before.get(n) != wanted.get(n)]
        kept = {e.addresses[0] for e in written.values()} & {e.addresses[0] for e in wanted.values()}
        for name in backlog.divide(changed, written.get, wanted.get):
            written.pop(name, None)
            if name in wanted:
                written[name] = wanted[name]
        serving = [each.addresses[0] for each in written.values()]
        assert len(serving) == len(set(serving)), "an address is served twice"
        assert kept <= set(serving), "an address that stays is missing"
    assert written == wanted
    assert not backlog.services


def test_at_the_start_all_is_written_at_once() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.dataplane.events.count("apply") == 1
        assert len(isolated.dataplane.kernel) == 4

    run_story(story, SMALL, large(3))


@pytest.mark.slow
def test_small_changes_without_end_do_not_keep_large_ones_out() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        for n in range(1, 8):
            isolated.source.candidate = declared(
                service("small", "10.96.0.10", "", 1, f"10.244.0.{n}"), large(3)
            )
            isolated.reconciler.request_sync()
            await isolated.reconciler.step()
        assert len(isolated.dataplane.kernel) == 4

    run_story(story, SMALL)


def test_a_large_service_that_goes_before_it_is_written_leaves_nothing() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        isolated.dataplane.gate, isolated.dataplane.entered = asyncio.Event(), asyncio.Event()
        isolated.source.candidate = declared(SMALL, large(3))
        isolated.reconciler.request_sync()
        await isolated.dataplane.entered.wait()
        isolated.source.candidate = declared(SMALL)
        gone = isolated.reconciler.request_sync()
        isolated.dataplane.gate.set()
        assert await isolated.settled(gone)
        assert isolated.names() == {"small"}
        assert isolated.reconciler.progress.state == "in-sync"

    run_story(story, SMALL)


def test_a_large_service_that_cannot_be_written_is_not_thought_to_be() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        isolated.source.candidate = declared(service("small", "10.96.0.10", "", 1, "10.244.0.6"), large(2))
        isolated.dataplane.gate, isolated.dataplane.entered = asyncio.Event(), asyncio.Event()
        wish = isolated.reconciler.request_sync()
        await isolated.dataplane.entered.wait()
        isolated.dataplane.failures += [ApplyError("it", "fails")] * 2
        isolated.dataplane.gate.set()
        assert not await isolated.reconciler.wait_synced(wish, 60.0, ["large"])
        assert isolated.reconciler.progress.state == "failed"
        await isolated.fulfilled(isolated.reconciler.request_sync())
        assert len(isolated.dataplane.kernel) == 3

    run_story(story, SMALL)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_part_that_raises_is_held_and_what_was_there_stays(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        known = dict(isolated.dataplane.kernel)
        apply = FakeDataplane.apply

        async def failing(dataplane: FakeDataplane, plan: FakePlan) -> None:
            if len([key for key in plan.wanted if key.service == "large"]) >= fails:
                raise IndexError("nobody expected this")
            await apply(dataplane, plan)

        monkeypatch.setattr(FakeDataplane, "apply", failing)
        isolated.source.candidate = declared(SMALL, large(2))
        await isolated.settled(isolated.reconciler.request_sync())
        assert "large" in isolated.reconciler.progress.quarantined
        kept = {key: f for key, f in isolated.dataplane.kernel.items() if key.service != "large"}
        assert kept == known
        assert len(isolated.dataplane.kernel) == len(known) + fails - 1

    run_story(story, SMALL)


def test_a_frontend_that_moves_is_written_in_one_step() -> None:
    old, new = forwarding("old", "10.96.0.20"), forwarding("new", "10.96.0.20", LARGE + 1)
    other = forwarding("other", "10.96.0.21")
    before = {old.key: old, new.key: None, other.key: None}
    changes = {old.key: None, new.key: new, other.key: other}
    assert not WriteOrder().postponed(changes, before.get)
    elsewhere = replace(new, addresses=("10.96.0.22",))
    assert WriteOrder().postponed({**changes, new.key: elsewhere}, before.get) == {new.key: None}
    as_external = replace(elsewhere, external_addresses=(ExternalAddress("10.96.0.20"),))
    assert not WriteOrder().postponed({**changes, new.key: as_external}, before.get)
    on_node = replace(elsewhere, node_port=30000)
    moved_port = {**before, old.key: replace(old, node_port=30000)}
    assert not WriteOrder().postponed({**changes, new.key: on_node}, moved_port.get)


def test_what_a_large_one_gives_up_is_taken_in_the_same_step() -> None:
    had = forwarding("large", "10.96.0.20", LARGE + 1)
    now = replace(had, addresses=("10.96.0.21",))
    taker = forwarding("taker", "10.96.0.20")
    assert not WriteOrder().postponed({had.key: now, taker.key: taker}, {had.key: had}.get)


def test_large_changes_without_end_do_not_keep_another_large_one_out() -> None:
    """What waits comes last among the changes of a step, and is written first."""
    waiting, *busy = [forwarding(f"s{n}", f"10.96.1.{n}", MAX_WORK_PER_STEP) for n in range(3)]
    order = WriteOrder()
    later = order.postponed({each.key: each for each in (*busy, waiting)}, lambda _: None)
    assert waiting.key in later
    for _ in range(2):
        changes = {each.key: each for each in (*busy, waiting) if each in busy or each.key in later}
        later = order.postponed(changes, lambda _: None)
    assert waiting.key not in later


def test_several_large_ones_share_a_step_up_to_a_limit() -> None:
    many = [forwarding(f"s{n}", f"10.96.1.{n}", MAX_WORK_PER_STEP // 2) for n in range(5)]
    changes = {each.key: each for each in many}
    order = WriteOrder()
    assert list(order.postponed(changes, lambda _: None)) == [each.key for each in many[2:]]
    assert not order.postponed({many[0].key: many[0]}, lambda _: None)
