"""Long answers and large changes: what one user asks for many times costs as much as once, and delays nobody
else's small changes."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from tests.api.serving import WEB, Api, served
from tests.faults.instrumented import standstills
from tests.model.samples import many_declared
from vipd.api import request_bodies, service_changes, service_routes, user_quota
from vipd.api.stats_routes import StatsRoutes
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.control.shared_run import SharedAnswers
from vipd.dataplane.counting import BackendKey
from vipd.declaration.native import parse_declaration
from vipd.declaration.operations import spec_of
from vipd.model.service import Family, Masquerade
from vipd.observe.flow_stats.refusals import Refusals
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.observe.flow_stats.traffic import ConntrackTable, TrackedFlows, TrackedSnapshot
from vipd.observe.views import service_view

READERS = 40


def specs(number: int) -> list[dict[str, object]]:
    declared = parse_declaration(many_declared(number, 2), "many.yaml").services
    return [spec_of(service) for service in declared]


def test_many_readers_cost_one_answer_which_is_never_of_an_earlier_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = list[str]()

    def noted(service: Any, *rest: Any) -> Any:
        shown.append(service.name)
        return service_view(service, *rest)

    monkeypatch.setattr(service_routes, "service_view", noted)

    async def story(api: Api) -> None:
        assert (await api.ask("POST", "/v1/apply", {"services": specs(30)})).status == 200
        for number in (31, 32):
            added = {**WEB, "name": f"w{number}", "address": f"10.250.0.{number}"}
            assert (await api.add(added)).status == 200
            shown.clear()
            answers = await asyncio.gather(*(api.ask("GET", "/v1/services") for _ in range(READERS)))
            assert {len(answer.body["services"]) for answer in answers} == {number}
            assert len(shown) <= 2 * number
            export = await api.ask("GET", "/v1/export")
            assert added["name"] in [spec["name"] for spec in export.body["services"]]
        assert (await api.ask("DELETE", "/v1/services/w31")).status == 200
        assert len((await api.ask("GET", "/v1/export")).body["services"]) == 31

    served(story)


def test_large_changes_go_one_by_one_in_turn_between_users_and_small_ones_past_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_bodies, "SMALL_BODY_BYTES", 1000)
    monkeypatch.setattr(user_quota, "_uid_of", lambda request: int(request.query.get("confirm", "0")))
    monkeypatch.setattr(service_routes, "confirm_seconds_of", lambda request: None)
    evaluate, entered, end = service_changes._evaluate, list[int](), threading.Event()

    def slow(request: Any, *rest: Any) -> Any:
        if request.size > 1:
            entered.append(request.size)
            assert end.wait(60)
        return evaluate(request, *rest)

    monkeypatch.setattr(service_changes, "_evaluate", slow)

    async def story(api: Api) -> None:
        tasks = []
        for user, number in ((1, 300), (1, 301), (1, 302), (2, 303)):
            path = f"/v1/apply?dry_run=1&confirm={user}"
            asked = asyncio.create_task(api.ask("POST", path, {"services": specs(number)}))
            tasks.append(asked)
            await api.until(lambda: api.begun == len(tasks))
        await api.until(lambda: entered)
        for dry_run in ("?dry_run=1", ""):
            small = {"service": {**WEB, "address": "10.250.0.1"}}
            assert (await api.ask("POST", f"/v1/services{dry_run}", small)).status == 200
        assert entered == [300], "the others wait for their turn"
        end.set()
        assert [(await task).status for task in tasks] == [200] * 4
        assert entered == [300, 303, 301, 302]

    served(story)


def test_a_large_change_is_prepared_while_others_change_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "SMALL_BODY_BYTES", 1000)

    async def story(api: Api) -> None:
        ahead, begun, end = api.store.format_ahead, threading.Event(), threading.Event()

        def slow(services: Any) -> None:
            ahead(services)
            begun.set()
            assert end.wait(60)

        monkeypatch.setattr(api.store, "format_ahead", slow)
        large = asyncio.create_task(api.ask("POST", "/v1/apply", {"services": specs(30)}))
        await api.until(begun.is_set)
        assert (await api.add({**WEB, "address": "10.250.0.1"})).body["applied"] is True
        end.set()
        answer = await large
        assert (answer.status, answer.body["applied"]) == (200, True)
        assert len(api.stored()) == 31

    served(story)


def test_numbers_of_many_services_do_not_hold_the_loop() -> None:
    """In one piece they held it for 283 ms at 10,000 services."""
    services = {s.name: s for s in parse_declaration(many_declared(2000, 3), "many.yaml").services}
    policy = SelectionPolicy(dict.fromkeys(Family, Masquerade.HAIRPIN))
    forwardings = {name: select_backends(s, policy) for name, s in services.items()}
    keys = [
        BackendKey(f.key, e.address, e.port)
        for each in forwardings.values()
        for f in each
        for e in f.reachable()
    ]
    totals = FlowTotals()
    totals.add(dict.fromkeys(keys, 7))
    now = datetime.now(UTC)

    async def done() -> None:
        """Nothing is to be read."""

    async def sums() -> TrackedSnapshot:
        return TrackedSnapshot(now, {key: TrackedFlows(1) for key in keys})

    table = SimpleNamespace(sums=sums, table=lambda: ConntrackTable(1, 2, accounting=True))
    collector = SimpleNamespace(totals=totals, refusals=Refusals(), read_at=now)
    traffic = SimpleNamespace(uncounted=lambda _: None)
    numbers = SimpleNamespace(table=table, collector=collector, traffic=traffic, refresh=done)
    reconciler = SimpleNamespace(services=services, forwardings=forwardings, backend_statuses=lambda _: {})
    routes = StatsRoutes(cast("Any", reconciler), cast("Any", numbers), SharedAnswers(lambda: 0))

    async def story() -> tuple[web.Response, ...]:
        request = cast("Any", SimpleNamespace(query={}))
        return tuple(await asyncio.gather(routes.stats(request), routes.stats(request)))

    with standstills("") as found:
        first, _ = asyncio.run(story())
    assert found == []
    assert isinstance(first.body, bytes)
    views = json.loads(first.body)["services"]
    assert [view["new_flows"] for view in views] == [21] * 2000
