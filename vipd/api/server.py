"""The API's HTTP server: maps requests to operations and views. Formats and statuses: docs/api.md."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vipd import __version__
from vipd.api.context import ApiContext
from vipd.api.dataplane_routes import DataplaneRoutes
from vipd.api.event_routes import EventRoutes
from vipd.api.explain_routes import ExplainRoutes
from vipd.api.fleet_routes import FleetRoutes
from vipd.api.healthz import healthz_routes
from vipd.api.history_routes import HistoryRoutes
from vipd.api.host_routes import HostRoutes
from vipd.api.messages import json_response, route
from vipd.api.override_routes import OverrideRoutes
from vipd.api.peers import Permission
from vipd.api.request_bodies import MAX_BODY_BYTES
from vipd.api.service_routes import ServiceRoutes, results_view
from vipd.api.stats_routes import StatsRoutes
from vipd.control.reload import reload
from vipd.control.shared_run import SharedAnswers
from vipd.dataplane.base import ApplyError
from vipd.declaration.operations import RefusedError
from vipd.host.containment import Containment
from vipd.observe.announcement_views import summary_view
from vipd.observe.metrics.scrape import PATH as METRICS_PATH
from vipd.observe.name_views import names_summary
from vipd.observe.views import status_view
from vipd.sources.state import StoreError

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

HTTP_STATUS = {
    "malformed": 400,
    "too-large": 413,
    "forbidden": 403,
    "not-found": 404,
    "conflict": 409,
    "changed": 409,
    "owned": 409,
    "encoded": 415,
    "invalid": 422,
    "internal": 500,
    "busy": 503,
}


def application(context: ApiContext, permission: Permission) -> web.Application:
    """The aiohttp application; `permission` decides on each connection's peer."""
    reconciler, dataplane = context.reconciler, context.dataplane
    middlewares = [_errors(reconciler.containment), _guard(permission)]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    events = EventRoutes(context.events, lambda: reconciler.services)
    app.on_shutdown.append(events.end)
    explaining = ExplainRoutes(reconciler, dataplane, context.announcer)
    app.on_cleanup.append(explaining.end)
    overrides = OverrideRoutes(reconciler, context.overrides, permission, context.wait_applied, context.fleet)
    answers = SharedAnswers(lambda: reconciler.progress.revision)
    services = ServiceRoutes(context, permission, overrides, answers)
    app.add_routes(
        [
            *_DaemonRoutes(context, permission).routes(),
            *services.routes(),
            *HistoryRoutes(context, permission, services).routes(),
            *overrides.routes(),
            *_host_routes(context, permission),
            *DataplaneRoutes(
                reconciler, dataplane, context.save_dataplane_choice, permission, context.flow_stats
            ).routes(),
            *events.routes(),
            *explaining.routes(),
            *StatsRoutes(reconciler, context.flow_stats, answers).routes(),
            *FleetRoutes(context.fleet, context.sources, permission, context.wait_applied).routes(),
            *healthz_routes(reconciler),
        ]
    )
    return app


def _host_routes(context: ApiContext, permission: Permission) -> list[web.RouteDef]:
    """The routes about this host; none without what they show."""
    if context.announcer is None:
        return []
    return HostRoutes(context.reconciler, context.overrides, context.announcer, permission).routes()


