"""The API's requests about operators' orders, and about the flows that a backend still has."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from aiohttp import web

from vipd.api.messages import Json, answer, body_of, flag_of
from vipd.api.peers import Peer, Permission
from vipd.dataplane.conntrack.live import live_flows
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.model import Backend, Service
from vipd.operations import RefusedError
from vipd.orders import Ordered, order, subject_of
from vipd.overrides import Override, Subject, describe, to_json
from vipd.reconciler import Reconciler
from vipd.sources.override_store import OverrideStore
from vipd.systemd.fields import Event, fields

log = logging.getLogger(__name__)

NAMES_LOGGED = 100
"""An event about more services names no more of them."""

Settle = Callable[[Collection[str]], Awaitable[tuple[bool, str]]]
"""Waits until the kernel has what changed of these services; whether it has, and else why not."""


@dataclass(frozen=True, slots=True)
class OverrideRoutes:
    """Answers `/v1/overrides` and `/v1/flows`."""

    reconciler: Reconciler
    store: OverrideStore
    permission: Permission
    settle: Settle

    def routes(self) -> list[web.RouteDef]:
        """For the application."""
        return [
            web.get("/v1/overrides", self.listed),
            web.post("/v1/overrides", self.ordered),
            web.delete("/v1/overrides", self.taken_back),
            web.get("/v1/flows", self.flows),
        ]

    async def listed(self, _: web.Request) -> web.Response:
        """Every order in force."""
        return answer({"overrides": [to_json(o) for o in self.store.overrides.values()]})

    async def ordered(self, request: web.Request) -> web.Response:
        """An order: stored, in the kernel, answered."""
        return answer(await self._order(request, await body_of(request)))

    async def order_weight(
        self, request: web.Request, service: str, backend: str, weight: object
    ) -> web.Response:
        """A weight for a backend that another owner declares, answered as a change of its service."""
        told = await self._order(request, {"service": service, "backend": backend, "weight": weight})
        action = "changed" if told["changed"] else "unchanged"
        told |= {"results": [{"name": service, "action": action}], "stored": self.store.location}
        return answer(told)

    async def _order(self, request: web.Request, wanted: Json) -> Json:
        peer = self.permission.peer(request.transport)
        found = order(
            self.reconciler.services, self.store.overrides, wanted, str(peer), self.reconciler.clock()
        )
        known = self.store.overrides.get(found.override.subject)
        changed = known is None or not _same(known, found.override)
        applied, message = False, "dry run: nothing was changed"
        if not flag_of(request, "dry_run"):
            if changed:
                self.store.put(found.override)
                _tell_given(found, peer)
            applied, message = await self.settle(_names(found.backends))
        return {
            "changed": changed,
            "applied": applied,
            "message": message,
            "override": to_json(found.override),
            "backends": _listed(found.backends),
        }

    async def taken_back(self, request: web.Request) -> web.Response:
        """Orders about a backend, an address, or (`all`) about anything are taken back."""
        body, known = await body_of(request), self.store.overrides
        subjects, backends = self._meant(body, known)
        gone = [subject for subject in subjects if subject in known]
        applied, message = False, "dry run: nothing was changed"
        if not flag_of(request, "dry_run"):
            if gone:
                self.store.take_back(*gone)
                peer = self.permission.peer(request.transport)
                _tell_taken_back([known[subject] for subject in gone], backends, peer)
            applied, message = await self.settle(_names(backends))
        return answer(
            {
                "changed": bool(gone),
                "applied": applied,
                "message": message,
                "overrides": [to_json(known[subject]) for subject in gone],
                "backends": _listed(backends),
            }
        )

    async def flows(self, request: web.Request) -> web.Response:
        """How many flows one backend, or one address in every service, still has."""
        _, backends = subject_of(self.reconciler.services, dict(request.query))
        forwardings = [f for name in _names(backends) for f in self.reconciler.forwardings.get(name, ())]
        addresses = {backend.address for _, backend in backends}
        ports = {backend.port for _, backend in backends}
        reached = {
            (e.address, e.port)
            for f in forwardings
            for e in (*f.reachable(), *f.resting, *f.down)
            if e.address in addresses and (None in ports or e.port in ports)
        }
        try:
            count = await live_flows(forwardings, reached, self.reconciler.host_addresses)
        except ConntrackError as error:
            raise RefusedError("internal", error.what, error.why, error.hint) from None
        return answer({"flows": count})

    def _meant(
        self, body: Json, known: Collection[Subject]
    ) -> tuple[Collection[Subject], tuple[tuple[Service, Backend], ...]]:
        services = self.reconciler.services
        if body.get("all") is True:
            about = [
                (service, backend)
                for service in services.values()
                for backend in service.backends
                if any(override.about(service.name, backend) for override in self.store.overrides.values())
            ]
            return list(known), tuple(about)
        subject, backends = subject_of(services, body, known)
        return [subject], backends


def _tell_given(found: Ordered, peer: Peer) -> None:
    subject, what = found.override.subject, describe(found.override)
    extra = fields(
        Event.OVERRIDE_GIVEN,
        service=_names(found.backends)[:NAMES_LOGGED],
        backend=subject.backend,
        cause=f"user {peer}",
        reason=what,
    )
    log.info("%s: %s by %s", subject, what, peer, extra=extra)


def _tell_taken_back(gone: Sequence[Override], about: Iterable[tuple[Service, Backend]], peer: Peer) -> None:
    named, more = gone[:NAMES_LOGGED], len(gone) - NAMES_LOGGED
    what = f"was {describe(gone[0])}" if len(gone) == 1 else f"{len(gone)} orders"
    extra = fields(
        Event.OVERRIDE_TAKEN_BACK,
        service=_names(about)[:NAMES_LOGGED],
        backend=tuple(dict.fromkeys(override.subject.backend for override in named)),
        cause=f"user {peer}",
        reason=what,
    )
    told = ", ".join(str(override.subject) for override in named) + (f" and {more} more" if more > 0 else "")
    log.info("%s: taken back by %s", told, peer, extra=extra)


def _same(one: Override, other: Override) -> bool:
    return to_json(one) | {"at": ""} == to_json(other) | {"at": ""}


def _names(backends: Iterable[tuple[Service, Backend]]) -> list[str]:
    return list(dict.fromkeys(service.name for service, _ in backends))


def _listed(backends: Iterable[tuple[Service, Backend]]) -> list[Json]:
    return [{"service": service.name, "backend": str(backend)} for service, backend in backends]
