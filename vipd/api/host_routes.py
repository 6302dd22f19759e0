"""The API's requests about maintenance of this host, and about what it announces beyond itself."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from vipd.api.messages import body_route, flag_of, json_response, route
from vipd.api.peers import Permission
from vipd.control.announcements import AnnouncedKey, why_unready
from vipd.control.announcer import Announcer
from vipd.control.override_requests import parse_maintenance
from vipd.control.reconciler import Reconciler
from vipd.dataplane.conntrack.live import forwarded_flows
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.declaration import operations
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import RefusedError
from vipd.host.systemd.fields import Event, fields
from vipd.model.forwarding import Forwarding
from vipd.model.service import Frontend
from vipd.observe.announcement_views import announcements_view, maintenance_view
from vipd.sources.overrides import OverrideStore

log = logging.getLogger(__name__)

MAX_NAMED = 20
"""Addresses that a warning names."""


@dataclass(frozen=True, slots=True)
class HostRoutes:
    """Answers `/v1/maintenance` and `/v1/announcements`."""

    reconciler: Reconciler
    store: OverrideStore
    announcer: Announcer
    permission: Permission

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        path = "/v1/maintenance"
        return [
            route("GET", "/v1/announcements", self.announcements),
            route("GET", "/v1/services/{target}/ready", self.ready),
            route("GET", path, self.show, flags=("flows",)),
            body_route("POST", path, self.begin, ("reason", "for"), flags=("dry_run",)),
            route("DELETE", path, self.end, flags=("dry_run",)),
        ]

    async def announcements(self, _: web.Request) -> web.Response:
        """Every address that a service announces, and whether this host does."""
        faults: Mapping[str, str] = {by.value: why for by, why in self.announcer.faults.items()}
        lans = self.announcer.lans
        return json_response(announcements_view(self.announcer.state, self.store.maintenance, faults, lans))

    async def ready(self, request: web.Request) -> web.Response:
        """Whether this host can serve a service, or one frontend of it, to clients elsewhere."""
        target, progress = request.match_info["target"], self.reconciler.progress
        service = operations.find(self.reconciler.services, target)
        forwardings = self.reconciler.forwardings.get(service.name, ())
        why = progress.quarantined.get(service.name, "")
        if progress.is_pending(service.name, {f.key.family for f in forwardings}):
            why = progress.fault or "its rules are not in the kernel yet"
        why = why or why_unready(_named(target, forwardings) or forwardings, self.store.maintenance)
        return json_response({"service": service.name, "ready": not why, "why": why})

    async def show(self, request: web.Request) -> web.Response:
        """The maintenance, and with `flows=1` the number of flows that this host forwards."""
        view: Json = {"maintenance": maintenance_view(self.store.maintenance)}
        if flag_of(request, "flows"):
            view["flows"] = await self._flows()
        return json_response(view)

    async def begin(self, request: web.Request, body: Json) -> web.Response:
        """Begin maintenance, or change it: it is stored, then nothing is announced, then answered."""
        peer = self.permission.peer(request.transport)
        wanted = parse_maintenance(body, str(peer), self.reconciler.clock())
        before = self.store.maintenance
        here = [key for key, found in self.announcer.state.addresses.items() if found.announced]
        changed = before is None or (before.reason, before.until) != (wanted.reason, wanted.until)
        applied, message = False, "dry run: nothing was changed"
        if not flag_of(request, "dry_run"):
            if changed:
                await self.store.set_maintenance(wanted)
                extra = fields(Event.MAINTENANCE_BEGUN, cause=f"user {peer}", reason=str(wanted))
                log.info("this host is %s, by %s", wanted, peer, extra=extra)
            applied, message = await self._announce()
        found = wanted if changed else before
        warnings = await self._last_host_warnings(here)  # asks etcd: after what must not wait for it
        return json_response(self._answer(changed, applied, message, maintenance_view(found), warnings))

    async def end(self, request: web.Request) -> web.Response:
        """End maintenance; `was` tells what it was."""
        peer, before = self.permission.peer(request.transport), self.store.maintenance
        applied, message = False, "dry run: nothing was changed"
        if not flag_of(request, "dry_run"):
            if before is not None:
                await self.store.set_maintenance(None)
                extra = fields(Event.MAINTENANCE_ENDED, cause=f"user {peer}", reason=f"was {before}")
                log.info("the maintenance of this host is over, by %s", peer, extra=extra)
            applied, message = await self._announce()
        now = maintenance_view(self.store.maintenance)
        answer = self._answer(before is not None, applied, message, now, [])
        return json_response({**answer, "was": maintenance_view(before)})

    def _answer(
        self, changed: bool, applied: bool, message: str, maintenance: Json | None, warnings: list[str]
    ) -> Json:
        addresses = self.announcer.state.addresses.values()
        return {
            "changed": changed,
            "applied": applied,
            "message": message,
            "stopping": self.reconciler.progress.stopping,
            "maintenance": maintenance,
            "addresses": len(addresses),
            "announced": sum(found.announced for found in addresses),
            "warnings": warnings,
        }

    async def _announce(self) -> tuple[bool, str]:
        """Whether what is announced is as decided, and why not."""
        try:
            await self.announcer.update()
        except OSError as error:
            return False, str(error.strerror or error)
        return True, ""

    async def _last_host_warnings(self, here: Collection[AnnouncedKey]) -> list[str]:
        """A warning if no other host of the fleet announces what this one withdraws, or is about to."""
        alone = await self.announcer.announced_nowhere_else(here)
        if not alone:
            return []
        named = ", ".join(alone[:MAX_NAMED]) + (" and others" if len(alone) > MAX_NAMED else "")
        return [f"no other host announces {named}: clients elsewhere reach it nowhere then"]

    async def _flows(self) -> int:
        reconciler = self.reconciler
        if reconciler.progress.stopping or not reconciler.progress.written:
            raise RefusedError(
                "busy", "vipd is stopping" if reconciler.progress.stopping else "vipd is starting"
            )
        forwardings = [f for found in reconciler.forwardings.values() for f in found]
        try:
            return await forwarded_flows(forwardings, reconciler.host_addresses)
        except ConntrackError as error:
            raise RefusedError("internal", error.what, error.why, error.hint) from None


def _named(target: str, forwardings: Sequence[Forwarding]) -> list[Forwarding]:
    """Those that have a frontend of this name, such as `192.0.2.10:53/udp`, or this address; none if it names
    a service."""
    return [f for f in forwardings if target in _frontends(f)]


def _frontends(forwarding: Forwarding) -> set[str]:
    """Its frontends, those of TCP also without the protocol."""
    external = (each.address for each in forwarding.external_addresses)
    found = {
        str(Frontend(address, forwarding.port, forwarding.key.protocol))
        for address in (*forwarding.addresses, *external)
    }
    addresses = {*forwarding.addresses, *(each.address for each in forwarding.external_addresses)}
    return found | {each.removesuffix("/tcp") for each in found} | addresses
