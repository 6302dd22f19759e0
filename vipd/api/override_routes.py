"""The API's requests about overrides of operators, and about the flows that a backend still has."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aiohttp import web

from vipd.api.messages import body_route, flag_of, json_response, route
from vipd.api.override_scopes import FleetScope, HostScope, OverrideScope
from vipd.api.peers import Peer, Permission
from vipd.api.stores import no_etcd_error
from vipd.control.override_requests import (
    OVERRIDE_MEMBERS,
    TARGET_MEMBERS,
    OverrideRequest,
    overrides_to_clear,
    parse_override,
    target_of,
)
from vipd.control.reconciler import Reconciler
from vipd.dataplane.conntrack.live import live_flows
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import RefusedError
from vipd.host.systemd.fields import Event, fields
from vipd.model.override import Override, Overrides, OverrideTarget, describe, merge_parts, to_json
from vipd.model.service import Backend, Service
from vipd.sources.overrides import OverrideStore

if TYPE_CHECKING:
    from vipd.control.fleet_member import FleetMember

log = logging.getLogger(__name__)

NAMES_LOGGED = 100
"""An event about more services names no more of them."""

WaitApplied = Callable[[Collection[str], bool], Awaitable[tuple[bool, str]]]
"""As `ApiContext.wait_applied`."""


@dataclass(frozen=True, slots=True)
class OverrideRoutes:
    """Answers `/v1/overrides` and `/v1/flows`."""

    reconciler: Reconciler
    store: OverrideStore
    permission: Permission
    wait_applied: WaitApplied
    fleet: FleetMember | None = None

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        path, flags = "/v1/overrides", ("dry_run", "fleet")
        return [
            route("GET", path, self.list_overrides),
            body_route("POST", path, self.create_override, OVERRIDE_MEMBERS, flags=flags),
            body_route("DELETE", path, self.clear_overrides, (*TARGET_MEMBERS, "all"), flags=flags),
            route("GET", "/v1/flows", self.flows, parameters=TARGET_MEMBERS),
        ]

    async def list_overrides(self, _: web.Request) -> web.Response:
        """Every active override, for this host and for the fleet."""
        found = [_override_view(o, scope) for scope in self._scopes() for o in _about(scope.overrides)]
        return json_response({"overrides": found})

    async def create_override(self, request: web.Request, body: Json) -> web.Response:
        """Set an override: it is stored, then in the kernel, then answered."""
        return json_response(await self._create(request, body, self._scope(request)))

    async def override_weight(
        self, request: web.Request, service: str, backend: str, weight: object
    ) -> web.Response:
        """A weight for a backend that another owner declares, answered as a change of its service."""
        wanted: Json = {"service": service, "backend": backend, "weight": weight}
        answer = await self._create(request, wanted, HostScope(self.store))
        action = "changed" if answer["changed"] else "unchanged"
        answer |= {"results": [{"name": service, "action": action}], "stored": self.store.location}
        return json_response(answer)

    async def _create(self, request: web.Request, wanted: Json, scope: OverrideScope) -> Json:
        peer = self.permission.peer(request.transport)
        by = str(peer) if scope.name == "host" else f"{peer} on {self._host()}"
        found = parse_override(self.reconciler.services, wanted, by, self.reconciler.clock())
        known = scope.overrides
        changed = any(
            key not in known or not _means_the_same(known[key], part)
            for key, part in found.override.parts().items()
        )
        applied, message = False, "dry run: nothing was changed"
        if not flag_of(request, "dry_run"):
            if changed:
                message = await scope.put(found.override)
                _report_given(found, peer)
            applied, message = await self._wait_for_kernel(changed and message, found.backends)
        return {
            "changed": changed,
            "applied": applied,
            "message": message,
            "stopping": self.reconciler.progress.stopping,
            "override": _override_view(found.override, scope),
            "backends": _backend_views(found.backends),
        }

    async def clear_overrides(self, request: web.Request, body: Json) -> web.Response:
        """Clear overrides of a backend, an address, or (`all`) all of them."""
        scope = self._scope(request)
        known, scopes = scope.overrides, self._scopes()
        # One override may be in either scope, so its names are looked up in both.
        everywhere = {key.target for each in scopes for key in each.overrides}
        meant, backends = overrides_to_clear(self.reconciler.services, body, everywhere)
        gone = _about(known, meant)
        applied, message = False, "dry run: nothing was changed"
        if not flag_of(request, "dry_run"):
            if gone:
                message = await scope.clear({override.target for override in gone})
                _log_cleared(gone, backends, self.permission.peer(request.transport))
            applied, message = await self._wait_for_kernel(gone and message, backends)
        others = [each for each in scopes if each.name != scope.name]
        return json_response(
            {
                "changed": bool(gone),
                "applied": applied,
                "message": message,
                "overrides": [_override_view(override, scope) for override in gone],
                "elsewhere": [
                    _override_view(o, other) for other in others for o in _about(other.overrides, meant)
                ],
                "backends": _backend_views(backends),
            }
        )

    async def _wait_for_kernel(
        self, fault: object, backends: Iterable[tuple[Service, Backend]]
    ) -> tuple[bool, str]:
        """Whether the kernel has it, and why not; `fault`: why this host has not received it."""
        names = _names(backends)
        return (False, str(fault)) if fault else await self.wait_applied(names, bool(names))

    def _scope(self, request: web.Request) -> OverrideScope:
        """The scope of a request's overrides. Raises RefusedError."""
        if not flag_of(request, "fleet"):
            return HostScope(self.store)
        if self.fleet is None:
            raise no_etcd_error()
        return FleetScope(self.fleet)

    def _scopes(self) -> list[OverrideScope]:
        """All scopes."""
        return [HostScope(self.store), *([FleetScope(self.fleet)] if self.fleet else [])]

    def _host(self) -> str:
        return self.fleet.name if self.fleet else ""

    async def flows(self, request: web.Request) -> web.Response:
        """Number of flows of one backend, or of one address in every service. Refused while the kernel may
        not match the overrides: at the start, and while vipd stops."""
        progress = self.reconciler.progress
        if progress.stopping or not progress.written:
            raise RefusedError("busy", "vipd is stopping" if progress.stopping else "vipd is starting")
        _, backends = target_of(self.reconciler.services, dict(request.query))
        forwardings = [f for name in _names(backends) for f in self.reconciler.forwardings.get(name, ())]
        addresses = {backend.address for _, backend in backends}
        ports = {backend.port for _, backend in backends}
        reached = {
            (e.address, e.port)
            for f in forwardings
            for e in (*f.reachable(), *f.without_new_flows, *f.unavailable)
            if e.address in addresses and (None in ports or e.port in ports)
        }
        try:
            count = await live_flows(forwardings, reached, self.reconciler.host_addresses)
        except ConntrackError as error:
            raise RefusedError("internal", error.what, error.why, error.hint) from None
        return json_response({"flows": count})


