"""Follows the live flows of backends: re-weights services with `balance: least-connections`, and takes
backends that have their `max_connections` out until flows end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from vipd.control.backend_status_tracker import BackendStatusTracker, connection_limits
from vipd.control.connection_shares import BackendLoad, Factors, ShareState, full_backends, next_state
from vipd.dataplane.conntrack.live_counts import LiveCounts, live_counts
from vipd.dataplane.counting import BackendKey
from vipd.host.systemd.fields import Event, fields
from vipd.model.formatting import counted
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Balance, Family, Service, family_of, port_names

log = logging.getLogger(__name__)

STEP_SECONDS = 1.0
LOOK_SECONDS = 0.1
"""Between two looks at the number of all tracked flows where a backend has a maximum. The kernel's table is
read only if so many have come that one may have reached it: to read an empty table takes milliseconds."""
MAX_CPU_SHARE = 0.05
"""Part of one CPU that readings of flows may take: steps are further apart where the table is large."""
IDLE_SECONDS = 60.0
SYNC_SECONDS = 30.0
"""Limit of the wait for rules, so that a step measures flows by the shares that it has set."""
REPORT_EVERY_SECONDS = 600.0
"""How often full backends of one service are logged at most."""

TRACKED = Path("/proc/sys/net/netfilter/nf_conntrack_count")

CountFlows = Callable[[Iterable[Forwarding], Collection[str]], Awaitable[LiveCounts]]
Loads = dict[str, BackendLoad]


class Programmed(Protocol):
    """The reconciler, as far as it is needed here."""

    services: dict[str, Service]
    forwardings: dict[str, tuple[Forwarding, ...]]

    @property
    def host_addresses(self) -> frozenset[str]:
        """This host's addresses."""

    def request_sync(self) -> int:
        """Request a step; returns its generation."""

    async def wait_synced(
        self, generation: int, timeout: float, services: Collection[str] | None = None
    ) -> bool:
        """Wait for that step, and return whether the kernel is as requested."""


