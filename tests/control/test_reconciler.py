from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from tests.control.reconciling import DNS, PATIENCE_SECONDS, WEB, Heartbeats, IsolatedReconciler, run_story
from tests.dataplane.fake_dataplane import FakeDataplane
from tests.model.samples import broken, declared, service
from vipd.control import changes as room
from vipd.control.catalog import MergeResult
from vipd.control.selection import select_backends
from vipd.control.snapshot import IN_THREAD_ABOVE, Snapshot
from vipd.host.batches import BATCH_SIZE
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Service


def test_a_wake_brings_what_is_declared_into_the_kernel() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        assert isolated.reconciler.progress.state == "starting"
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.names() == {"dns", "web"}
        assert isolated.reconciler.progress.state == "in-sync"
        assert isolated.reconciler.progress.last_apply is not None

    run_story(story, DNS, WEB)


def test_the_accepted_versions_are_kept_before_the_kernel_is_written() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.dataplane.events == ["accepted", "update", "plan", "apply"]

    run_story(story, DNS)


def test_nothing_is_written_when_nothing_is_different() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        for _ in range(3):
            assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.dataplane.events.count("apply") == 1
        assert isolated.reconciler.progress.applies == 1

    run_story(story, DNS)


def test_a_hundred_wakes_during_a_step_cost_one_more() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        isolated.dataplane.gate = asyncio.Event()
        wishes = [isolated.reconciler.request_sync()]
        await isolated.dataplane.entered.wait()
        assert isolated.dataplane.applying
        isolated.source.candidate = declared(DNS, WEB)
        wishes += [isolated.reconciler.request_sync() for _ in range(100)]
        assert isolated.reconciler.progress.state != "in-sync"
        isolated.dataplane.gate.set()
        assert all([await isolated.settled(wish) for wish in wishes])
        assert isolated.names() == {"dns", "web"}
        assert isolated.dataplane.events.count("plan") == 2

    run_story(story, DNS)


def test_a_wish_made_during_a_step_is_not_settled_by_that_step() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        isolated.dataplane.gate = asyncio.Event()
        isolated.reconciler.request_sync()
        await isolated.dataplane.entered.wait()
        isolated.source.candidate = declared(WEB)
        waiting = asyncio.create_task(isolated.settled(isolated.reconciler.request_sync()))
        isolated.dataplane.gate.set()
        assert await waiting
        assert isolated.names() == {"web"}

    run_story(story, DNS)


