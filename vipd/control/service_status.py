"""The state of a service, and the part of a refused file or key that serves, in the words that `vipctl`, the
API, the log and the status page share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vipd.declaration.problems import Problem
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.model.backend_status import (
    DEFAULT_STATUS,
    UNCHECKED,
    AdminState,
    BackendStatus,
    BackendStatuses,
)
from vipd.model.forwarding import Forwarding
from vipd.model.service import BackendState, Frontend, Origin, RejectAction, Service

SERVING_STATES = ("ok", "unchecked", "degraded", "no-backends", "quarantined")
"""The states of services whose rules are in the kernel, the worst last."""


class ServiceStatus(NamedTuple):
    """A word, and a sentence with the reason."""

    state: str
    """`ok`, `unchecked` (as declared, but some backends were not checked, or not yet), `degraded` (some new
    flows are refused, or some backends are down or unhealthy), `no-backends` (all new flows are refused),
    `pending` (not in the kernel yet) or `quarantined`."""
    message: str
    """The most important part ends at the first semicolon; empty if there is nothing to report."""


class TwofoldAddresses(NamedTuple):
    """Addresses of a service that are something else, too."""

    of_host: Sequence[str] = ()
    """Its own addresses that this host itself has, and should not."""
    vips: Sequence[str] = ()
    """Addresses of its backends that are virtual IPs of other services."""


def service_status(
    service: Service,
    forwardings: Sequence[Forwarding],
    backend_statuses: BackendStatuses,
    quarantine: str | None = None,
    pending: str | None = None,
    twofold: TwofoldAddresses = TwofoldAddresses(),  # noqa: B008 (a value)
) -> ServiceStatus:
    """The state of a service. `quarantine`: why the kernel rejects a part of it; `pending`: why its
    rules are not in the kernel yet, may be empty. Draining or disabling by an operator is no fault.
    """
    if quarantine is not None:
        return ServiceStatus("quarantined", quarantine)
    if pending is not None:
        return ServiceStatus("pending", pending)
    empty = [f for f in forwardings if not f.endpoints_under(f.internal_policy)]
    unasked = _unasked(service, backend_statuses)
    state = _serving_state(service, forwardings, backend_statuses, unasked, twofold.vips)
    backends = _backends_in_words(service, backend_statuses, (0, 0) if state == "no-backends" else unasked)
    own = f"{', '.join(twofold.of_host)} on a device of this host itself" if twofold.of_host else ""
    taken = f"{', '.join(twofold.vips)} also a virtual IP of another service" if twofold.vips else ""
    if state == "no-backends":
        return ServiceStatus(state, "; ".join(filter(None, (own, _refused(empty), backends, taken))))
    told = [own, *((_without(empty, forwardings), _refused(empty)) if empty else ()), backends, taken]
    return ServiceStatus(state, "; ".join(filter(None, told)))


def _serving_state(
    service: Service,
    forwardings: Sequence[Forwarding],
    backend_statuses: BackendStatuses,
    unasked: tuple[int, int],
    vips_of_others: Sequence[str],
) -> str:
    """The state of a service whose rules are in the kernel."""
    empty = sum(not f.endpoints_under(f.internal_policy) for f in forwardings)
    if empty and empty == len(forwardings):
        return "no-backends"
    if empty or vips_of_others or _down(service) or _unhealthy(backend_statuses.values()):
        return "degraded"
    return "unchecked" if any(unasked) else "ok"


def _unasked(service: Service, backend_statuses: BackendStatuses) -> tuple[int, int]:
    """Number of backends for new flows of which nothing is known: those without a check, and those whose
    check has no verdict yet. A service without backends of its own has those of its fallback."""
    weighed = [backend for backend in service.backends or service.fallback if backend.weight]
    active = [backend for backend in weighed if backend.state is BackendState.UP]
    active = active or [backend for backend in weighed if backend.state is BackendState.DRAIN]
    if not backend_statuses:  # most services, each time that they change
        return len(active), 0
    standings = [backend_statuses.get(str(backend), DEFAULT_STATUS) for backend in active]
    unasked = Counter(s.health for s in standings if s.healthy and s.admin is AdminState.ACTIVE)
    return unasked[UNCHECKED], unasked["unknown"]


def in_panic(service: Service, backend_statuses: BackendStatuses) -> bool:
    """Whether none of its own backends is healthy, and all serve because of that."""
    own = [backend_statuses.get(str(backend)) for backend in service.backends]
    return service.keeps_unhealthy and bool(own) and all(one and not one.healthy for one in own)


class RefusedUnit(NamedTuple):
    """A unit that has problems, and the number of its services that serve all the same."""

    name: str
    unit: Unit
    serving: int
    rest_serves: bool = False
    """Whether only parts of services are refused, and the current version serves without them."""

    @property
    def whole(self) -> bool:
        """Whether its last good version serves completely."""
        return not self.rest_serves and 0 < self.serving == len(self.unit.accepted.services)

    @property
    def serves(self) -> str:
        """The part of it that serves, as text."""
        kind = {"file": "file", "etcd": "key"}.get(self.name.partition(":")[0], "store")
        if self.unit.part:
            kind = "object"
        if self.rest_serves:
            return f"the rest of the {kind} serves"
        if not self.serving:
            return f"nothing of the {kind} serves"
        if self.whole:
            return f"the last good version of the {kind} serves on"
        parts = (self.unit.candidate, self.unit.accepted)
        declared = {service.name for part in parts for service in part.services}
        return f"{self.serving} of {len(declared)} services of the {kind} serve"


def serving_by_owner(services: Iterable[Service]) -> Counter[str]:
    """Number of serving services of each unit. Those of a part of a file count for the file, too."""
    services = tuple(services)
    places = Counter([(service.origin.source, service.origin.path) for service in services])
    owners = Counter({Origin(*place).owner: number for place, number in places.items()})
    owners.update(f"{s.origin.owner}#{s.origin.part}" for s in services if s.origin.part)
    return owners


def refused_units(
    units: Mapping[str, Unit], problems: Mapping[str, Sequence[Problem]], serving: Mapping[str, int]
) -> list[RefusedUnit]:
    """The units that have problems. `serving`: number of serving services of each unit."""
    # An addition to a source, such as a registration, is no unit of it until it cannot be read.
    return [
        RefusedUnit(
            n,
            units.get(n) or Unit(EMPTY_DECLARATION),
            serving.get(n, 0),
            all(problem.partial for problem in found),
        )
        for n, found in problems.items()
        if found
    ]


def what_serves(refused: Sequence[RefusedUnit]) -> str:
    """The serving part of all these together, as text; empty if there are none."""
    if len(refused) < 2:
        return "".join(each.serves for each in refused)
    whole = sum(each.whole for each in refused)
    if all(each.rest_serves for each in refused):
        return "the rest of what they declare serves"
    nothing = sum(not each.serving for each in refused)
    if whole == len(refused):
        return "the last good versions go on serving"
    if nothing == len(refused):
        return "nothing of what is refused serves"
    numbers = {
        "in the last good version": whole,
        "in part": len(refused) - whole - nothing,
        "not at all": nothing,
    }
    told = ", ".join(f"{number} {how}" for how, number in numbers.items() if number)
    return f"of {len(refused)} refused files and keys serve {told}"


def _refused(empty: Sequence[Forwarding]) -> str:
    frontends = ", ".join(str(Frontend(a, f.port, f.key.protocol)) for f in empty for a in f.addresses)
    dropped = any(f.has_endpoints or f.refusal is RejectAction.DROP for f in empty)
    return f"new flows to {frontends} are {'dropped' if dropped else 'refused'}"


def _without(empty: Sequence[Forwarding], forwardings: Sequence[Forwarding]) -> str:
    """The part without backends, as text: a family, or so many of all."""
    families = {f.key.family for f in empty}
    alone = len(families) == 1 and len(empty) == sum(f.key.family in families for f in forwardings)
    part = f"IPv{next(iter(families)).value}" if alone else f"{len(empty)} of {len(forwardings)} ports"
    return f"{part} without backends"


def _down(service: Service) -> int:
    """Backends that are declared down."""
    return sum(backend.state is BackendState.DOWN for backend in service.backends)


def _backends_in_words(service: Service, backend_statuses: BackendStatuses, unasked: tuple[int, int]) -> str:
    """`1 draining, 2 unhealthy`; empty when all backends are healthy. `unasked`: numbers as of `_unasked`."""
    own = [backend_statuses[str(backend)] for backend in service.backends if str(backend) in backend_statuses]
    spare = [
        backend_statuses[str(backend)] for backend in service.fallback if str(backend) in backend_statuses
    ]
    numbers = {
        "draining": sum(standing.admin is AdminState.DRAINING for standing in own),
        "disabled": sum(standing.admin is AdminState.DISABLED for standing in own),
        "unhealthy": _unhealthy(own),
        "full": sum(standing.full for standing in own),
        "declared down": _down(service),
        "of the fallback unhealthy": _unhealthy(spare),
    }
    numbers["unchecked"], numbers["not checked yet"] = unasked
    told = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
    return f"{told}; all serve, as fallback: keep says" if in_panic(service, backend_statuses) else told


def _unhealthy(backend_statuses: Iterable[BackendStatus]) -> int:
    return sum(not standing.healthy for standing in backend_statuses)


def unchecked_backends(service: Service, backend_statuses: BackendStatuses) -> int:
    """Number of a service's backends for new flows that no check asks."""
    return _unasked(service, backend_statuses)[0]


