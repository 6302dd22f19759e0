"""The API's requests about the history of a store: to read it, go back, and confirm a change."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

from aiohttp import web

from vipd.api.context import ApiContext
from vipd.api.messages import (
    confirm_seconds_of,
    encoded_json_response,
    flag_of,
    json_response,
    route,
)
from vipd.api.peers import Permission
from vipd.api.service_routes import ServiceRoutes, change_route, results_view
from vipd.api.stores import HostStore, no_confirmation_error
from vipd.declaration import operations
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import Moment, Outcome, RefusedError, spec_of
from vipd.host.systemd.fields import Event, fields
from vipd.model.formatting import time_text
from vipd.model.service import Service
from vipd.sources.history import ChangeNote, Entry, History
from vipd.sources.store import STORE_UNIT, StoreSource

log = logging.getLogger(__name__)

_MAX_DIGITS = 15


class HistoryRoutes:
    """Handles requests to `/v1/history`, `/v1/rollback` and `/v1/confirm`."""

    def __init__(self, context: ApiContext, permission: Permission, services: ServiceRoutes) -> None:
        self._context, self._permission, self._services = context, permission, services

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        return [
            route("GET", "/v1/history", self.history, parameters=("store",)),
            route("GET", "/v1/history/{revision}", self.entry, parameters=("store",)),
            change_route("POST", "/v1/rollback", self.rollback, "revision"),
            route("POST", "/v1/confirm", self.confirm, parameters=("store",)),
        ]

    async def history(self, request: web.Request) -> web.Response:
        """Show the changes, the newest first."""
        store = self._services.store_of(request)
        history = await store.history()
        waits = store.store.confirmation_view() if isinstance(store, HostStore) else None
        entries = [_entry_view(entry) for entry in reversed(history.entries)]
        about: Json = {"oldest": history.oldest, "stored": history.location}
        return json_response({"entries": entries, "confirmation": waits, **about})

    async def entry(self, request: web.Request) -> web.Response:
        """Show one change, with each service before and after it."""
        store, word = self._services.store_of(request), request.match_info["revision"]
        number = int(word) if word.isascii() and word.isdecimal() and len(word) <= _MAX_DIGITS else 0
        entry = next((each for each in (await store.history()).entries if each.revision == number), None)
        if entry is None:
            raise RefusedError("not-found", f"no change {word[:40]!a}", "", "vipctl history lists them")
        changes = await store.changes_in(entry)
        return await asyncio.to_thread(_detailed_response, entry, changes)

    async def confirm(self, request: web.Request) -> web.Response:
        """The change that waits for it stays."""
        if not isinstance(self._services.store_of(request), HostStore):
            raise no_confirmation_error()
        store = self._context.store
        async with store.change_lock:
            left = store.seconds_to_confirm()
            if not left:
                raise _nothing_to_confirm(store.history.entries, late=left is not None)
            entry = await asyncio.shield(asyncio.to_thread(store.confirm))
            store.confirmation_changed.set()
        peer, reason = self._permission.peer(request.transport), f"revision {entry.revision}"
        extra = fields(
            Event.CHANGE_CONFIRMED, service=entry.names, unit=STORE_UNIT, cause=f"user {peer}", reason=reason
        )
        log.info("%s is confirmed by %s: %s", reason, peer, entry.summary(), extra=extra)
        return json_response({"changed": True, "applied": True, "message": "", "entry": _entry_view(entry)})

    async def rollback(self, request: web.Request, body: Json) -> web.Response:
        """Make the store hold the services that it held at a revision."""
        store = self._services.store_of(request)
        history = await store.history()
        revision = _wanted_revision(history, body.get("revision"))
        if isinstance(store, HostStore) and not flag_of(request, "dry_run"):
            async with store.store.change_lock:
                waits = store.store.history.confirmation
                if waits and revision == waits.revision - 1:
                    return await self._take_back(request, store.store)
        services_since = await store.services_since(revision)

        def restore(now: Moment) -> Outcome:
            found = services_since()
            wanted = [service for service in found.values() if service is not None]
            unwanted = [name for name, service in found.items() if service is None]
            return operations.apply(now, wanted, False, unwanted)

        later = (entry for entry in history.entries if entry.revision > revision)
        size = sum(sum(entry.actions.values()) for entry in later) if history.bounded else len(store.services)
        return await self._services.carry_out(request, restore, size, f"rollback to {revision}")

    async def _take_back(self, request: web.Request, store: StoreSource) -> web.Response:
        """Take the unconfirmed change back, as if its time were over: nothing refuses that. Raises StoreError
        if the disk does not have it yet; the kernel gets it all the same."""
        if confirm_seconds_of(request) is not None:
            why = "what was in force before needs no confirmation"
            raise RefusedError("invalid", "the last change is not confirmed yet", why, "leave confirm out")
        context, peer = self._context, self._permission.peer(request.transport)
        note, cause = ChangeNote(str(peer), "before it was confirmed"), f"user {peer}"
        results = await asyncio.shield(asyncio.to_thread(store.take_back, note, cause))
        context.reconciler.causes.note(results, cause)
        context.reconciler.request_sync()
        store.confirmation_changed.set()
        await asyncio.shield(asyncio.to_thread(store.save_taken_back))
        applied, message = await context.wait_applied(results, True, (STORE_UNIT,))
        return json_response(
            {
                "changed": True,
                "applied": applied,
                "message": message,
                "stored": store.location,
                "results": results_view(results),
                "warnings": [],
            }
        )


def _wanted_revision(history: History, revision: object) -> int:
    """The revision to go back to: the one before the newest if none is named. Raises RefusedError."""
    if history.fault:
        raise RefusedError("internal", "there is no history", history.fault)
    if not history.entries:
        raise RefusedError("not-found", "the history is empty", "", "it begins with the next change")
    if revision is None:
        return history.newest - 1
    if isinstance(revision, bool) or not isinstance(revision, int):
        raise RefusedError("malformed", "revision must be a whole number")
    if revision < 0 or (history.bounded and not history.oldest <= revision <= history.newest):
        why = f"the history reaches from {history.oldest} to {history.newest}"
        raise RefusedError("not-found", f"no revision {revision}", why, "vipctl history lists them")
    joined = next((e.revision for e in history.entries if e.revision >= revision), revision)
    if history.bounded and revision not in (history.oldest, joined):
        why = f"it has become one with revision {joined}"
        raise RefusedError("not-found", f"no revision {revision}", why, "vipctl history lists them")
    return revision


def _nothing_to_confirm(entries: Sequence[Entry], late: bool) -> RefusedError:
    newest = entries[-1] if entries else None
    why = ""
    if late:
        why = "the time to confirm is over: the last change is being taken back"
    elif newest and newest.takes_back:
        why = f"revision {newest.revision} {newest.reason}, at {time_text(newest.at)}"
    return RefusedError(
        "conflict", "no change waits for a confirmation", why, "vipctl history shows the changes"
    )


def _entry_view(entry: Entry) -> Json:
    return {
        "revision": entry.revision,
        "at": time_text(entry.at),
        "by": entry.by,
        "reason": entry.reason,
        "actions": dict(entry.actions),
        "services": [{"name": name, "action": action} for name, action in entry.named],
    }


def _detailed_response(
    entry: Entry, changes: Sequence[tuple[str, Service | None, Service | None]]
) -> web.Response:
    """The answer about one entry. It is encoded in parts, so that other threads have their turn."""
    head = json.dumps({**_entry_view(entry), "services": []})
    services = []
    for name, before, after in changes:
        action = "created" if before is None else "removed" if after is None else "changed"
        specs = {"before": _spec(before), "after": _spec(after)}
        services.append(json.dumps({"name": name, "action": action, **specs}))
    return encoded_json_response(f'"entry": {head[:-2]}{", ".join(services)}]}}'.encode())


def _spec(service: Service | None) -> Json | None:
    return None if service is None else spec_of(service)
