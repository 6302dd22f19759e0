"""Computes the status of each backend of a service from health check results and operators' overrides.

The tracker receives changes of services, checks and overrides. The reconciler takes from it the services
whose backends' status may have changed since it last did so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple, Protocol, TypeVar

from vipd.control.connection_shares import Factors
from vipd.health.result import ReportedWeight
from vipd.health.weights import FULL_SHARE, Ramp, WeightInputs, full_weight, ramp, weights
from vipd.host.observer import Observer
from vipd.model.backend_status import (
    DEFAULT_STATUS,
    UNCHECKED,
    AdminState,
    BackendStatus,
    BackendStatuses,
)
from vipd.model.check_target import CheckTarget, backends_without_check_port, check_targets
from vipd.model.formatting import counted
from vipd.model.override import EffectiveOverride, Override, Overrides, OverrideTarget, effective_override
from vipd.model.service import Backend, Balance, Service


class TargetHealth(Protocol):
    """The health of one check target."""

    @property
    def state(self) -> str:
        """`healthy`, `unhealthy` or `unknown`."""

    @property
    def counts_healthy(self) -> bool:
        """Whether the target counts as healthy."""

    @property
    def reason(self) -> str:
        """The reason of its state, in one line."""

    @property
    def weight(self) -> ReportedWeight | None:
        """The weight that its last good answer reported."""

    @property
    def serves_since(self) -> float | None:
        """When it became healthy again, on the monotonic clock; None: it has no slow start."""


class HealthSource(Protocol):
    """Checks targets, and knows their health."""

    def follow(self, service: str, targets: Collection[CheckTarget], author: str = "") -> None:
        """Check exactly these targets for a service from now on; none when the service is gone."""

    def status(self, target: CheckTarget) -> TargetHealth | None:
        """The health of a target; None: unknown."""


class _NoChecks:
    """Used without health checks: checks nothing, so that all backends serve."""

    def follow(self, service: str, targets: Collection[CheckTarget], author: str = "") -> None:
        """Check nothing."""

    def status(self, target: CheckTarget) -> None:
        """Returns None: no state is tracked."""


class OverrideSource(Protocol):
    """A store of operators' overrides."""

    @property
    def overrides(self) -> Overrides:
        """Every active override."""


@dataclass(slots=True)
class _TrackedService:
    """Values computed once for each service."""

    service: Service
    targets: Mapping[str, CheckTarget]


@dataclass(slots=True)
class _OverrideIndex:
    """Overrides by target, so that the overrides of one service are found without a search through all."""

    by_service: dict[str, list[Override]] = field(default_factory=lambda: defaultdict(list))
    by_address: dict[str, list[Override]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, override_sources: Iterable[OverrideSource]) -> _OverrideIndex:
        """The index of all overrides in these stores."""
        index = cls()
        for override in (o for source in override_sources for o in source.overrides.values()):
            if override.target.service:
                index.by_service[override.target.service].append(override)
            else:
                index.by_address[override.target.backend].append(override)
        return index

    def may_concern(self, service: Service) -> bool:
        """False if no override applies to any backend of a service."""
        return bool(self.by_address) or service.name in self.by_service

    def overrides_of_backend(self, service: Service, backend: Backend) -> EffectiveOverride:
        """The combined effect of all overrides of a backend."""
        named, everywhere = self.by_service.get(service.name), self.by_address.get(backend.address)
        return effective_override(service, backend, [*(named or ()), *(everywhere or ())])


T = TypeVar("T")
_WHOLE = Fraction(1)
_MAX_NAMED = 3
"""Maximum number of backends that the warnings name; further ones are only counted."""