class ConnectionBalancer:
    """Reads live flows about once a second while a service needs it, and passes factors of weights to the
    tracker. All services change together: one step of the reconciler, and one write, for each reading."""

    def __init__(
        self,
        programmed: Programmed,
        tracker: BackendStatusTracker,
        count: CountFlows = live_counts,
        tracked: Callable[[], int] | None = None,
    ) -> None:
        """`tracked` returns the number of all flows that the kernel tracks."""
        self._programmed, self._tracker, self._count = programmed, tracker, count
        self._tracked = tracked or tracked_flows
        self._states: dict[tuple[str, Family], ShareState] = {}
        self._full: dict[str, frozenset[str]] = {}
        self._reported_at: dict[str, float] = {}
        self._seconds = 0.0
        self._stepped_at = -math.inf
        """When the last whole step began."""
        self._look_from: float = 0.0
        """The number of tracked flows from which on a backend may have reached its maximum."""

    async def run(self, changed: asyncio.Event) -> None:
        """One step, and the pause before the next. `changed`: set when there may be other services. Raises
        ConntrackError."""
        changed.clear()
        known = self._programmed.services
        services = [known[name] for name in self._tracker.measured if name in known]
        if not services and not self._states and not self._full:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await changed.wait()
            return
        limited = [service for service in services if connection_limits(service)]
        now = asyncio.get_running_loop().time()
        if not limited or now - self._stepped_at >= STEP_SECONDS:
            self._stepped_at = now
            await self._step(services)
        elif self._tracked() >= self._look_from:
            await self._look(limited)
        await asyncio.sleep(max(LOOK_SECONDS if limited else STEP_SECONDS, self._seconds / MAX_CPU_SHARE))

    async def _look(self, services: Collection[Service]) -> None:
        """Between two steps: take out the backends that have their maximum meanwhile. Others come back with a
        step, so that rules are not written ten times a second."""
        forwardings = [each for s in services for each in self._programmed.forwardings.get(s.name, ())]
        tracked, rooms = self._tracked(), [math.inf]
        counts = await self._count(forwardings, self._programmed.host_addresses)
        self._seconds, full = counts.seconds, dict(self._full)
        for service in services:
            before, limits = full.get(service.name, frozenset()), connection_limits(service)
            flows = flows_of(service, counts.flows)
            full[service.name] = before | full_backends(before, limits, flows)
            self._report(service.name, full[service.name], limits)
            rooms += [limits[name] - flows.get(name, 0) for name in limits.keys() - full[service.name]]
        self._look_from = tracked + min(rooms)
        self._full = {name: each for name, each in full.items() if each}
        await self._write({name: self._tracker.flow_factors(name) for name in self._tracker.measured}, full)

    async def _step(self, services: Collection[Service]) -> None:
        programmed = {s.name: self._programmed.forwardings.get(s.name, ()) for s in services}
        counts = LiveCounts({}, 0.0)
        tracked, rooms = self._tracked(), [math.inf]
        if services:
            forwardings = [each for part in programmed.values() for each in part]
            counts = await self._count(forwardings, self._programmed.host_addresses)
        self._seconds = counts.seconds
        before, states, factors = self._states, dict[tuple[str, Family], ShareState](), dict[str, Factors]()
        full: dict[str, frozenset[str]] = {}
        for service in services:
            flows = flows_of(service, counts.flows)
            if limits := connection_limits(service):
                full[service.name] = full_backends(self._full.get(service.name, frozenset()), limits, flows)
                self._report(service.name, full[service.name], limits)
                rooms += [limits[name] - flows.get(name, 0) for name in limits.keys() - full[service.name]]
            if service.balance is not Balance.LEAST_CONNECTIONS:
                continue
            known = self._tracker.flow_factors(service.name)
            for family, loads in loads_of(service, programmed[service.name], known, flows):
                state = next_state(before.get((service.name, family), ShareState()), loads)
                states[service.name, family] = state
                factors[service.name] = {**factors.get(service.name, {}), **state.factors}
        self._look_from = tracked + min(rooms)
        self._states, self._full = states, {name: each for name, each in full.items() if each}
        self._reported_at = {name: at for name, at in self._reported_at.items() if name in full}
        await self._write(factors, full)

    async def _write(self, factors: Mapping[str, Factors], full: Mapping[str, frozenset[str]]) -> None:
        if self._tracker.flows_changed(factors, full):
            generation = self._programmed.request_sync()
            changed = factors.keys() | full.keys()
            await self._programmed.wait_synced(generation, SYNC_SECONDS, changed)

    def _report(self, service: str, full: frozenset[str], limits: Mapping[str, int]) -> None:
        """Log those that are full now, and were not."""
        now = asyncio.get_running_loop().time()
        added = sorted(full - self._full.get(service, frozenset()))
        if not added or now - self._reported_at.get(service, -math.inf) < REPORT_EVERY_SECONDS:
            return
        self._reported_at[service] = now
        told = ", ".join(f"{name} has its {counted(limits[name], 'connection')}" for name in added)
        reason = told if len(added) > 1 else told.replace(added[0], "it", 1)  # the event names a single one
        event, cause = Event.BACKEND_FULL, "max_connections"
        extra = fields(event, service=service, backend=added, cause=cause, reason=reason)
        log.warning("%s: %s, and gets no new flows", service, told, extra=extra)


def tracked_flows() -> int:
    """The number of all flows that the kernel tracks in this network namespace; 0 if it does not say."""
    try:
        return int(TRACKED.read_text())
    except (OSError, ValueError):
        return 0


def flows_of(service: Service, flows: Mapping[BackendKey, int]) -> dict[str, int]:
    """The live flows of each backend of a service, over all its ports, by the backend's text."""
    ports = [*zip(service.ports, port_names(service.ports), strict=True)]
    found: dict[str, int] = {}
    for backend in (*service.backends, *service.fallback):
        family, number = family_of(backend.address), 0
        for port, port_name in ports:
            at = backend.port_for(port)
            if at is not None:
                key = ForwardingKey(service.name, port_name, port.protocol, family)
                number += flows.get(BackendKey(key, backend.address, at), 0)
        found[str(backend)] = number
    return found


def loads_of(
    service: Service, forwardings: Iterable[Forwarding], factors: Factors, flows: Mapping[str, int]
) -> Iterator[tuple[Family, Loads]]:
    """The load of each backend that gets new flows, by family: over all ports of the service. `factors`:
    those that the weights of the forwardings contain; `flows`: by the backend's text."""
    weights: dict[tuple[ForwardingKey, str, int], int] = {
        (f.key, e.address, e.port): e.weight for f in forwardings for e in (*f.endpoints, *f.local_endpoints)
    }
    found: dict[Family, Loads] = {}
    for backend in service.backends:
        family, name = family_of(backend.address), str(backend)
        for port, port_name in zip(service.ports, port_names(service.ports), strict=True):
            number = backend.port_for(port)
            key = ForwardingKey(service.name, port_name, port.protocol, family)
            weight = None if number is None else weights.get((key, backend.address, number))
            if weight is not None:
                load = BackendLoad(float(weight / factors.get(name, 1)), flows.get(name, 0))
                found.setdefault(family, {})[name] = load
    yield from found.items()
