"""The content of the status page, as JSON values. Pure but for reading the reconciler's state.

Never the settings or a full declaration: a check may contain a password.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vipd.control.progress import healthy
from vipd.control.reconciler import Reconciler
from vipd.control.service_status import TwofoldAddresses, ready_backends, service_status, unchecked_backends
from vipd.dataplane.base import Dataplane
from vipd.declaration.bounded_json import Json
from vipd.declaration.problems import problem_texts
from vipd.model.backend_status import DEFAULT_STATUS, AdminState, BackendStatus, BackendStatuses
from vipd.model.formatting import time_text
from vipd.model.forwarding import Forwarding
from vipd.model.service import Service
from vipd.observe.endpoint_views import (
    backend_status_by_address,
    forwarding_view,
    limits_by_address,
    waiting_by_address,
)
from vipd.observe.metrics.snapshot import ConnectedSource
from vipd.observe.views import serving_view
from vipd.sources.base import Source

MAX_PROBLEMS = 20
"""For each source; the rest is a number."""

_OF_ENDPOINT = ("endpoint", "weight", "share", "ready", "health", "reason", "max_connections")
_OF_FORWARDING = ("name", "protocol", "frontends", "external", "node_port")


def service_view(
    service: Service,
    forwardings: Sequence[Forwarding],
    backend_statuses: BackendStatuses,
    dataplane: Dataplane,
    quarantine: str | None,
    twofold: TwofoldAddresses = TwofoldAddresses(),  # noqa: B008 (a value)
) -> Json:
    """One service. `quarantine`: why the kernel rejects a part of it; None if it does not.

    `state` and `message` are those of `vipd.control.service_status`, but never pending: the daemon's state
    includes that.
    """
    state, message = service_status(service, forwardings, backend_statuses, quarantine, twofold=twofold)
    places = [_forwarding_view(service, f, backend_statuses, dataplane) for f in forwardings]
    return {
        "name": service.name,
        "owner": service.origin.owner,
        "state": state,
        "message": message,
        "ready": ready_backends(service, forwardings),
        "backends": len(service.backends),
        "unchecked": unchecked_backends(service, backend_statuses),
        "forwardings": places,
    }


def daemon_view(
    reconciler: Reconciler, sources: Sequence[Source], warnings: Sequence[str], about: Mapping[str, object]
) -> Json:
    """The daemon itself. `about`: constant values, such as its version."""
    progress = reconciler.progress
    return {
        **about,
        "state": progress.state,
        "healthy": healthy(progress, reconciler.clock())[0],
        "message": progress.fault,
        "serving": serving_view(reconciler),
        "last_apply": time_text(progress.last_apply),
        "last_apply_seconds": round(progress.last_seconds, 3),
        "applies": progress.applies,
        "apply_failures": progress.failures,
        "sources": [_source_view(source, reconciler) for source in sources],
        "warnings": [*progress.warnings, *warnings],
    }


def _forwarding_view(
    service: Service, forwarding: Forwarding, backend_statuses: BackendStatuses, dataplane: Dataplane
) -> Json:
    stood = backend_status_by_address(service, forwarding, backend_statuses)
    waiting, limits = waiting_by_address(service, forwarding), limits_by_address(service, forwarding)
    full = forwarding_view(forwarding, dataplane, stood, waiting, limits)
    return {name: full[name] for name in _OF_FORWARDING} | {
        "endpoints": list(_endpoint_views(full["endpoints"], stood)),
    }


def _endpoint_views(endpoints: object, statuses: Mapping[tuple[str, int], BackendStatus]) -> Iterator[Json]:
    for endpoint in endpoints if isinstance(endpoints, list) else ():
        admin = statuses.get((endpoint["address"], endpoint["port"]), DEFAULT_STATUS).admin
        view: Json = {name: endpoint[name] for name in _OF_ENDPOINT}
        # The response time of a healthy backend differs each time, and would be a change each time.
        check = "" if endpoint["health"] == "healthy" else endpoint["check"]
        yield view | {"admin": "" if admin is AdminState.ACTIVE else str(admin), "check": check}


def _source_view(source: Source, reconciler: Reconciler) -> Json:
    units = source.units()
    problems = [*source.faults()]
    problems += problem_texts(
        p for unit, found in reconciler.problems.items() if unit in units for p in found
    )
    return {
        "name": source.name,
        "connected": source.connected if isinstance(source, ConnectedSource) else True,
        "problems": problems[:MAX_PROBLEMS],
        "more": max(0, len(problems) - MAX_PROBLEMS),
    }
