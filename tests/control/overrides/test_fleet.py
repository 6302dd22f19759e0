"""Orders of this host beside those of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from json import loads
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.control.overrides.world import BELOW, PREFIX, Etcd, World
from tests.lab.simulated_time import simulate
from tests.model.samples import service
from vipd.daemon.loops import _Events, _override_loops
from vipd.daemon.wiring import Parts
from vipd.host.supervisor import Work
from vipd.model.override import from_json
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.source import EtcdSource
from vipd.sources.etcd.store import EtcdStore, WriteResult
from vipd.sources.maintenance_store import MaintenanceStore

PLACE = {"service": "dns", "backend": "10.0.0.1"}
DNS = service("dns", "10.96.0.10", "", 1, "10.0.0.1")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.declare([DNS])
    yield made
    made.close()


@pytest.mark.parametrize("fleet", [True, False])
def test_a_resume_of_what_has_left_the_declaration_says_that_it_worked(world: World, fleet: bool) -> None:
    world.give({**PLACE, "admin": "draining"}, fleet)
    world.declare([])
    other = world.resume(PLACE, not fleet)
    assert (other["changed"], len(other["elsewhere"])) == (False, 1)
    done = world.resume(PLACE, fleet)
    assert (done["changed"], done["elsewhere"], len(done["overrides"])) == (True, [], 1)
    assert world.listed() == []


@pytest.mark.parametrize("timed_first", [True, False])
def test_a_weight_for_the_fleet_outlives_a_timed_drain(world: World, timed_first: bool) -> None:
    orders = [{**PLACE, "admin": "draining", "for": 60}, {**PLACE, "weight": 5}]
    for order in orders if timed_first else orders[::-1]:
        world.give(order, fleet=True)
    assert {bool(lease) for _, _, lease in world.etcd.kvs.values()} == {True, False}
    # A version that knows no parts has the last key of a subject in force.
    last = from_json(loads(max(world.etcd.kvs.items())[1][0]))
    assert (str(last.admin), last.until) == ("draining", world.now + timedelta(seconds=60))
    world.pass_time(61)
    world.etcd.end_leases()
    world.hear()
    assert [order.get("weight") for order in world.listed()] == [5]
    assert list(world.etcd.overrides) == ["_weights/services/dns/10.0.0.1"]


def test_what_an_older_version_wrote_as_one_order_is_kept_in_parts(world: World) -> None:
    world.give({**PLACE, "admin": "draining", "weight": 5, "for": 60}, fleet=True)
    assert list(world.etcd.kvs) == [f"{BELOW}services/dns/10.0.0.1"]
    world.give({**PLACE, "admin": "disabled"}, fleet=True)
    found = sorted((o["admin"], o.get("weight"), "until" in o) for o in world.listed())
    assert found == [("active", 5, True), ("disabled", None, False)]
    world.resume(PLACE, fleet=True)
    assert world.etcd.kvs == {}


def test_nobody_waits_for_etcd_while_vipd_stops(world: World) -> None:
    etcd: Etcd = world.etcd
    store = EtcdStore(cast(EtcdClient, etcd), cast(EtcdSource, etcd), PREFIX, lambda: world.now)

    async def story() -> str:
        waiting = asyncio.create_task(store.wait_observed(WriteResult(7, {f"{BELOW}x": True})))
        await asyncio.sleep(0)
        assert not waiting.done()
        store.stop_waiting()
        return await waiting

    assert "vipd is stopping" in asyncio.run(story())


@pytest.mark.parametrize("fleet", [True, False])
def test_the_daemons_loops_end_an_order_by_this_hosts_clock(world: World, fleet: bool) -> None:
    """etcd is away, so that no lease ends: neither its key nor anybody else says that the time is over."""
    world.give({**PLACE, "admin": "draining", "for": 60}, fleet)
    world.etcd.away = True
    parts = SimpleNamespace(
        overrides=world.store,
        maintenance=MaintenanceStore(Path("/nonexistent/maintenance.json"), lambda: world.now),
        fleet=SimpleNamespace(overrides=world.orders),
        reconciler=SimpleNamespace(clock=lambda: world.now, request_sync=lambda: synced.append(world.now)),
    )
    synced: list[datetime] = []
    began = world.now

    async def again(work: Work) -> None:
        while True:
            await work()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        events = _Events(parts.reconciler)
        world.observers.add(events)
        tasks = [
            loop.create_task(again(work)) for work in _override_loops(cast(Parts, parts), events).values()
        ]
        for second in range(1, 70):
            await asyncio.sleep(1)
            world.now = began + timedelta(seconds=second)
            if second == 50:
                assert world.backend_statuses(DNS), "it is in force until then"
        for task in tasks:
            task.cancel()

    simulate(story())
    assert not world.backend_statuses(DNS)
    assert len(synced) == 1
    assert timedelta(seconds=60) <= synced[0] - began <= timedelta(seconds=62)
