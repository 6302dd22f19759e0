"""What the API shows, as JSON values. Pure but for reading the reconciler's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from vipd.dataplane.base import Dataplane
from vipd.model import Endpoint, Forwarding, Frontend, Refusal, Service, port_names
from vipd.operations import spec_of
from vipd.progress import Progress
from vipd.reconciler import Reconciler
from vipd.sources.base import Source
from vipd.standing import Standings

Json = dict[str, object]

Place = tuple[str, int]
"""A backend's address and port."""


def time_text(moment: datetime | None) -> str | None:
    """RFC 3339 in UTC, to the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else None


def service_view(service: Service, reconciler: Reconciler, dataplane: Dataplane) -> Json:
    """A ServiceView of docs/api.md."""
    forwardings = reconciler.forwardings.get(service.name, ())
    standings = reconciler.standings(service)
    return {
        "name": service.name,
        "owner": service.origin.owner,
        "origin": {
            "source": service.origin.source,
            "path": service.origin.path,
            "line": service.origin.line,
        },
        "spec": spec_of(service),
        "status": _service_status(service, forwardings, reconciler),
        "forwardings": [_forwarding_view(f, dataplane, _reasons(service, f, standings)) for f in forwardings],
    }


def ready_backends(service: Service, forwardings: Sequence[Forwarding]) -> int:
    """How many of a service's own backends take new flows."""
    serving = {e.address for f in forwardings for e in f.reachable()}
    return sum(b.weight > 0 and b.address in serving for b in service.backends)


def _service_status(service: Service, forwardings: Sequence[Forwarding], reconciler: Reconciler) -> Json:
    state, message = _state(service, forwardings, reconciler.progress)
    return {
        "state": state,
        "message": message,
        "ready": ready_backends(service, forwardings),
        "backends": len(service.backends),
    }


def _state(service: Service, forwardings: Sequence[Forwarding], progress: Progress) -> tuple[str, str]:
    if service.name in progress.quarantined:
        return "quarantined", progress.quarantined[service.name]
    if progress.state not in ("in-sync", "degraded"):
        return "pending", progress.fault
    empty = [f for f in forwardings if not f.endpoints_under(f.internal_policy)]
    if not empty:
        return "ok", ""
    frontends = ", ".join(str(Frontend(a, f.port, f.key.protocol)) for f in empty for a in f.addresses)
    dropped = any(f.served or f.refusal is Refusal.DROP for f in empty)
    return "no-backends", f"new flows to {frontends} are {'dropped' if dropped else 'refused'}"


def _reasons(service: Service, forwarding: Forwarding, standings: Standings) -> Mapping[Place, str]:
    """Why backends do not stand as declared, by where the forwarding reaches them."""
    key = forwarding.key
    names = zip(service.ports, port_names(service.ports), strict=True)
    port = next((p for p, name in names if (p.protocol, name) == (key.protocol, key.port_name)), None)
    found: dict[Place, str] = {}
    for backend in (*service.fallback, *service.backends) if standings and port else ():
        standing = standings.get(str(backend))
        number = backend.port_for(port) if port else None
        if standing and standing.reason and number:
            found[backend.address, number] = standing.reason
    return found


def _forwarding_view(forwarding: Forwarding, dataplane: Dataplane, reasons: Mapping[Place, str]) -> Json:
    chain, endpoint_chains = dataplane.chains_of(forwarding)
    key, shares, outside = forwarding.key, forwarding.shares(), forwarding.external_addresses
    reachable = forwarding.reachable()
    return {
        "name": key.service_port,
        "protocol": key.protocol,
        "family": str(key.family),
        "frontends": [str(Frontend(a, forwarding.port, key.protocol)) for a in forwarding.addresses],
        "external": [str(Frontend(e.address, forwarding.port, key.protocol)) for e in outside],
        "node_port": forwarding.node_port,
        "health_port": forwarding.health_port,
        "traffic_policy": {"internal": forwarding.internal_policy, "external": forwarding.external_policy},
        "masquerade": forwarding.masquerade,
        "affinity_seconds": forwarding.affinity_timeout,
        "refusal": Refusal.DROP if forwarding.served else forwarding.refusal,
        "chain": chain if reachable else "",
        "endpoints": [
            *(
                _endpoint_view(e, shares.get(e, 0.0), True, reasons.get(e[:2], ""), endpoint_chains[e])
                for e in reachable
            ),
            *(
                _endpoint_view(e, 0.0, False, reasons.get(e[:2], "") or _why_idle(e, forwarding), "")
                for e in (*forwarding.resting, *forwarding.down)
            ),
        ],
    }


def _why_idle(endpoint: Endpoint, forwarding: Forwarding) -> str:
    if endpoint in forwarding.down:
        return "declared down"
    return "not in use now" if endpoint.weight else "weight 0"


def _endpoint_view(endpoint: Endpoint, share: float, ready: bool, reason: str, chain: str) -> Json:
    return {
        "endpoint": str(endpoint),
        "address": endpoint.address,
        "port": endpoint.port,
        "weight": endpoint.weight,
        "share": round(share, 6),
        "ready": ready,
        "reason": reason,
        "chain": chain,
    }


def status_view(
    reconciler: Reconciler, dataplane: Dataplane, sources: Sequence[Source], about: Mapping[str, object]
) -> Json:
    """The Status of docs/api.md. `about`: version, pid, started, settings and warnings of the daemon."""
    progress, services = reconciler.progress, reconciler.services.values()
    ready = sum(ready_backends(s, reconciler.forwardings.get(s.name, ())) for s in services)
    return {
        **about,
        "state": progress.state,
        "message": progress.fault,
        "dataplane": {"name": "iptables", **dataplane.versions()},
        "services": len(services),
        "backends": sum(len(s.backends) for s in services),
        "ready": ready,
        "last_apply": time_text(progress.last_apply),
        "last_apply_seconds": round(progress.last_seconds, 3),
        "applies": progress.applies,
        "apply_failures": progress.failures,
        "quarantined": dict(progress.quarantined),
        "sources": [_source_view(source, reconciler) for source in sources],
        "warnings": [*progress.warnings, *_listed(about.get("warnings"))],
    }


def _source_view(source: Source, reconciler: Reconciler) -> Json:
    units = source.units()
    serving = [s for s in reconciler.services.values() if _unit_of(s) in units]
    problems = [str(p) for unit in units for p in reconciler.problems.get(unit, ())]
    return {
        "name": source.name,
        "location": source.location,
        "services": len(serving),
        "problems": [*source.faults(), *problems],
    }


def _unit_of(service: Service) -> str:
    return service.origin.owner


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []
