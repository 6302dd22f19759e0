"""The API's request to change the dataplane while vipd runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from vipd.api.messages import body_route, json_response
from vipd.api.peers import Permission
from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import DATAPLANES, Dataplane
from vipd.dataplane.switching import SwitchableDataplane
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import RefusedError
from vipd.host.settings.settings import balances_of
from vipd.host.systemd.fields import Event, fields
from vipd.observe.flow_stats.collector import FlowStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataplaneRoutes:
    """Answers `POST /v1/dataplane`."""

    reconciler: Reconciler
    dataplane: Dataplane
    save_choice: Callable[[str], None]
    permission: Permission
    flow_stats: FlowStats | None = None

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        return [body_route("POST", "/v1/dataplane", self.change, ("name",))]

    async def change(self, request: web.Request, body: Json) -> web.Response:
        """Switch to another dataplane, and store the choice; `settings`: the one of the settings."""
        name = body.get("name")
        if not isinstance(self.dataplane, SwitchableDataplane):
            raise RefusedError("invalid", "this daemon has one dataplane only")
        dataplane, wanted = self.dataplane, next((known for known in DATAPLANES if known == name), None)
        if wanted is None:
            raise RefusedError(
                "invalid", f"there is no dataplane {name!r}", "", f"one of {', '.join(DATAPLANES)}"
            )
        able = balances_of(wanted)
        for service in self.reconciler.services.values():
            if service.balance not in able:
                what = f"the {wanted} dataplane cannot do balance: {service.balance}"
                raise RefusedError("conflict", what, f"service {service.name} needs it")
        before = dataplane.name

        async def count() -> None:
            if self.flow_stats:
                await self.flow_stats.collector.collect_now()

        changed = await self.reconciler.exclusive(lambda: dataplane.switch(wanted, count))
        self.save_choice(wanted)
        if changed:
            peer = self.permission.peer(request.transport)
            extra = fields(Event.DATAPLANE_CHANGED, cause=f"user {peer}", reason=f"{before} to {wanted}")
            log.info("dataplane changed from %s to %s by %s", before, wanted, peer, extra=extra)
        return json_response({"changed": changed, "before": before, "dataplane": wanted})
