"""The API's HTTP server: from requests to operations and views. Formats and statuses: docs/api.md."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vipd import __version__
from vipd.api.bodies import LARGEST_BODY, Bodies, body_of
from vipd.api.dataplane_routes import DataplaneRoutes
from vipd.api.deciding import Asked, Change, Known, decide
from vipd.api.event_routes import EventRoutes
from vipd.api.explain_routes import ExplainRoutes
from vipd.api.fleet_routes import FleetRoutes
from vipd.api.healthz import healthz_routes
from vipd.api.messages import answer, flag_of, long_answer, session_of
from vipd.api.override_routes import OverrideRoutes
from vipd.api.peers import Permission
from vipd.api.stats_routes import StatsRoutes
from vipd.api.stores import STORES, FleetStore, HostStore, Store, without_etcd
from vipd.control.address_policy import AddressPolicy
from vipd.control.reconciler import Reconciler
from vipd.control.reload import reload
from vipd.control.snapshot import AskHost
from vipd.dataplane.base import ApplyError, Dataplane
from vipd.declaration import operations
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import Outcome, RefusedError, declared
from vipd.host.containment import Containment
from vipd.host.systemd.fields import Event, fields
from vipd.model.check import Check
from vipd.model.service import Service
from vipd.observe.events.recorder import Recorder
from vipd.observe.flow_stats.collector import FlowStats
from vipd.observe.metrics.scrape import PATH as METRICS_PATH
from vipd.observe.metrics.scrape import Metrics
from vipd.observe.views import service_view, status_view
from vipd.sources.base import Source
from vipd.sources.override_store import OverrideStore
from vipd.sources.store import StoreError, StoreSource

if TYPE_CHECKING:
    from vipd.control.fleet_member import Fleet

log = logging.getLogger(__name__)

APPLY_TIMEOUT_SECONDS = 60.0
NAMES_LOGGED = 100
"""A change of more services names no more of them in the log."""

HTTP_STATUS = {
    "malformed": 400,
    "too-large": 413,
    "forbidden": 403,
    "not-found": 404,
    "conflict": 409,
    "owned": 409,
    "encoded": 415,
    "invalid": 422,
    "internal": 500,
    "busy": 503,
}


def _not_kept(_: str) -> None:
    """For a daemon that forgets such choices."""


async def _not_looked() -> None:
    """Where nothing has to be looked at."""


async def _nothing_lacks(_: Collection[Check]) -> Mapping[Check, tuple[str, ...]]:
    """Where every check can work."""
    return {}


def _nothing(_: object) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Served:
    """What the API shows and changes."""

    reconciler: Reconciler
    dataplane: Dataplane
    sources: Sequence[Source]
    store: StoreSource
    overrides: OverrideStore
    rescan: Callable[[], Awaitable[None]]
    """Reads every source anew."""
    about: Mapping[str, object]
    choose: Callable[[str], None] = _not_kept
    """Keeps an operator's choice of dataplane over a restart. Raises OSError."""
    claims: Callable[[], AddressPolicy] = AddressPolicy
    """Which addresses services may claim."""
    check_problems: AskHost = _nothing_lacks
    """What this host lacks for checks."""
    look_at_claims: Callable[[], Awaitable[object]] = _not_looked
    """Looks anew at what decides on that."""
    warnings_of: Callable[[Collection[Service]], Sequence[str]] = _nothing
    """What is to be told of these services' claims, as of the last look."""
    warnings: Callable[[], Sequence[str]] = tuple
    """What is wrong now besides the reconciler's own warnings."""
    events: Recorder | None = None
    """Keeps what has happened."""
    numbers: FlowStats | None = None
    """New flows, flows now, traffic."""
    fleet: Fleet | None = None
    """The fleet that this host is one of; None: no etcd is configured."""
    metrics: Metrics | None = None
    """What Prometheus asks for."""
    default_store: str = "file"
    """Where changes go that do not say: `file` or `etcd`."""

    def known(self) -> Known:
        """Every service as it is declared now."""
        fleet = self.fleet.store.services if self.fleet else {}
        return Known(self.reconciler.services, fleet, self.store.services)


