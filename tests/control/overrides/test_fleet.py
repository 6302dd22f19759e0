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

from tests.control.overrides.isolated_overrides import BELOW, PREFIX, Etcd, IsolatedOverrides
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
def isolated(tmp_path: Path) -> Iterator[IsolatedOverrides]:
    made = IsolatedOverrides(tmp_path)
    made.declare([DNS])
    yield made
    made.close()


@pytest.mark.parametrize("fleet", [True, False])
def test_a_resume_of_what_has_left_the_declaration_says_that_it_worked(
    isolated: IsolatedOverrides, fleet: bool
) -> None:
    isolated.give({**PLACE, "admin": "draining"}, fleet)
    isolated.declare([])
    other = isolated.resume(PLACE, not fleet)
    assert (other["changed"], len(other["elsewhere"])) == (False, 1)
    done = isolated.resume(PLACE, fleet)
    assert (done["changed"], done["elsewhere"], len(done["overrides"])) == (True, [], 1)
    assert isolated.listed() == []


@pytest.mark.parametrize("timed_first", [True, False])
def test_a_weight_for_the_fleet_outlives_a_timed_drain(
    isolated: IsolatedOverrides, timed_first: bool
) -> None:
    orders = [{**PLACE, "admin": "draining", "for": 60}, {**PLACE, "weight": 5}]
    for order in orders if timed_first else orders[::-1]:
        isolated.give(order, fleet=True)
    assert {bool(lease) for _, _, lease in isolated.etcd.kvs.values()} == {True, False}
    # A version that knows no parts has the last key of a subject in force.
    last = from_json(loads(max(isolated.etcd.kvs.items())[1][0]))
    assert (str(last.admin), last.until) == ("draining", isolated.now + timedelta(seconds=60))
    isolated.pass_time(61)
    isolated.etcd.end_leases()
    isolated.hear()
    assert [order.get("weight") for order in isolated.listed()] == [5]
    assert list(isolated.etcd.overrides) == ["_weights/services/dns/10.0.0.1"]


def test_what_an_older_version_wrote_as_one_order_is_kept_in_parts(isolated: IsolatedOverrides) -> None:
    isolated.give({**PLACE, "admin": "draining", "weight": 5, "for": 60}, fleet=True)
    assert list(isolated.etcd.kvs) == [f"{BELOW}services/dns/10.0.0.1"]
    isolated.give({**PLACE, "admin": "disabled"}, fleet=True)
    found = sorted((o["admin"], o.get("weight"), "until" in o) for o in isolated.listed())
    assert found == [("active", 5, True), ("disabled", None, False)]
    isolated.resume(PLACE, fleet=True)
    assert isolated.etcd.kvs == {}


def test_nobody_waits_for_etcd_while_vipd_stops(isolated: IsolatedOverrides) -> None:
    etcd: Etcd = isolated.etcd
    store = EtcdStore(cast(EtcdClient, etcd), cast(EtcdSource, etcd), PREFIX, lambda: isolated.now)

    async def story() -> str:
        waiting = asyncio.create_task(store.wait_observed(WriteResult(7, {f"{BELOW}x": True})))
        await asyncio.sleep(0)
        assert not waiting.done()
        store.stop_waiting()
        return await waiting

    assert "vipd is stopping" in asyncio.run(story())


@pytest.mark.parametrize("fleet", [True, False])
def test_the_daemons_loops_end_an_order_by_this_hosts_clock(isolated: IsolatedOverrides, fleet: bool) -> None:
    """etcd is away, so that no lease ends: neither its key nor anybody else says that the time is over."""
    isolated.give({**PLACE, "admin": "draining", "for": 60}, fleet)
    isolated.etcd.away = True
    parts = SimpleNamespace(
        overrides=isolated.store,
        maintenance=MaintenanceStore(Path("/nonexistent/maintenance.json"), lambda: isolated.now),
        fleet=SimpleNamespace(overrides=isolated.orders),
        reconciler=SimpleNamespace(
            clock=lambda: isolated.now, request_sync=lambda: synced.append(isolated.now)
        ),
    )
    synced: list[datetime] = []
    began = isolated.now

    async def again(work: Work) -> None:
        while True:
            await work()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        events = _Events(parts.reconciler)
        isolated.observers.add(events)
        tasks = [
            loop.create_task(again(work)) for work in _override_loops(cast(Parts, parts), events).values()
        ]
        for second in range(1, 70):
            await asyncio.sleep(1)
            isolated.now = began + timedelta(seconds=second)
            if second == 50:
                assert isolated.backend_statuses(DNS), "it is in force until then"
        for task in tasks:
            task.cancel()

    simulate(story())
    assert not isolated.backend_statuses(DNS)
    assert len(synced) == 1
    assert timedelta(seconds=60) <= synced[0] - began <= timedelta(seconds=62)
