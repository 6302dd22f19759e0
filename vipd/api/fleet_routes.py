"""The API's requests about the fleet that this host is one of."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from vipd.api.messages import flag_of, json_response, route
from vipd.api.peers import Permission
from vipd.api.stores import no_etcd_error
from vipd.host.systemd.fields import Event, fields

if TYPE_CHECKING:
    from vipd.control.fleet_member import FleetMember

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetRoutes:
    """Answers `/v1/fleet` and `/v1/accept-removal`."""

    fleet: FleetMember | None
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
        return json_response({"hosts": hosts, "newest": fleet.source.last_change})

    async def accept_removal(self, request: web.Request) -> web.Response:
        """Remove held services that are gone from etcd."""
        fleet = self._fleet()
        held = list(fleet.source.state().held)
        applied, message = False, "dry run: nothing was changed"
        if not flag_of(request, "dry_run"):
            if fleet.source.accept_removal():
                peer = self.permission.peer(request.transport)
                extra = fields(Event.CHANGE_STORED, unit="etcd", cause=f"user {peer}")
                log.warning("%d held removals accepted by %s", len(held), peer, extra=extra)
            applied, message = await self.wait_applied((), True)
        return json_response({"changed": bool(held), "applied": applied, "message": message, "keys": held})

    def _fleet(self) -> FleetMember:
        if self.fleet is None:
            raise no_etcd_error()
        return self.fleet