def application(served: Served, permission: Permission) -> web.Application:
    """The aiohttp application; `permission` decides on each connection's peer."""
    routes = _Routes(served, permission)
    middlewares = [_errors(served.reconciler.containment), _guard(permission)]
    app = web.Application(middlewares=middlewares, client_max_size=LARGEST_BODY)
    events = EventRoutes(lambda: served.events, lambda: served.reconciler.services)
    app.on_shutdown.append(events.end)
    explaining = ExplainRoutes(served.reconciler, served.dataplane)
    app.on_cleanup.append(explaining.end)
    target = "/v1/services/{target}"
    app.add_routes(
        [
            web.get("/v1/version", routes.version),
            web.get("/v1/status", routes.status),
            web.get("/v1/services", routes.services),
            web.get(target, routes.service),
            web.get("/v1/export", routes.export),
            web.get("/v1/diff", routes.diff),
            web.post("/v1/services", routes.add),
            web.patch(target, routes.change),
            web.delete(target, routes.remove),
            web.post(target + "/backends", routes.add_backends),
            web.delete(target + "/backends", routes.remove_backends),
            web.patch(target + "/backends/{backend}", routes.set_weight),
            web.post("/v1/apply", routes.apply),
            web.post("/v1/reload", routes.reload),
            *routes.overrides(),
            *DataplaneRoutes(
                served.reconciler, served.dataplane, served.choose, permission, lambda: served.numbers
            ).routes(),
            *events.routes(),
            *explaining.routes(),
            *StatsRoutes(served.reconciler, lambda: served.numbers).routes(),
            *routes.fleet(),
            web.get(METRICS_PATH, routes.metrics),
            *healthz_routes(served.reconciler),
        ]
    )
    return app


