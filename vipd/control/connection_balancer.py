"""Re-weights the services with `balance: least-connections` while their flows come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol

from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.connection_shares import BackendLoad, Factors, ShareState, next_state
from vipd.dataplane.conntrack.live_counts import LiveCounts, live_counts
from vipd.dataplane.counting import BackendKey
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Balance, Family, Service, family_of, port_names

STEP_SECONDS = 1.0
MAX_CPU_SHARE = 0.05
"""Part of one CPU that readings of flows may take: steps are further apart where the table is large."""
IDLE_SECONDS = 60.0
SYNC_SECONDS = 30.0
"""Limit of the wait for rules, so that a step measures flows by the shares that it has set."""

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
        self._seconds = 0.0

    async def run(self, changed: asyncio.Event) -> None:
        """One step, and the pause before the next. `changed`: set when there may be other services. Raises
        ConntrackError."""
        changed.clear()
        services = [s for s in self._programmed.services.values() if s.balance is Balance.LEAST_CONNECTIONS]
        if not services and not self._states:
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
        for service in services:
            known = self._tracker.flow_factors(service.name)
            for family, loads in loads_of(service, programmed[service.name], known, counts.flows):
                state = next_state(before.get((service.name, family), ShareState()), loads)
                states[service.name, family] = state
                factors[service.name] = {**factors.get(service.name, {}), **state.factors}
        self._states = states
        if self._tracker.flows_changed(factors):
            generation = self._programmed.request_sync()
            await self._programmed.wait_synced(generation, SYNC_SECONDS, factors.keys())


def loads_of(
    service: Service, forwardings: Iterable[Forwarding], factors: Factors, flows: Mapping[BackendKey, int]
) -> Iterator[tuple[Family, Loads]]:
    """The load of each backend that gets new flows, by family: over all ports of the service. `factors`:
    those that the weights of the forwardings contain."""
    weights: dict[tuple[ForwardingKey, str, int], int] = {
        (f.key, e.address, e.port): e.weight for f in forwardings for e in (*f.endpoints, *f.local_endpoints)
    }
    found: dict[Family, Loads] = {}
    for backend in service.backends:
        family, name = family_of(backend.address), str(backend)
        for port, port_name in zip(service.ports, port_names(service.ports), strict=True):
            key = ForwardingKey(service.name, port_name, port.protocol, family)
            number = backend.port_for(port)
            weight = None if number is None else weights.get((key, backend.address, number))
            if number is None or weight is None:
                continue
            loads = found.setdefault(family, {})
            so_far = loads[name].flows if name in loads else 0
            live = flows.get(BackendKey(key, backend.address, number), 0)
            loads[name] = BackendLoad(float(weight / factors.get(name, 1)), so_far + live)
    yield from found.items()
