"""The API's requests about the fleet that this host is one of, and about what sources no longer have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from vipd.api.messages import flag_of, json_response, route
from vipd.api.peers import Permission
from vipd.api.stores import no_etcd_error
from vipd.host.systemd.fields import Event, fields
from vipd.sources.base import Source

if TYPE_CHECKING:
    from vipd.control.fleet_member import FleetMember

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetRoutes:
    """Answers `/v1/fleet` and `/v1/accept-removal`."""

    fleet: FleetMember | None
    sources: Sequence[Source]
    permission: Permission
    wait_applied: Callable[[Collection[str], bool], Awaitable[tuple[bool, str]]]
    """As `ApiContext.wait_applied`."""

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        return [
            route("GET", "/v1/fleet", self.hosts),
            route("POST", "/v1/accept-removal", self.accept_removal, flags=("dry_run",)),
        ]

    async def hosts(self, _: web.Request) -> web.Response:
        """Every host with a current report."""
        fleet = self._fleet()
        hosts = await fleet.hosts()
        return json_response({"hosts": hosts, "newest": fleet.source.keys.last_change})

    async def accept_removal(self, request: web.Request) -> web.Response:
        """Remove held services that are gone from etcd or from files."""
        held: dict[str, list[str]] = {"etcd": [], "file": []}
        for source in self.sources:
            for owner in source.held():
                kind, _, name = owner.partition(":")
                held[kind].append(name)
        number = sum(map(len, held.values()))
        applied, message = False, "dry run: nothing was changed"
        if not flag_of(request, "dry_run"):
            if number:
                await self._let_go()
                peer = self.permission.peer(request.transport)
                units = ",".join(kind for kind, names in held.items() if names)
                extra = fields(Event.CHANGE_STORED, unit=units, cause=f"user {peer}")
                log.warning("%d held removals accepted by %s", number, peer, extra=extra)
            applied, message = await self.wait_applied((), True)
        answer = {"changed": bool(number), "applied": applied, "message": message}
        return json_response({**answer, "keys": sorted(held["etcd"]), "files": sorted(held["file"])})

    async def _let_go(self) -> None:
        for source in self.sources:
            if source.writes:
                await asyncio.to_thread(source.accept_removal)
            else:
                source.accept_removal()

    def _fleet(self) -> FleetMember:
        if self.fleet is None:
            raise no_etcd_error()
        return self.fleet