class _Routes:
    def __init__(self, served: Served, permission: Permission) -> None:
        self._served = served
        self._permission = permission
        self._bodies = Bodies()
        self._overrides = OverrideRoutes(
            served.reconciler, served.overrides, permission, self._settle_moved, lambda: served.fleet
        )
        self._fleet = FleetRoutes(lambda: served.fleet, permission, lambda: self._settle_moved(("",)))

    async def version(self, _: web.Request) -> web.Response:
        return answer({"version": __version__})

    async def metrics(self, request: web.Request) -> web.Response:
        if self._served.metrics is None:
            raise RefusedError("internal", "no metrics are kept")
        return await self._served.metrics.answer(request)

    async def status(self, _: web.Request) -> web.Response:
        s = self._served
        about = {**s.about, "warnings": s.warnings()}
        if s.fleet is not None:
            about["etcd"] = s.fleet.status()
        return answer(status_view(s.reconciler, s.dataplane, s.sources, about))

    async def services(self, _: web.Request) -> web.Response:
        reconciler, dataplane = self._served.reconciler, self._served.dataplane
        ordered = dict(sorted(reconciler.services.items()))
        return await long_answer("services", ordered, lambda s: service_view(s, reconciler, dataplane))

    async def service(self, request: web.Request) -> web.Response:
        reconciler = self._served.reconciler
        found = operations.find(reconciler.services, request.match_info["target"])
        return answer({"service": service_view(found, reconciler, self._served.dataplane)})

    async def export(self, _: web.Request) -> web.Response:
        ordered = dict(sorted(self._served.reconciler.services.items()))
        return await long_answer("services", ordered, lambda s: operations.spec_of(declared(s)))

    async def diff(self, _: web.Request) -> web.Response:
        text = await self._served.reconciler.difference.text()
        return answer({"in_sync": not text, "diff": text})

    async def add(self, request: web.Request) -> web.Response:
        spec = (await body_of(request)).get("service")
        return await self._change(request, partial(operations.add, spec=spec))

    async def change(self, request: web.Request) -> web.Response:
        target, fields = request.match_info["target"], (await body_of(request)).get("service")
        return await self._change(request, partial(operations.change, target=target, fields=fields))

    async def remove(self, request: web.Request) -> web.Response:
        target = request.match_info["target"]
        return await self._change(request, partial(operations.remove, target=target))

    async def add_backends(self, request: web.Request) -> web.Response:
        target, specs = request.match_info["target"], (await body_of(request)).get("backends")
        return await self._change(request, partial(operations.add_backends, target=target, specs=specs))

    async def remove_backends(self, request: web.Request) -> web.Response:
        target, names = request.match_info["target"], (await body_of(request)).get("backends")
        return await self._change(request, partial(operations.remove_backends, target=target, names=names))

    async def set_weight(self, request: web.Request) -> web.Response:
        target, backend = request.match_info["target"], request.match_info["backend"]
        weight = (await body_of(request)).get("weight")
        service = operations.find(self._served.known().services(), target)
        # What another owner declares is not the store's to write: the weight is an order.
        if service.origin.source != self._store_of(request).source:
            return await self._overrides.order_weight(request, service.name, backend, weight)
        change = partial(operations.set_weight, target=target, backend=backend, weight=weight)
        return await self._change(request, change)

    async def apply(self, request: web.Request) -> web.Response:
        source = self._store_of(request).source

        def read(members: Json, services: Iterator[object] | None) -> tuple[list[Service], object]:
            given = members.get("services") if services is None else services
            return operations.parse_services(given, source=source), members.get("prune", False)

        wanted, prune = await self._bodies.read(request, LARGEST_BODY, read)
        if not isinstance(prune, bool):
            raise RefusedError("malformed", "prune must be true or false")
        change = partial(operations.apply, wanted=wanted, prune=prune)
        return await self._change(request, change, len(wanted))

    async def reload(self, request: web.Request) -> web.Response:
        served, cause = self._served, f"user {self._permission.peer(request.transport)}"
        reloaded = await reload(
            served.rescan, served.dataplane, served.reconciler, served.sources, cause=cause
        )
        if reloaded.problems:
            unwritten = reloaded.fault and f"not all of it is in the kernel: {reloaded.fault}"
            what = "not everything could be read anew"
            why = "; ".join(filter(None, (reloaded.serves, unwritten)))
            raise RefusedError("invalid", what, why, problems=reloaded.problems)
        return answer(
            {
                "changed": True,
                "applied": not reloaded.fault,
                "message": reloaded.fault,
                "services": reloaded.services,
                "results": _results(reloaded.actions),
            }
        )

    async def _change(self, request: web.Request, change: Change, size: int = 1) -> web.Response:
        """Decide, store, wait for the kernel, answer. Nobody else changes the store, or has changed etcd,
        between deciding and storing. `size`: how many services the change names."""
        served, store = self._served, self._store_of(request)
        await served.look_at_claims()
        dry_run = flag_of(request, "dry_run")
        policy = served.claims()
        if session := session_of(request):
            policy = replace(policy, host=policy.host.asked_over(*session))
        applied, message, place = False, "dry run: nothing was changed", store.place
        async with contextlib.nullcontext() if dry_run else store.turn:
            asked = Asked(change, store.source, policy, size)
            outcome = await decide(asked, served.known, served.check_problems)
            store.check(outcome)
            if not dry_run:
                if outcome.changed:
                    served.reconciler.causes.note(outcome.results, self._cause(request))
                saved = await store.save(outcome)
        if not dry_run:
            if outcome.changed:
                self._log_stored(outcome, store, request)
            place, message = saved.place, saved.fault
            if not message:
                applied, message = await self._settle(outcome, saved.units)
        return answer(
            {
                "changed": outcome.changed,
                "applied": applied,
                "message": message,
                "stored": place,
                "results": _results(outcome.results),
                "warnings": await self._warnings(outcome),
            }
        )

    async def _warnings(self, outcome: Outcome) -> Sequence[str]:
        """What is to be told of the services that a change names, and leaves."""
        named = [outcome.stored[name] for name in outcome.results if name in outcome.stored]
        return await asyncio.to_thread(self._served.warnings_of, named)

    def _store_of(self, request: web.Request) -> Store:
        """The store that a request is for. Raises RefusedError."""
        served = self._served
        wanted = request.query.get("store", served.default_store)
        if wanted not in STORES:
            raise RefusedError("malformed", f"store={wanted}", "", f"store is {' or '.join(STORES)}")
        if wanted == "file":
            return HostStore(served.store)
        if served.fleet is None:
            raise without_etcd()
        return FleetStore(served.fleet.store)

    def _cause(self, request: web.Request) -> str:
        return f"user {self._permission.peer(request.transport)}"

    def _log_stored(self, outcome: Outcome, store: Store, request: web.Request) -> None:
        names = tuple(name for name, action in outcome.results.items() if action != "unchanged")
        cause = self._cause(request)
        extra = fields(Event.CHANGE_STORED, service=names[:NAMES_LOGGED], unit=store.source, cause=cause)
        log.info("%s by %s", _told(outcome), self._permission.peer(request.transport), extra=extra)

    def overrides(self) -> list[web.RouteDef]:
        """The requests about orders."""
        return self._overrides.routes()

    def fleet(self) -> list[web.RouteDef]:
        """The requests about the fleet."""
        return self._fleet.routes()

    async def _settle_moved(self, services: Collection[str]) -> tuple[bool, str]:
        """Wait until the kernel has how the backends of these services stand; whether it has, and why not."""
        return await self._settle(Outcome({}, dict.fromkeys(services, "changed")))

    async def _settle(self, outcome: Outcome, units: Sequence[str] = ()) -> tuple[bool, str]:
        """Wait until the kernel has it; whether it has, and why not. `units`: what must serve for that."""
        reconciler = self._served.reconciler
        generation = reconciler.request_sync() if outcome.changed else reconciler.progress.requested
        if not await reconciler.wait_synced(generation, APPLY_TIMEOUT_SECONDS, outcome.results):
            return False, reconciler.progress.why_pending(APPLY_TIMEOUT_SECONDS)
        refused = reconciler.progress.quarantined
        faults = [f"{name} is quarantined: {refused[name]}" for name in outcome.results if name in refused]
        faults += [str(problem) for unit in units for problem in reconciler.problems.get(unit, ())]
        return not faults, "; ".join(faults)


