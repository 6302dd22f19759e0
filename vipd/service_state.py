"""How a service is doing, in the words that `vipctl list`, the API and the status page share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vipd.model import BackendState, Forwarding, Frontend, Refusal, Service
from vipd.standing import Admin, Standing, Standings


class ServiceState(NamedTuple):
    """A word, and a sentence that says why."""

    state: str
    """`ok`, `degraded` (some new flows are refused, or some backends are down or unhealthy), `no-backends`
    (all new flows are refused), `pending` (not in the kernel yet) or `quarantined`."""
    message: str
    """What is to be told first ends at the first semicolon; empty if there is nothing."""


def state_of(
    service: Service,
    forwardings: Sequence[Forwarding],
    standings: Standings,
    quarantine: str | None = None,
    pending: str | None = None,
) -> ServiceState:
    """The state of a service. `quarantine`: why the kernel does not take a part of it; `pending`: why its
    rules are not in the kernel yet, may be empty. What an operator drains or disables is no fault.
    """
    if quarantine is not None:
        return ServiceState("quarantined", quarantine)
    if pending is not None:
        return ServiceState("pending", pending)
    empty = [f for f in forwardings if not f.endpoints_under(f.internal_policy)]
    backends = _backends_told(service, standings)
    if empty and len(empty) == len(forwardings):
        return ServiceState("no-backends", "; ".join(filter(None, (_refused(empty), backends))))
    told = [*((_without(empty, forwardings), _refused(empty)) if empty else ()), backends]
    bad = bool(empty) or _down(service) or any(not standing.healthy for standing in standings.values())
    return ServiceState("degraded" if bad else "ok", "; ".join(filter(None, told)))


def in_panic(service: Service, standings: Standings) -> bool:
    """Whether none of its own backends is healthy, and all serve for want of better."""
    own = [standings.get(str(backend)) for backend in service.backends]
    return service.keeps_unhealthy and bool(own) and all(one and not one.healthy for one in own)


def _refused(empty: Sequence[Forwarding]) -> str:
    frontends = ", ".join(str(Frontend(a, f.port, f.key.protocol)) for f in empty for a in f.addresses)
    dropped = any(f.served or f.refusal is Refusal.DROP for f in empty)
    return f"new flows to {frontends} are {'dropped' if dropped else 'refused'}"


def _without(empty: Sequence[Forwarding], forwardings: Sequence[Forwarding]) -> str:
    """Which part has no backends: a family, or so many of all."""
    families = {f.key.family for f in empty}
    alone = len(families) == 1 and len(empty) == sum(f.key.family in families for f in forwardings)
    part = f"IPv{next(iter(families)).value}" if alone else f"{len(empty)} of {len(forwardings)} ports"
    return f"{part} without backends"


def _down(service: Service) -> int:
    """Backends that are declared down."""
    return sum(backend.state is BackendState.DOWN for backend in service.backends)


def _backends_told(service: Service, standings: Standings) -> str:
    """`1 draining, 2 unhealthy`; empty when all backends stand as declared."""
    own = [standings[str(backend)] for backend in service.backends if str(backend) in standings]
    spare = [standings[str(backend)] for backend in service.fallback if str(backend) in standings]
    numbers = {
        "draining": sum(standing.admin is Admin.DRAINING for standing in own),
        "disabled": sum(standing.admin is Admin.DISABLED for standing in own),
        "unhealthy": _unhealthy(own),
        "declared down": _down(service),
        "of the fallback unhealthy": _unhealthy(spare),
    }
    told = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
    return f"{told}; all serve, as fallback: keep says" if in_panic(service, standings) else told


def _unhealthy(standings: Sequence[Standing]) -> int:
    return sum(not standing.healthy for standing in standings)
