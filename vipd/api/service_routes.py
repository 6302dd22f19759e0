"""API routes that list, show, export, declare, change and remove services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from aiohttp import web

from vipd.api.context import ApiContext
from vipd.api.messages import (
    API_VERSION,
    BodyHandler,
    body_response,
    body_route,
    confirm_seconds_of,
    flag_of,
    json_response,
    list_body,
    route,
    session_of,
)
from vipd.api.override_routes import OverrideRoutes
from vipd.api.peers import Permission
from vipd.api.request_bodies import (
    SMALL_BODY_BYTES,
    is_large,
    parse_body,
    read_large,
    read_raw,
    refuse_unknown_members,
)
from vipd.api.service_changes import Change, ChangeRequest, decide
from vipd.api.stores import STORES, FleetStore, HostStore, Store, no_confirmation_error, no_etcd_error
from vipd.control.address_policy import AddressPolicy
from vipd.control.shared_run import SharedAnswers
from vipd.declaration import operations
from vipd.declaration.bounded_json import Json
from vipd.declaration.listed_backends import as_declared
from vipd.declaration.operations import Outcome, RefusedError
from vipd.host.batches import in_slices
from vipd.host.gc_control import gc_paused, return_freed_memory
from vipd.host.systemd.fields import Event, fields
from vipd.model.service import Service
from vipd.observe.views import service_view
from vipd.sources.history import ChangeNote

log = logging.getLogger(__name__)

NAMES_LOGGED = 100
"""Maximum number of services that the log entry of one change names."""

MAX_LARGE_BODIES = 3
"""Large bodies that are in memory at a time."""
MAX_IN_ETCD = 8
"""Small changes that wait for etcd at a time."""
FREED_AT_ONCE = 100
"""Services whose memory is freed in some tenths of a millisecond."""

CHANGE_FLAGS, CHANGE_PARAMETERS = ("dry_run",), ("store", "confirm")
"""Of each change of services."""
APPLY_MEMBERS = ("services", "prune", "apiVersion")
"""A declaration, as `GET /v1/export` answers it, and `prune`."""


def change_route(
    method: str, path: str, handler: BodyHandler, member: str, parameters: Collection[str] = ()
) -> web.RouteDef:
    """A route to a change of services, for `ServiceRoutes.carry_out`."""
    known = (*CHANGE_PARAMETERS, *parameters)
    return body_route(method, path, handler, (member,), flags=CHANGE_FLAGS, parameters=known)


class ServiceRoutes:
    """Handles requests to `/v1/services`, `/v1/export` and `/v1/apply`."""

    def __init__(
        self,
        context: ApiContext,
        permission: Permission,
        overrides: OverrideRoutes,
        answers: SharedAnswers,
    ) -> None:
        self._context, self._permission, self._overrides = context, permission, overrides
        self._answers = answers
        self._turns = {operations.CLI: asyncio.Semaphore(), "etcd": asyncio.Semaphore(MAX_IN_ETCD)}
        """Of small changes, by store. Those of the file are written one at a time anyway."""
        self._arriving, self._large = asyncio.Semaphore(MAX_LARGE_BODIES), asyncio.Semaphore()

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        target = "/v1/services/{target}"
        return [
            route("GET", "/v1/services", self.services),
            route("GET", target, self.service),
            route("GET", "/v1/export", self.export),
            change_route("POST", "/v1/services", self.add, "service"),
            change_route("PATCH", target, self.change, "service", parameters=("version",)),
            route("DELETE", target, self.remove, flags=CHANGE_FLAGS, parameters=CHANGE_PARAMETERS),
            change_route("POST", target + "/backends", self.add_backends, "backends"),
            change_route("DELETE", target + "/backends", self.remove_backends, "backends"),
            change_route("PATCH", target + "/backends/{backend}", self.set_weight, "weight"),
            route(
                "POST",
                "/v1/apply",
                self.apply,
                flags=CHANGE_FLAGS,
                parameters=CHANGE_PARAMETERS,
                large_body=True,
            ),
        ]

    async def services(self, _: web.Request) -> web.Response:
        """Show every service with its current state."""
        return body_response(await self._answers.body("services", self._services))

    async def _services(self) -> bytes:
        reconciler, dataplane = self._context.reconciler, self._context.dataplane
        announced, held = self._context.announced(), self._context.held()

        def view(service: Service) -> Json:
            here, why = announced.get(service.name, ()), held.get(service.origin.owner, "")
            return service_view(service, reconciler, dataplane, here, why)

        return await list_body("services", _ordered(reconciler.services), view)

    async def service(self, request: web.Request) -> web.Response:
        """Show one service, found by name or frontend, with the version of its declaration."""
        reconciler = self._context.reconciler
        found = operations.find(reconciler.services, request.match_info["target"])
        announced = self._context.announced().get(found.name, ()) if found.announcement else ()
        held = self._context.held().get(found.origin.owner, "")
        view = service_view(found, reconciler, self._context.dataplane, announced, held)
        if found.origin.source == operations.CLI and (
            waits := self._context.store.confirmation_view(found.name)
        ):
            view["confirmation"] = waits
        return json_response({"service": view, "version": operations.version_of(found)})

    async def export(self, _: web.Request) -> web.Response:
        """Show every service as it is declared."""

        async def declared() -> bytes:
            ordered = _ordered(self._context.reconciler.services)
            return await list_body("services", ordered, lambda s: operations.spec_of(as_declared(s)))

        return body_response(await self._answers.body("export", declared))

    async def add(self, request: web.Request, body: Json) -> web.Response:
        """Declare a new service."""
        spec = body.get("service")
        return await self.carry_out(request, partial(operations.add, spec=spec))

    async def change(self, request: web.Request, body: Json) -> web.Response:
        """Change fields of a service."""
        target, fields = request.match_info["target"], body.get("service")
        version = request.query.get("version", "")
        change = partial(operations.change, target=target, fields=fields, version=version)
        return await self.carry_out(request, change)

    async def remove(self, request: web.Request) -> web.Response:
        """Remove a service."""
        target = request.match_info["target"]
        return await self.carry_out(request, partial(operations.remove, target=target))

    async def add_backends(self, request: web.Request, body: Json) -> web.Response:
        """Add backends to a service."""
        target, specs = request.match_info["target"], body.get("backends")
        return await self.carry_out(request, partial(operations.add_backends, target=target, specs=specs))

    async def remove_backends(self, request: web.Request, body: Json) -> web.Response:
        """Remove backends from a service."""
        target, names = request.match_info["target"], body.get("backends")
        return await self.carry_out(request, partial(operations.remove_backends, target=target, names=names))

    async def set_weight(self, request: web.Request, body: Json) -> web.Response:
        """Change the weight of one backend."""
        target, backend = request.match_info["target"], request.match_info["backend"]
        weight = body.get("weight")
        service = operations.find(self._context.services_snapshot().services(), target)
        # The store must not change another owner's declaration: the weight becomes an override.
        if service.origin.source != self.store_of(request).source:
            if confirm_seconds_of(request) is not None:
                why = "its weight becomes an order, which is not in the history"
                raise RefusedError(
                    "invalid", f"{service.name} is not in this store", why, "leave confirm out"
                )
            return await self._overrides.override_weight(request, service.name, backend, weight)
        change = partial(operations.set_weight, target=target, backend=backend, weight=weight)
        return await self.carry_out(request, change)

    async def apply(self, request: web.Request) -> web.Response:
        """Declare many services at once; with `prune`, remove all others of the store."""
        source, wanted = self.store_of(request).source, list[Service]()

        def read(members: Json) -> object:
            refuse_unknown_members(members, APPLY_MEMBERS, (*CHANGE_FLAGS, *CHANGE_PARAMETERS))
            if members.get("apiVersion", API_VERSION) != API_VERSION:
                raise RefusedError("malformed", f"apiVersion must be {API_VERSION}")
            wanted.extend(operations.parse_services(members.get("services"), source=source))
            return members.get("prune", False)

        async with contextlib.AsyncExitStack() as work:
            if is_large(request):
                # Whoever sends slowly keeps nobody from computing.
                await work.enter_async_context(self._arriving)
                raw = await read_large(request)
                await work.enter_async_context(self._large)
                work.enter_context(gc_paused())
            else:
                raw = await read_raw(request, SMALL_BODY_BYTES)
            try:
                prune = await parse_body(read, raw)
                del raw
                if not isinstance(prune, bool):
                    raise RefusedError("malformed", "prune must be true or false")
                change = partial(operations.apply, wanted=wanted, prune=prune)
                return await self.carry_out(request, change, len(wanted), work=work)
            finally:
                # As one, many services would be freed in one go, and no collection must walk them before.
                async for _ in in_slices(range(0, len(wanted), FREED_AT_ONCE)):
                    del wanted[-FREED_AT_ONCE:]
                if is_large(request):
                    await asyncio.to_thread(return_freed_memory)

    async def carry_out(
        self,
        request: web.Request,
        change: Change,
        size: int = 1,
        reason: str = "",
        work: contextlib.AsyncExitStack | None = None,
    ) -> web.Response:
        """Decide on a change, save it, wait until the kernel has it, and answer. Between decision and write,
        `write_lock` keeps the file store unchanged; etcd rejects the write if its content has changed.

        `size`: number of services that the change names. `reason`: the history has it. `work`: what a large
        change holds until it is saved; None: the turn of a small one is taken.
        """
        context, store = self._context, self.store_of(request)
        confirm = confirm_seconds_of(request)
        if confirm is not None and not isinstance(store, HostStore):
            raise no_confirmation_error()
        note = ChangeNote(str(self._permission.peer(request.transport)), reason, confirm)
        await context.refresh_address_policy()
        dry_run = flag_of(request, "dry_run")
        asked = ChangeRequest(change, store.source, self._policy(request), size, dry_run)
        turn = self._turns[store.source] if work is None else contextlib.nullcontext()
        if dry_run:
            async with turn:
                store.check(outcome := await self._decide(asked))
            return await self._outcome(outcome, store.location, "dry run: nothing was changed")
        if work is not None:  # it takes long, and others may change the store meanwhile
            await store.prepare(await self._decide(asked))
        async with turn, store.write_lock:
            store.check(outcome := await self._decide(asked))
            if outcome.changed:
                store.require_confirmed()
                context.reconciler.causes.note(outcome.results, self._cause(request))
            saved = await store.save(outcome, note)
            waits = context.store.confirmation_view() if confirm is not None and outcome.changed else None
        if work is not None:
            await work.aclose()
        if outcome.changed:
            self._log_stored(outcome, store, request)
        applied, message = False, saved.error
        if not message:
            applied, message = await context.wait_applied(outcome.results, outcome.changed, saved.units)
        return await self._outcome(outcome, saved.location, message, waits, applied=applied)

    async def _decide(self, asked: ChangeRequest) -> Outcome:
        return await decide(asked, self._context.services_snapshot, self._context.check_problems)

    async def _outcome(
        self, outcome: Outcome, stored: str, message: str, waits: Json | None = None, *, applied: bool = False
    ) -> web.Response:
        members: Json = {
            "changed": outcome.changed,
            "applied": applied,
            "message": message,
            "stored": stored,
            "warnings": await self._warnings(outcome),
            **({"confirmation": waits} if waits else {}),
        }
        return body_response(await list_body("results", outcome.results.items(), result_view, members))

    def _policy(self, request: web.Request) -> AddressPolicy:
        """The claims that services may make. Raises RefusedError."""
        policy = self._context.address_policy()
        if session := session_of(request):
            policy = replace(policy, host=policy.host.with_session_protected(*session))
        return policy

    async def _warnings(self, outcome: Outcome) -> Sequence[str]:
        """The warnings about services that a change names and does not remove."""
        named = [outcome.stored[name] for name in outcome.results if name in outcome.stored]
        return await asyncio.to_thread(self._context.warnings_of, named)

    def store_of(self, request: web.Request) -> Store:
        """The store that a request is for. Raises RefusedError."""
        context = self._context
        wanted = request.query.get("store", context.default_store)
        if wanted not in STORES:
            raise RefusedError("malformed", f"store={wanted}", "", f"store is {' or '.join(STORES)}")
        if wanted == "file":
            return HostStore(context.store)
        if context.fleet is None:
            raise no_etcd_error()
        return FleetStore(context.fleet.store)

    def _cause(self, request: web.Request) -> str:
        return f"user {self._permission.peer(request.transport)}"

    def _log_stored(self, outcome: Outcome, store: Store, request: web.Request) -> None:
        names = tuple(name for name, action in outcome.results.items() if action != "unchanged")
        cause = self._cause(request)
        extra = fields(Event.CHANGE_STORED, service=names[:NAMES_LOGGED], unit=store.source, cause=cause)
        log.info("%s by %s", _actions_text(outcome), self._permission.peer(request.transport), extra=extra)


def _ordered(services: Mapping[str, Service]) -> list[Service]:
    return [services[name] for name in sorted(services)]


def results_view(actions: Mapping[str, str]) -> list[Json]:
    """The action for each service, such as `unchanged`."""
    return [result_view(item) for item in actions.items()]


def result_view(item: tuple[str, str]) -> Json:
    """The action for one service."""
    return {"name": item[0], "action": item[1]}


def _actions_text(outcome: Outcome) -> str:
    parts = [f"{name} {action}" for name, action in outcome.results.items() if action != "unchanged"]
    more = len(parts) - NAMES_LOGGED
    return ", ".join(parts[:NAMES_LOGGED]) + (f" and {more} more" if more > 0 else "")
