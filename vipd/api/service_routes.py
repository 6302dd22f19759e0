"""API routes that list, show, export, declare, change and remove services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from aiohttp import web

from vipd.api.context import ApiContext
from vipd.api.messages import (
    API_VERSION,
    BodyHandler,
    body_route,
    chunked_json_response,
    confirm_seconds_of,
    flag_of,
    json_response,
    route,
    session_of,
)
from vipd.api.override_routes import OverrideRoutes
from vipd.api.peers import Permission
from vipd.api.request_bodies import MAX_BODY_BYTES, BodyReader, refuse_unknown_members
from vipd.api.service_changes import Change, ChangeRequest, decide
from vipd.api.stores import STORES, FleetStore, HostStore, Store, no_confirmation_error, no_etcd_error
from vipd.declaration import operations
from vipd.declaration.bounded_json import Json
from vipd.declaration.listed_backends import as_declared
from vipd.declaration.operations import Outcome, RefusedError
from vipd.host.systemd.fields import Event, fields
from vipd.model.service import Service
from vipd.observe.views import service_view
from vipd.sources.history import ChangeNote

log = logging.getLogger(__name__)

NAMES_LOGGED = 100
"""Maximum number of services that the log entry of one change names."""

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

    def __init__(self, context: ApiContext, permission: Permission, overrides: OverrideRoutes) -> None:
        self._context, self._permission, self._overrides = context, permission, overrides
        self._bodies = BodyReader()

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
        reconciler, dataplane = self._context.reconciler, self._context.dataplane
        ordered, announced = dict(sorted(reconciler.services.items())), self._context.announced()
        held = self._context.held()

        def view(service: Service) -> Json:
            here, why = announced.get(service.name, ()), held.get(service.origin.owner, "")
            return service_view(service, reconciler, dataplane, here, why)

        return await chunked_json_response("services", ordered, view)

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
        ordered = dict(sorted(self._context.reconciler.services.items()))
        return await chunked_json_response("services", ordered, lambda s: operations.spec_of(as_declared(s)))

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
        source = self.store_of(request).source

        def read(members: Json, services: Iterator[object] | None) -> tuple[list[Service], object]:
            refuse_unknown_members(members, APPLY_MEMBERS, (*CHANGE_FLAGS, *CHANGE_PARAMETERS))
            if members.get("apiVersion", API_VERSION) != API_VERSION:
                raise RefusedError("malformed", f"apiVersion must be {API_VERSION}")
            given = members.get("services") if services is None else services
            return operations.parse_services(given, source=source), members.get("prune", False)

        wanted, prune = await self._bodies.read(request, MAX_BODY_BYTES, read)
        if not isinstance(prune, bool):
            raise RefusedError("malformed", "prune must be true or false")
        change = partial(operations.apply, wanted=wanted, prune=prune)
        return await self.carry_out(request, change, len(wanted))

    async def carry_out(
        self, request: web.Request, change: Change, size: int = 1, reason: str = ""
    ) -> web.Response:
        """Decide on a change, save it, wait until the kernel has it, and answer. Between decision and write,
        `write_lock` keeps the file store unchanged; etcd rejects the write if its content has changed.

        `size`: number of services that the change names. `reason`: the history has it.
        """
        context, store = self._context, self.store_of(request)
        confirm = confirm_seconds_of(request)
        if confirm is not None and not isinstance(store, HostStore):
            raise no_confirmation_error()
        note = ChangeNote(str(self._permission.peer(request.transport)), reason, confirm)
        await context.refresh_address_policy()
        dry_run = flag_of(request, "dry_run")
        policy = context.address_policy()
        if session := session_of(request):
            policy = replace(policy, host=policy.host.with_session_protected(*session))
        applied, message, place = False, "dry run: nothing was changed", store.location
        waits: Json | bool | None = None
        async with contextlib.nullcontext() if dry_run else store.write_lock:
            asked = ChangeRequest(change, store.source, policy, size)
            outcome = await decide(asked, context.services_snapshot, context.check_problems)
            store.check(outcome)
            if not dry_run:
                if outcome.changed:
                    store.require_confirmed()
                    context.reconciler.causes.note(outcome.results, self._cause(request))
                saved = await store.save(outcome, note)
                waits = confirm is not None and outcome.changed and context.store.confirmation_view()
        if not dry_run:
            if outcome.changed:
                self._log_stored(outcome, store, request)
            place, message = saved.location, saved.error
            if not message:
                applied, message = await context.wait_applied(outcome.results, outcome.changed, saved.units)
        return json_response(
            {
                "changed": outcome.changed,
                "applied": applied,
                "message": message,
                "stored": place,
                "results": results_view(outcome.results),
                "warnings": await self._warnings(outcome),
                **({"confirmation": waits} if waits else {}),
            }
        )

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


def results_view(actions: Mapping[str, str]) -> list[Json]:
    """The action for each service, such as `unchanged`."""
    return [{"name": name, "action": action} for name, action in actions.items()]


def _actions_text(outcome: Outcome) -> str:
    parts = [f"{name} {action}" for name, action in outcome.results.items() if action != "unchanged"]
    more = len(parts) - NAMES_LOGGED
    return ", ".join(parts[:NAMES_LOGGED]) + (f" and {more} more" if more > 0 else "")
