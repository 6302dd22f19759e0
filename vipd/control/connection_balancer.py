"""Follows the live flows of backends: re-weights services with `balance: least-connections`, and takes
backends that have their `max_connections` out until flows end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
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
MAX_CPU_SHARE = 0.05
"""Part of one CPU that readings of flows may take: steps are further apart where the table is large."""
IDLE_SECONDS = 60.0
SYNC_SECONDS = 30.0
"""Limit of the wait for rules, so that a step measures flows by the shares that it has set."""
REPORT_EVERY_SECONDS = 600.0
"""How often full backends of one service are logged at most."""

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
        self, programmed: Programmed, tracker: BackendStatusTracker, count: CountFlows = live_counts
    ) -> None:
        self._programmed, self._tracker, self._count = programmed, tracker, count
        self._states: dict[tuple[str, Family], ShareState] = {}
        self._full: dict[str, frozenset[str]] = {}
        self._reported_at: dict[str, float] = {}
        self._seconds = 0.0

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
        await self._step(services)
        await asyncio.sleep(max(STEP_SECONDS, self._seconds / MAX_CPU_SHARE))

    async def _step(self, services: Collection[Service]) -> None:
        programmed = {s.name: self._programmed.forwardings.get(s.name, ()) for s in services}
        counts = LiveCounts({}, 0.0)
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
            if service.balance is not Balance.LEAST_CONNECTIONS:
                continue
            known = self._tracker.flow_factors(service.name)
            for family, loads in loads_of(service, programmed[service.name], known, flows):
                state = next_state(before.get((service.name, family), ShareState()), loads)
                states[service.name, family] = state
                factors[service.name] = {**factors.get(service.name, {}), **state.factors}
        self._states, self._full = states, {name: each for name, each in full.items() if each}
        self._reported_at = {name: at for name, at in self._reported_at.items() if name in full}
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