def ready_backends(service: Service, forwardings: Sequence[Forwarding]) -> int:
    """Number of a service's own backends that take new flows."""
    serving = {e.address for f in forwardings for e in f.reachable()}
    return sum(b.weight > 0 and b.address in serving for b in service.backends)


class _Counted(NamedTuple):
    """A service as `Readiness` has counted it."""

    ready: int
    declared: int
    unchecked: int
    state: str
    unhealthy: Mapping[str, str]
    """The addresses of its unhealthy backends, each with the last result of its check."""


_NOT_COUNTED = _Counted(0, 0, 0, "", {})


class Readiness:
    """Numbers over all services, updated as services change."""

    def __init__(self) -> None:
        self.ready = 0
        """Backends that take new flows."""
        self.declared = 0
        """All backends."""
        self.unchecked = 0
        """Backends for new flows that no check asks."""
        self.unhealthy: dict[str, dict[str, str]] = {}
        """By address of unhealthy backends: the services where its check fails, each with the last result."""
        self._in_state: dict[str, dict[str, None]] = {}
        self._counted: dict[str, _Counted] = {}

    def update(
        self,
        name: str,
        service: Service | None,
        forwardings: Sequence[Forwarding] = (),
        backend_statuses: BackendStatuses = MappingProxyType({}),
        twofold: TwofoldAddresses = TwofoldAddresses(),  # noqa: B008 (a value)
    ) -> None:
        """Set a service as it is now served; None: it is gone."""
        before, after = self._counted.pop(name, _NOT_COUNTED), _NOT_COUNTED
        if service is not None:
            unasked = _unasked(service, backend_statuses)
            after = _Counted(
                ready_backends(service, forwardings),
                len(service.backends),
                unasked[0],
                _serving_state(service, forwardings, backend_statuses, unasked, twofold.vips),
                _unhealthy_addresses(service, backend_statuses),
            )
            self._counted[name] = after
        self.ready += after.ready - before.ready
        self.declared += after.declared - before.declared
        self.unchecked += after.unchecked - before.unchecked
        if before.state != after.state:
            self._in_state.get(before.state, {}).pop(name, None)
            if after.state:
                self._in_state.setdefault(after.state, {})[name] = None
        for address in before.unhealthy.keys() - after.unhealthy.keys():
            del self.unhealthy[address][name]
            if not self.unhealthy[address]:
                del self.unhealthy[address]
        for address, result in after.unhealthy.items():
            self.unhealthy.setdefault(address, {})[name] = result

    def in_state(self, state: str, quarantined: Mapping[str, str]) -> Collection[str]:
        """The services in a state of `ServiceStatus`; nothing is known here of those that are pending."""
        if state == "quarantined":
            return quarantined
        names = self._in_state.get(state, {})
        return [name for name in names if name not in quarantined] if quarantined else names


def _unhealthy_addresses(service: Service, backend_statuses: BackendStatuses) -> Mapping[str, str]:
    if all(standing.healthy for standing in backend_statuses.values()):
        return _NOT_COUNTED.unhealthy
    backends = {str(backend): backend.address for backend in (*service.backends, *service.fallback)}
    return {
        backends[name]: standing.probe_result
        for name, standing in backend_statuses.items()
        if not standing.healthy
    }