def _results(actions: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "action": action} for name, action in actions.items()]


def _told(outcome: Outcome) -> str:
    told = [f"{name} {action}" for name, action in outcome.results.items() if action != "unchanged"]
    more = len(told) - NAMES_LOGGED
    return ", ".join(told[:NAMES_LOGGED]) + (f" and {more} more" if more > 0 else "")


def _error(kind: str, what: str, why: str = "", hint: str = "", problems: Sequence[str] = ()) -> web.Response:
    error = {"kind": kind, "what": what, "why": why, "hint": hint, "problems": list(problems)}
    return answer({"error": error}, HTTP_STATUS[kind])


def _errors(containment: Containment) -> Middleware:
    """Answers what is raised. What nobody expects is logged once for each kind of request, and is named in
    status until such a request is answered again."""

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        asked = f"{request.method} {resource.canonical}" if resource else "a request"
        response: web.StreamResponse
        with containment.around("API", f"answering {asked}"):
            try:
                response = await _answered(request, handler)
            except Exception as error:
                what, hint = f"{type(error).__name__}: {error}", "this is a fault in vipd; see its log"
                response = _error("internal", what, "", hint)
                raise
        return response

    return errors


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The answer, also where that is a refusal."""
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
            return _error("forbidden", f"{peer} may not change services", why, await permission.way_in(peer))
        return await handler(request)

    return guard