class BackendStatusTracker(Observer):
    """Knows the status of all backends. Without overrides and checks, every backend serves as declared.

    `clock` is the monotonic clock of the health checks, in seconds.
    """

    def __init__(
        self,
        override_sources: Sequence[OverrideSource] = (),
        health_source: HealthSource | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._override_sources, self._health_source = override_sources, health_source or _NoChecks()
        self._clock = clock
        self._tracked: dict[str, _TrackedService] = {}
        self._users: dict[CheckTarget, set[str]] = {}
        self._index = _OverrideIndex.of(override_sources)
        self._dirty: set[str] = set()
        self._ramps: dict[str, float] = {}
        self._unchecked: dict[str, tuple[Backend, ...]] = {}
        self._factors: dict[str, Factors] = {}
        self._full: dict[str, frozenset[str]] = {}
        self.measured: set[str] = set()
        """Names of services for which live flows matter: they balance by them, or backends have limits."""

    def warnings(self) -> tuple[str, ...]:
        """Warnings about backends that serve unchecked, because their check has no port to connect to. For
        declared backends this is already a problem of the declaration; registered ones appear only here."""
        unasked = [(name, backend) for name, found in self._unchecked.items() for backend in found]
        hint = "add port to the check, or register the backend with a port that it asks at"
        lines = [
            f"{name}: the check of {backend} finds no port, so that it serves unchecked; hint: {hint}"
            for name, backend in unasked[:_MAX_NAMED]
        ]
        more = len(unasked) - len(lines)
        return (*lines, *([f"{more} more backends serve unchecked"] if more > 0 else ()))

    def follow(self, changes: Mapping[str, Service | None]) -> None:
        """Record new and changed services, and None for those that are gone. From now on, exactly the
        backends of the existing services are checked."""
        for name, service in changes.items():
            if service is None and name in self._tracked:
                self._untrack(name)
                self._health_source.follow(name, ())
        for name, service in changes.items():
            if service is not None and (
                name not in self._tracked or self._tracked[name].service is not service
            ):
                self._track(service)

    def _track(self, service: Service) -> None:
        self._untrack(service.name)
        entry = _TrackedService(service, check_targets(service))
        self._tracked[service.name] = entry
        if len(entry.targets) < len(service.backends) and (unasked := backends_without_check_port(service)):
            self._unchecked[service.name] = unasked
        if service.balance is Balance.LEAST_CONNECTIONS or connection_limits(service):
            self.measured.add(service.name)
        for target in entry.targets.values():
            self._users.setdefault(target, set()).add(service.name)
        # One call replaces the old targets, so that the new ones inherit the state of an earlier check.
        targets = frozenset(entry.targets.values())
        self._health_source.follow(service.name, targets, service.origin.author)

    def take_dirty(self) -> set[str]:
        """Services whose backends' status may have changed since the last call."""
        dirty, self._dirty = self._dirty, set()
        return dirty

    def backend_statuses(self, service: Service) -> BackendStatuses:
        """Current status of a service's backends, without backends whose status is as declared."""
        if not service.backends and not service.fallback:
            return {}
        targets = (
            check_targets(service)
            if service.name not in self._tracked
            else self._tracked[service.name].targets
        )
        by_flows = service.name in self._factors or service.name in self._full
        if not targets and not by_flows and not self._index.may_concern(service):
            return {}
        backends = {str(backend): backend for backend in (*service.fallback, *service.backends)}
        found = {
            name: self._status_of(service, backend, targets.get(name)) for name, backend in backends.items()
        }
        weighed = self._weights(service, targets, found)
        statuses = {name: status.with_weight(weighed.get(name)) for name, status in found.items()}
        return {
            name: status
            for name, status in statuses.items()
            if status != DEFAULT_STATUS or _is_reportable(status)
        }

    def overrides_changed(self, targets: frozenset[OverrideTarget]) -> None:
        """Overrides of these targets were set or cleared."""
        self._index = _OverrideIndex.of(self._override_sources)
        names = {target.service for target in targets if target.service}
        addresses = {target.backend for target in targets if not target.service}
        self._dirty |= names & self._tracked.keys()
        if addresses:
            self._dirty |= {
                name
                for name, tracked in self._tracked.items()
                if any(b.address in addresses for b in (*tracked.service.backends, *tracked.service.fallback))
            }

    def health_changed(self, targets: frozenset[CheckTarget]) -> None:
        """The results of checks of these targets changed."""
        for target in targets:
            self._dirty |= self._users.get(target, set())

    def flow_factors(self, service: str) -> Factors:
        """The parts of their weights that live flows leave the backends of a service."""
        return self._factors.get(service, {})

    def flows_changed(self, factors: Mapping[str, Factors], full: Mapping[str, frozenset[str]]) -> bool:
        """Live flows leave the backends of these services such parts of their weights, and those of others
        all of it. `full`: those that have their `max_connections`, by service. Returns whether a share
        changes."""
        changed = _differing(self._factors, factors) | _differing(self._full, full)
        self._factors = {name: each for name, each in factors.items() if each}
        self._full = {name: each for name, each in full.items() if each}
        self._dirty |= changed & self._tracked.keys()
        return bool(changed)

    def due(self) -> float | None:
        """The time of the next step of any slow start, on the monotonic clock; None if there is none."""
        return min(self._ramps.values(), default=None)

    def tick(self) -> bool:
        """Mark services dirty whose next slow start step is due. Returns whether there are any."""
        now = self._clock()
        ready = {name for name, at in self._ramps.items() if at <= now}
        self._dirty |= ready
        for name in ready:
            del self._ramps[name]
        return bool(ready)

    def _untrack(self, name: str) -> None:
        tracked = self._tracked.pop(name, None)
        self._ramps.pop(name, None)
        self._unchecked.pop(name, None)
        self.measured.discard(name)
        for target in tracked.targets.values() if tracked else ():
            users = self._users.get(target, set())
            users.discard(name)
            if not users:
                self._users.pop(target, None)

    def _status_of(self, service: Service, backend: Backend, target: CheckTarget | None) -> _CheckedStatus:
        override = self._index.overrides_of_backend(service, backend)
        health = self._health_source.status(target) if target else None
        healthy = health is None or health.counts_healthy
        reasons = [_override_text(each) for each in override.sources]
        if health is not None and not health.counts_healthy:
            reasons.append(f"unhealthy: {health.reason}")
        full = str(backend) in self._full.get(service.name, ())
        if full and backend.max_connections is not None:
            reasons.append(f"full: it has its {counted(backend.max_connections, 'connection')}")
        status = BackendStatus(
            healthy,
            override.admin,
            override.weight,
            full=full,
            keeps_affinity=override.keeps_affinity,
            reason="; ".join(reasons),
            health=str(health.state) if health else UNCHECKED,
            probe_result=health.reason if health else "",
        )
        return _CheckedStatus(status, health)

    def _weights(
        self, service: Service, targets: Mapping[str, CheckTarget], found: Mapping[str, _CheckedStatus]
    ) -> Mapping[str, _Weight]:
        """The weights of backends whose weight differs from the declared one, because of a check's answer or
        a slow start."""
        self._ramps.pop(service.name, None)
        factors = self._factors.get(service.name, {})
        if not factors and (not targets or not (service.weight_from_check or service.slow_start)):
            return {}
        inputs = [
            _weight_inputs(service, backend, found[str(backend)], factors.get(str(backend), _WHOLE))
            for backend in service.backends
        ]
        now = self._clock()
        shares, next_step = weights(inputs, service.slow_start, now)
        if next_step is not None:
            self._ramps[service.name] = next_step
        ramps = [ramp(each.healthy_since, service.slow_start, now) for each in inputs]
        grown_shares = zip(service.backends, inputs, shares, ramps, strict=True)
        return {
            str(backend): _Weight(share, full_weight(each), grown, each.factor)
            for backend, each, share, grown in grown_shares
            if (share, full_weight(each), grown, each.factor)
            != (each.declared, each.declared, FULL_SHARE, _WHOLE)
        }


class _Weight(NamedTuple):
    """`value`: the weight on the scale of the service's other backends. `full`: the weight without slow start
    and scale."""

    value: int
    full: int
    ramp: Ramp
    factor: Fraction


@dataclass(frozen=True, slots=True)
class _CheckedStatus:
    status: BackendStatus
    health: TargetHealth | None

    def with_weight(self, weight: _Weight | None) -> BackendStatus:
        """The status with another weight; unchanged for None."""
        if weight is None:
            return self.status
        said = self.health.weight if self.health else None
        why = [f"weight {said} said by its check"] if said else []
        why += ["slow start"] if weight.ramp != FULL_SHARE else []
        why += [f"{float(weight.factor):.0%} of its weight, for its live flows"] if weight.factor != 1 else []
        reason = "; ".join(filter(None, (self.status.reason, *why)))
        return replace(self.status, weight=weight.value, shown_weight=weight.full, reason=reason)


def _weight_inputs(
    service: Service, backend: Backend, checked: _CheckedStatus, factor: Fraction
) -> WeightInputs:
    override_weight, health = checked.status.weight, checked.health
    # An operator's weight overrides the weight that the backend reports.
    listened = service.weight_from_check and override_weight is None and health is not None
    return WeightInputs(
        backend.weight if override_weight is None else override_weight,
        health.weight if health and listened else None,
        health.serves_since if health else None,
        factor,
    )


def connection_limits(service: Service) -> dict[str, int]:
    """The `max_connections` of the backends that have one, by their text."""
    backends = (*service.backends, *service.fallback)
    return {str(b): b.max_connections for b in backends if b.max_connections is not None}


def _differing(before: Mapping[str, T], after: Mapping[str, T]) -> set[str]:
    """The names whose values differ; an empty value is as none."""
    return {
        name
        for name in before.keys() | after.keys()
        if (before.get(name) or None) != (after.get(name) or None)
    }


def _is_reportable(status: BackendStatus) -> bool:
    """Whether a status has anything to show: a reason, or a check's state."""
    return bool(status.reason) or status.health != UNCHECKED


def _override_text(override: Override) -> str:
    """An override as the reason of a backend's status: `draining by uid 0: kernel update`."""
    words = [] if override.admin is AdminState.ACTIVE else [str(override.admin)]
    words += [] if override.weight is None else [f"weight {override.weight}"]
    why = f": {override.reason}" if override.reason else ""
    return f"{' and '.join(words)} by {override.by}{why}"
