"""The API's requests about numbers: new flows, flows now, traffic; and the tracked flows one by one."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from heapq import nsmallest

from aiohttp import web

from vipd.api.messages import body_response, flag_of, json_response, list_body, route
from vipd.api.stats_views import FlowSnapshot, flow_sort_key, flow_view, service_stats_view
from vipd.control.reconciler import Reconciler
from vipd.control.shared_run import SharedAnswers
from vipd.dataplane.conntrack.entries import flow_state
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import RefusedError, find
from vipd.declaration.syntax import InvalidTextError, parse_address, parse_backend, parse_frontend
from vipd.model.formatting import time_text
from vipd.model.forwarding import Forwarding
from vipd.model.service import Service
from vipd.observe.flow_stats.collector import FlowStats
from vipd.observe.flow_stats.traffic import Flow, FlowTable, TrackedSnapshot
from vipd.observe.flow_stats.traffic_counting import UncountedReason

DEFAULT_LIMIT = 50
MAX_FLOWS = 100_000
MAX_LISTINGS = 16
"""Requests for tracked flows at once. Each reads the whole table of connection tracking, in turn."""
_MAX_SHOWN = 40

FlowFilter = Callable[[Flow], bool]


class StatsRoutes:
    """Answers `/v1/stats` and `/v1/conntrack`."""

    def __init__(self, reconciler: Reconciler, flow_stats: FlowStats | None, answers: SharedAnswers) -> None:
        self._reconciler, self._flow_stats, self._answers = reconciler, flow_stats, answers
        self._listings = asyncio.Semaphore(MAX_LISTINGS)

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        filters = ("target", "backend", "client", "state", "limit")
        return [
            route("GET", "/v1/stats", self.stats, flags=("backends",), parameters=("service",)),
            route("GET", "/v1/conntrack", self.conntrack, parameters=filters),
        ]

    async def stats(self, request: web.Request) -> web.Response:
        """The numbers of all services, or of one; with `backends=0` without those of backends."""
        services, backends = self._reconciler.services, flag_of(request, "backends", default=True)
        if target := request.query.get("service"):
            service = find(services, target)
            return body_response(await self._stats_of({service.name: service}, backends))
        # A number must not be older than its request: it is compared with what was sent before.
        body = await self._answers.body(
            ("stats", backends), lambda: self._stats_of(self._reconciler.services, backends), kept=False
        )
        return body_response(body)

    async def _stats_of(self, services: Mapping[str, Service], backends: bool) -> bytes:
        numbers = self._take_snapshot()
        await numbers.refresh()
        views, fault = await _sums(numbers.table)
        table, totals = numbers.table.table(), numbers.collector.totals
        uncounted = numbers.traffic.uncounted(table)
        counted = FlowSnapshot(
            totals,
            views.backends if views else None,
            traffic=uncounted is None,
            refused=numbers.collector.refusals.services(),
        )
        tracked, forwardings = counted.by_service(), self._reconciler.forwardings
        return await list_body(
            "services",
            [services[name] for name in sorted(services)],
            lambda service: service_stats_view(
                service,
                forwardings.get(service.name, ()),
                counted,
                tracked.get(service.name, ()),
                backends=backends,
                backend_statuses=self._reconciler.backend_statuses(service),
            ),
            {
                "at": time_text(numbers.collector.read_at, milliseconds=True),
                "conntrack": {
                    "at": time_text(views.at, milliseconds=True) if views else None,
                    "entries": table.entries,
                    "max": table.limit,
                    "accounting": table.accounting,
                    "fault": fault,
                },
                "traffic": _traffic_view(uncounted, totals.lost),
            },
        )

    async def conntrack(self, request: web.Request) -> web.Response:
        """The tracked flows of a service, sorted by backend and client."""
        query = request.query
        if "target" not in query:
            raise RefusedError("malformed", "target is missing", "", "target=NAME")
        service = find(self._reconciler.services, query["target"])
        tests = [
            *_frontend_filter(service, query["target"]),
            *(_backend_filter(query["backend"]) if query.get("backend") else ()),
            *(_client_filter(query["client"]) if query.get("client") else ()),
            *(_state_filter(query["state"]) if query.get("state") else ()),
        ]
        limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
        forwardings = self._reconciler.forwardings.get(service.name, ())
        try:
            async with self._listings:
                total, flows = await self._flows(forwardings, tests, limit)
        except ConntrackError as error:
            raise RefusedError("internal", error.what, error.why, error.hint) from None
        return json_response({"service": service.name, "total": total, "flows": flows})

    async def _flows(
        self, forwardings: Sequence[Forwarding], filters: Sequence[FlowFilter], limit: int
    ) -> tuple[int, list[Json]]:
        found = await self._take_snapshot().table.flows(
            forwardings, lambda flow: all(t(flow) for t in filters)
        )

        def views() -> list[Json]:
            now = time.time()
            return [flow_view(flow, now) for flow in nsmallest(limit, found, flow_sort_key)]

        return len(found), await asyncio.to_thread(views)

    def _take_snapshot(self) -> FlowStats:
        if self._flow_stats is None:
            raise RefusedError("internal", "nothing is counted")
        return self._flow_stats


async def _sums(table: FlowTable) -> tuple[TrackedSnapshot | None, str]:
    """Data of connection tracking, or why it is missing: the rest is reported all the same."""
    try:
        return await table.sums(), ""
    except ConntrackError as error:
        return None, str(error)


def _traffic_view(uncounted: UncountedReason | None, lost: int) -> Json:
    why, hint = uncounted or ("", "")
    return {"counted": uncounted is None, "why": why, "hint": hint, "lost_flows": lost}


def _frontend_filter(service: Service, target: str) -> list[FlowFilter]:
    """A service's name matches all its frontends; an address its own, and a frontend matches itself."""
    if target == service.name:
        return []
    with suppress(InvalidTextError):
        address = parse_address(target)
        return [lambda flow: flow.entry.destination[0] == address]
    try:
        frontend = parse_frontend(target)
    except InvalidTextError:
        return []
    place = (frontend.address, frontend.port)
    return [lambda flow: flow.entry.destination == place and flow.entry.protocol == frontend.protocol]


def _backend_filter(word: str) -> list[FlowFilter]:
    try:
        backend = parse_backend(word)
    except InvalidTextError as error:
        raise RefusedError("malformed", error.what, "", error.hint) from None
    return [lambda flow: flow.place.address == backend.address and backend.port in (None, flow.place.port)]


def _client_filter(word: str) -> list[FlowFilter]:
    try:
        network = ipaddress.ip_network(word, strict=False)
    except ValueError:
        raise RefusedError(
            "malformed", f"client={word}", "", "an address or a network: 10.1.0.0/16"
        ) from None
    return [lambda flow: ipaddress.ip_address(flow.entry.source[0]) in network]


def _state_filter(word: str) -> list[FlowFilter]:
    state = word.upper().replace("-", "_")
    return [lambda flow: flow_state(flow.entry) == state]


def _limit(word: str) -> int:
    known = word.isascii() and word.isdecimal() and len(word) <= len(str(MAX_FLOWS))
    if not known or not 0 < int(word) <= MAX_FLOWS:
        raise RefusedError("malformed", f"limit={word[:_MAX_SHOWN]}", "", f"1 to {MAX_FLOWS}")
    return int(word)