def _report_given(found: OverrideRequest, peer: Peer) -> None:
    subject, what = found.override.target, describe(found.override)
    extra = fields(
        Event.OVERRIDE_GIVEN,
        service=_names(found.backends)[:NAMES_LOGGED],
        backend=subject.backend,
        cause=f"user {peer}",
        reason=what,
    )
    log.info("%s: %s by %s", subject, what, peer, extra=extra)


def _log_cleared(gone: Sequence[Override], about: Iterable[tuple[Service, Backend]], peer: Peer) -> None:
    named, more = gone[:NAMES_LOGGED], len(gone) - NAMES_LOGGED
    what = f"was {describe(gone[0])}" if len(gone) == 1 else f"{len(gone)} orders"
    extra = fields(
        Event.OVERRIDE_TAKEN_BACK,
        service=_names(about)[:NAMES_LOGGED],
        backend=tuple(dict.fromkeys(override.target.backend for override in named)),
        cause=f"user {peer}",
        reason=what,
    )
    targets = ", ".join(str(override.target) for override in named) + (
        f" and {more} more" if more > 0 else ""
    )
    log.info("%s: taken back by %s", targets, peer, extra=extra)


def _about(known: Overrides, targets: Collection[OverrideTarget] | None = None) -> list[Override]:
    """The overrides, of these targets if they are given."""
    return merge_parts({key: o for key, o in known.items() if targets is None or key.target in targets})


def _override_view(override: Override, scope: OverrideScope) -> Json:
    return {**to_json(override), "scope": scope.name}


def _means_the_same(one: Override, other: Override) -> bool:
    """Whether only their authors and times differ: the first one stays then."""
    return replace(one, by=other.by, at=other.at) == other


def _names(backends: Iterable[tuple[Service, Backend]]) -> list[str]:
    return list(dict.fromkeys(service.name for service, _ in backends))


def _backend_views(backends: Iterable[tuple[Service, Backend]]) -> list[Json]:
    return [{"service": service.name, "backend": str(backend)} for service, backend in backends]