def test_only_changed_services_reach_the_dataplane(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    def counted(service: Service, *rest: object) -> object:
        chosen.append(service.name)
        return select_backends(service, *rest)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(room, "select_backends", counted)

    async def story(isolated: IsolatedReconciler) -> None:
        many = [service(f"s{n}", f"10.97.0.{n}") for n in range(1, 200)]
        isolated.source.candidate = declared(*many)
        await isolated.settled(isolated.reconciler.request_sync())
        chosen.clear()
        new = service("s7", "10.97.0.7", "", 1, "10.244.9.9")
        isolated.source.candidate = declared(*[new if s.name == "s7" else s for s in many if s.name != "s9"])
        await isolated.settled(isolated.reconciler.request_sync())
        assert chosen == ["s7"]
        assert isolated.dataplane.updates[-1] == {"s7", "s9"}
        assert "s9" not in isolated.names()

    run_story(story, DNS)


def test_a_reparsed_service_that_says_the_same_is_no_change() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        isolated.source.candidate = declared(service("dns", "10.96.0.10"))
        await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.dataplane.updates == [{"dns"}], "no other update"
        assert isolated.reconciler.progress.applies == 1

    run_story(story, DNS)


def test_the_host_is_prepared_for_the_families_in_use_before_the_kernel_is_written() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        isolated.host.warnings = ("net.ipv6.conf.all.forwarding cannot be set",)
        await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.host.prepared == [{Family.IPV4, Family.IPV6}]
        assert isolated.reconciler.progress.warnings == isolated.host.warnings

    run_story(story, DNS, service("six", "fd00::10", "", 1, "fd01::5"))


def test_bad_input_leaves_the_kernel_as_it_is_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        isolated.source.candidate = broken("/d/a.yaml")
        for _ in range(2):
            assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.names() == {"dns"}
        assert set(isolated.reconciler.problems) == {"fake"}

    with caplog.at_level(logging.ERROR):
        run_story(story, DNS)
    assert caplog.text.count("it is wrong") == 1


def test_the_difference_is_shown_without_being_written() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        assert await isolated.reconciler.difference.text() == ""
        isolated.dataplane.kernel = {}
        assert "dns" in await isolated.reconciler.difference.text()
        assert isolated.names() == set()
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.names() == {"dns"}

    run_story(story, DNS)


def test_the_difference_waits_for_a_running_step() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        isolated.dataplane.gate = asyncio.Event()
        isolated.reconciler.request_sync()
        await isolated.dataplane.entered.wait()
        asked = asyncio.create_task(isolated.reconciler.difference.text())
        for _ in range(100):  # turns, in which it would disturb the step if it did not wait
            await asyncio.sleep(0)
        assert not asked.done()
        isolated.dataplane.gate.set()
        assert await asked == ""
        assert isolated.dataplane.misuse == []

    run_story(story, DNS)


def test_a_difference_leaves_the_next_step_nothing_to_read() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        isolated.dataplane.events.clear()
        await isolated.reconciler.difference.text()
        assert set(isolated.dataplane.events) == {"survey", "difference"}

    run_story(story, DNS)


def test_differences_asked_for_at_the_same_time_share_a_run_and_hold_up_no_step() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        isolated.dataplane.events.clear()
        isolated.dataplane.surveying = asyncio.Event()
        first = [asyncio.create_task(isolated.reconciler.difference.text()) for _ in range(10)]
        await isolated.dataplane.surveyed.wait()
        isolated.dataplane.kernel = {}
        later = [asyncio.create_task(isolated.reconciler.difference.text()) for _ in range(10)]
        isolated.source.candidate = declared(DNS, WEB)
        assert await isolated.settled(isolated.reconciler.request_sync()), "a step does not wait for a reader"
        assert isolated.names() == {"dns", "web"}
        isolated.dataplane.surveying.set()
        assert set(await asyncio.gather(*first, *later)) == {""}
        # The first run was disturbed by the step, and looked again; those who came later share one.
        assert isolated.dataplane.events.count("survey") == 3
        assert isolated.dataplane.misuse == []

    run_story(story, DNS)


def test_a_difference_that_is_always_disturbed_comes_to_an_end() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        asked = asyncio.create_task(isolated.reconciler.difference.text())
        steps = 0
        while not asked.done():
            await isolated.settled(isolated.reconciler.request_sync())
            steps += 1
        assert await asked == ""
        assert steps > 1

    run_story(story, DNS)


def test_what_was_handed_over_before_a_fault_is_taken_back_with_the_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        update = isolated.dataplane.update

        def broken_after_all(changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
            update(changes)
            raise KeyError("a fault in vipd")

        monkeypatch.setattr(FakeDataplane, "update", lambda _, changes: broken_after_all(changes))
        isolated.source.candidate = declared(service("dns", "10.96.0.10", "", 1, "10.244.9.9"), WEB)
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert set(isolated.reconciler.progress.quarantined) == {"dns", "web"}
        monkeypatch.undo()
        isolated.source.candidate = declared(service("dns", "10.96.0.10"))
        await isolated.fulfilled(isolated.reconciler.request_sync())
        assert isolated.names() == {"dns"}
        assert {e.address for f in isolated.dataplane.kernel.values() for e in f.endpoints} == {"10.244.0.5"}
        assert set(isolated.reconciler.services) == {"dns"}

    run_story(story, DNS)


def test_a_service_that_has_moved_to_another_line_is_known_there_and_written_nowhere() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        isolated.source.candidate = declared(service("dns", "10.96.0.10", "/d/a.yaml", 7))
        await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.reconciler.services["dns"].origin.line == 7
        assert isolated.dataplane.updates == [{"dns"}], "no other update"

    run_story(story, service("dns", "10.96.0.10", "/d/a.yaml", 3))


def test_the_services_of_each_unit_are_counted_as_they_change() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.reconciler.serving == {"file:/d/a.yaml": 1}
        web = service("web", "10.96.0.11", "/d/a.yaml")
        isolated.source.candidate = declared(service("dns", "10.96.0.10", "/d/b.yaml"), web)
        await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.reconciler.serving == {"file:/d/a.yaml": 1, "file:/d/b.yaml": 1}
        isolated.source.candidate = declared(web)
        await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.reconciler.serving == {"file:/d/a.yaml": 1}

    run_story(story, service("dns", "10.96.0.10", "/d/a.yaml"))


def test_while_many_services_are_loaded_others_get_their_turn() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while isolated.reconciler.progress.state != "in-sync":
                turns += 1
                await asyncio.sleep(0)

        waiting = asyncio.create_task(other())
        assert await isolated.settled(isolated.reconciler.request_sync())
        await waiting
        assert turns > 2 * len(many) // BATCH_SIZE
        assert isolated.reconciler.readiness.ready == len(many)

    many = [service(f"s{n}", f"10.97.{n // 250}.{n % 250 + 1}") for n in range(1500)]
    run_story(story, *many)


def test_cancelling_ends_the_loop_during_a_step() -> None:
    async def run() -> None:
        isolated = IsolatedReconciler(DNS)
        isolated.dataplane.gate = asyncio.Event()
        task = asyncio.create_task(isolated.reconciler.run())
        isolated.reconciler.request_sync()
        await isolated.dataplane.entered.wait()
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=PATIENCE_SECONDS)
        assert done, "cancelling must end the loop"

    asyncio.run(run())


def test_a_large_load_shows_that_it_goes_on() -> None:
    def beats(number: int) -> int:
        heartbeats = Heartbeats()

        async def story(isolated: IsolatedReconciler) -> None:
            isolated.reconciler.observers.add(heartbeats)
            await isolated.fulfilled(isolated.reconciler.request_sync())

        run_story(story, *(service(f"s{n}", f"10.96.{n >> 8}.{n & 255}") for n in range(number)))
        return heartbeats.count

    assert beats(1000) >= beats(10) + 9, "one for each hundred, so that no watchdog takes it for dead"


def test_services_that_go_are_merged_beside_the_event_loop_as_those_that_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,000 that went held it for 60 ms, and so would a hundred thousand for seconds."""
    merged_in = list[bool]()
    merge = Snapshot._merge

    def noted(*arguments: Any) -> MergeResult:
        merged_in.append(threading.current_thread() is threading.main_thread())
        return merge(*arguments)

    monkeypatch.setattr(Snapshot, "_merge", noted)

    async def story(isolated: IsolatedReconciler) -> None:
        for candidate in (declared(*many), declared()):
            merged_in.clear()
            isolated.source.candidate = candidate
            await isolated.fulfilled(isolated.reconciler.request_sync())
            assert merged_in[0] is False

    many = [service(f"s{n}", f"10.97.{n >> 8}.{n & 255}") for n in range(IN_THREAD_ABOVE + 1)]
    run_story(story)