class _DaemonRoutes:
    """Handles requests about the daemon as a whole."""

    def __init__(self, context: ApiContext, permission: Permission) -> None:
        self._context, self._permission = context, permission

    def routes(self) -> list[web.RouteDef]:
        return [
            route("GET", "/v1/version", self.version),
            route("GET", "/v1/status", self.status),
            route("GET", "/v1/diff", self.diff),
            route("POST", "/v1/reload", self.reload),
            route("GET", METRICS_PATH, self.metrics),
        ]

    async def version(self, _: web.Request) -> web.Response:
        return json_response({"version": __version__})

    async def metrics(self, request: web.Request) -> web.Response:
        if self._context.metrics is None:
            raise RefusedError("internal", "no metrics are kept")
        return await self._context.metrics.answer(request)

    async def status(self, _: web.Request) -> web.Response:
        s = self._context
        about = {**s.about, "warnings": s.warnings()}
        if fast_path := s.fast_path():
            about["fast_path"] = fast_path
        if s.reconciler.resolver and (names := names_summary(s.reconciler.resolver)):
            about["names"] = names
        if waits := s.store.confirmation_view():
            about["confirmation"] = waits
        if s.announcer is not None and (s.announcer.active or s.announcer.maintenance):
            faults = {by.value: why for by, why in s.announcer.faults.items()}
            about["announcements"] = summary_view(
                s.announcer.state, s.announcer.maintenance, faults, s.announcer.lans
            )
        if s.fleet is not None:
            about["etcd"] = s.fleet.status()
        return json_response(status_view(s.reconciler, s.dataplane, s.sources, about))

    async def diff(self, _: web.Request) -> web.Response:
        text = await self._context.reconciler.difference.text()
        return json_response({"in_sync": not text, "diff": text})

    async def reload(self, request: web.Request) -> web.Response:
        context, cause = self._context, f"user {self._permission.peer(request.transport)}"
        reloaded = await reload(
            context.rescan, context.dataplane, context.reconciler, context.sources, cause=cause
        )
        if reloaded.problems:
            unwritten = reloaded.fault and f"not all of it is in the kernel: {reloaded.fault}"
            what = "not everything could be read anew"
            why = "; ".join(filter(None, (reloaded.serves, unwritten)))
            raise RefusedError("invalid", what, why, problems=reloaded.problems)
        return json_response(
            {
                "changed": True,
                "applied": not reloaded.fault,
                "message": reloaded.fault,
                "services": reloaded.services,
                "results": results_view(reloaded.actions),
            }
        )


def _error(kind: str, what: str, why: str = "", hint: str = "", problems: Sequence[str] = ()) -> web.Response:
    error = {"kind": kind, "what": what, "why": why, "hint": hint, "problems": list(problems)}
    return json_response({"error": error}, HTTP_STATUS[kind])


def _errors(containment: Containment) -> Middleware:
    """Converts exceptions to answers. An unexpected one is logged once for each kind of request, and is named
    in status until such a request succeeds again."""

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        asked = f"{request.method} {resource.canonical}" if resource else "a request"
        response: web.StreamResponse
        with containment.contain("API", f"answering {asked}"):
            try:
                response = await _answered(request, handler)
            except Exception as error:
                what, hint = f"{type(error).__name__}: {error}", "this is a fault in vipd; see its log"
                response = _error("internal", what, "", hint)
                raise
        return response

    return errors


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The answer, or the refusal as an answer."""
    try:
        return await handler(request)
    except RefusedError as refused:
        problems = [str(problem) for problem in refused.problems]
        return _error(refused.kind, refused.what, refused.why, refused.hint, problems)
    except StoreError as error:
        return _error("internal", str(error))
    except ApplyError as error:
        return _error("internal", error.what, error.why, error.hint)
    except web.HTTPException as error:
        kind = "not-found" if error.status in (404, 405) else "malformed"
        return _error(
            kind, f"{request.method} {request.path}: {error.reason}", "", "docs/api.md lists the requests"
        )


def _guard(permission: Permission) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            what = f"Content-Encoding: {encoding[:40]!a}"
            return _error("encoded", what, "no body is decompressed", "leave it out")
        peer = permission.peer(request.transport)
        if request.method not in ("GET", "HEAD") and not await permission.may_change(peer):
            why = f"changes are accepted from root and from group {permission.admin_group}"
            return _error(
                "forbidden", f"{peer} may not change services", why, await permission.how_to_get_access(peer)
            )
        return await handler(request)

    return guard
