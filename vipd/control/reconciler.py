"""Makes the kernel equal to what the sources declare. `_reconcile` shows the whole path of the data.

The reconciler is level-triggered: a step always covers the whole snapshot, but its cost depends on what
changed. Sources and the API request steps. A step handles all requests made before it begins. After a failure
the reconciler retries with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from math import inf

from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.catalog import MergeResult
from vipd.control.changes import Changes, Dirty, LastProgrammed, Selector, ServiceForwardings
from vipd.control.difference import Difference, WriteLock
from vipd.control.host import HostProvider
from vipd.control.programming import FlowResets, Forwardings, Programming, ServiceQuarantine
from vipd.control.progress import Progress
from vipd.control.registrations import Registrations
from vipd.control.selection import SelectionPolicy
from vipd.control.service_log import Causes, log_changes
from vipd.control.service_status import Readiness, TwofoldAddresses, serving_by_owner
from vipd.control.snapshot import Snapshot
from vipd.control.trouble_log import (
    log_applied,
    log_faults,
    log_problems,
    log_readmitted,
    log_recovered,
)
from vipd.control.write_order import Backlog, WriteOrder
from vipd.dataplane.base import ApplyError, Dataplane
from vipd.dataplane.conntrack.stale import Destination
from vipd.declaration.problems import PLEASE_REPORT, Problem, internal_error
from vipd.host.batches import BATCH_SIZE, in_batches
from vipd.host.gc_control import gc_paused
from vipd.host.observer import Observers
from vipd.host.systemd.fields import Event, fields
from vipd.model.backend_status import BackendStatuses
from vipd.model.claim_limits import CLI
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Service
from vipd.resolver.resolver import Resolver
from vipd.sources.base import Source

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 30.0

RETRY_UNITS_SECONDS = 30.0
"""Retry interval of a unit that cannot be merged: one retry may cost several merges of all units."""

LARGE = 1000
"""Number of dirty services above which a step pauses Python's garbage collector."""


@dataclass(frozen=True, slots=True)
class ReconcilerDependencies:
    """The objects that a reconciler uses, besides sources, dataplane and host."""

    statuses: BackendStatusTracker = field(default_factory=BackendStatusTracker)
    """The status of backends, which results from health checks and operators' overrides."""
    registrations: Callable[[], Registrations] = dict
    """Backends that registered themselves."""
    resolver: Resolver | None = None
    """Looks up the names of backends; None: they stand for no backend."""
    resets: Callable[[], Collection[Destination]] = tuple
    """Removed frontends whose clients get a reset."""
    observers: Observers = field(default_factory=Observers)


class Reconciler:
    """Owns the snapshot and the only loop that writes to the kernel."""

    def __init__(
        self,
        sources: Sequence[Source],
        dataplane: Dataplane,
        host: HostProvider,
        clock: Callable[[], datetime],
        dependencies: ReconcilerDependencies | None = None,
    ) -> None:
        dependencies = dependencies or ReconcilerDependencies()
        self._dataplane, self._host, self.clock = dataplane, host, clock
        self._statuses, self.observers = dependencies.statuses, dependencies.observers
        self.containment = self.observers.containment
        """Catches and reports unexpected exceptions that belong to no unit and no service."""
        self._snapshot = Snapshot(
            sources, dependencies.registrations, self.containment, dependencies.resolver
        )
        self.resolver = dependencies.resolver
        heartbeat = self.observers.heartbeat
        self._quarantine = ServiceQuarantine(lambda: asyncio.get_running_loop().time())
        self._programming = Programming(dataplane, self._quarantine, heartbeat)
        self._selector = Selector(
            self._snapshot, self._statuses, self._quarantine, self._programming.withheld, heartbeat
        )
        self._flow_resets = FlowResets(dependencies.resets)
        self._dirty = Dirty()
        self._write_order, self._backlog = WriteOrder(), Backlog()
        self._programmed_of_postponed: dict[ForwardingKey, Forwarding | None] = {}
        """For forwardings left for a later step: the versions that the dataplane has now."""
        self._policy: SelectionPolicy | None = None
        self._requested = asyncio.Event()
        self._step_done = asyncio.Condition()
        self._lock = WriteLock()
        self.difference = Difference(dataplane, self._lock)
        """Computes what a step would write now."""
        self.causes = Causes()
        """Who requested a change of a service. The code that changes a source notes it."""
        self._source_faults: Mapping[str, tuple[str, ...]] = {}
        self._host_warnings: tuple[str, ...] = ()
        self.progress = Progress()
        self.services: dict[str, Service] = {}
        self.serving: Counter[str] = Counter()
        """Number of serving services of each unit."""
        self.forwardings: dict[str, ServiceForwardings] = {}
        self.readiness = Readiness()
        self.problems: Mapping[str, tuple[Problem, ...]] = {}

    @property
    def host_addresses(self) -> frozenset[str]:
        """This host's addresses as of the last step."""
        return self._policy.host.addresses if self._policy else frozenset()

    def twofold_addresses(self, service: Service) -> TwofoldAddresses:
        """The addresses of a service and its backends that are something else, too."""
        assigned = self._host.assigned_vips()
        of_host = [address for address in service.all_addresses() if address in assigned] if assigned else ()
        return TwofoldAddresses(of_host, self._snapshot.backends_at_vips(service))

    def ignored(self, service: str) -> tuple[Problem, ...]:
        """Why the service does not use backends that registered themselves for it, or that its names resolve
        to."""
        return self._snapshot.ignored(service)

    def backend_statuses(self, service: Service) -> BackendStatuses:
        """The status of those backends of a service whose status differs from the declared one."""
        return self._statuses.backend_statuses(service)

    def request_sync(self) -> int:
        """Request a step; returns the generation for `wait_synced`."""
        self._requested.set()
        return self.progress.request(self.clock())

    async def wait_synced(
        self, generation: int, timeout: float, services: Collection[str] | None = None
    ) -> bool:
        """Wait until a step has attempted a request about these services (None: about all). Returns True if
        the kernel is then as requested; False if not, after the timeout, and when vipd stops."""
        progress, names = self.progress, None if services is None else frozenset(services)

        def later() -> bool:
            return bool(progress.postponed if names is None else progress.postponed & names)

        def over() -> bool:
            attempted = progress.attempted >= generation and (not later() or bool(progress.fault))
            return progress.stopping or attempted

        async with self._step_done:
            try:
                await asyncio.wait_for(self._step_done.wait_for(over), timeout=timeout)
            except TimeoutError:
                return False
        families = frozenset[Family]().union(*map(self._families_of, names or ()))
        return (progress.applied >= generation or progress.has_written(generation, families)) and not later()

    async def stop_waiting(self) -> None:
        """End every `wait_synced`, because vipd stops."""
        self.progress.stopping = True
        async with self._step_done:
            self._step_done.notify_all()

    async def run(self) -> None:
        """Run a step whenever one is requested, for ever; after a failure also without a request."""
        failed_in_row = 0
        while True:
            pause = min(FIRST_RETRY_SECONDS * 2 ** max(failed_in_row - 1, 0), MAX_RETRY_SECONDS)
            await self._requested_within(pause if failed_in_row else self._pause())
            failed_in_row = 0 if await self.step() else min(failed_in_row + 1, 10)

    def _pause(self) -> float:
        """Seconds until the next retry of services and units in which an unexpected exception occurred."""
        pause = self._quarantine.pause()
        pause = inf if pause is None else pause
        return min(pause, RETRY_UNITS_SECONDS) if self._snapshot.internal_errors else pause

    async def _requested_within(self, seconds: float) -> None:
        """Wait at most this long for a request, and send heartbeats meanwhile."""
        while seconds > 0:
            self.observers.heartbeat()
            part = min(seconds, self.observers.heartbeat_seconds)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it loses a cancellation that arrives together with the event.
                async with asyncio.timeout(part):
                    await self._requested.wait()
                return
            seconds -= part

    async def step(self) -> bool:
        """Write all changes requested so far to the kernel, once. Returns whether all of it succeeded."""
        async with self._lock:
            self._requested.clear()
            generation, began = self.progress.begin(), self.clock()
            try:
                with contextlib.ExitStack() as work:
                    await self._reconcile(generation, began, work)
            except ApplyError as error:
                self.progress.behind = error.families
                self._failed(generation, str(error))
            except Exception as error:
                self._snapshot.invalidate()
                self._dirty.declared.update(dict.fromkeys((*self.services, *self._backlog.clear())))
                self.progress.behind = frozenset(Family)
                self._failed(generation, f"{internal_error(error, 'reconciling')}; {PLEASE_REPORT}", error)
            self.observers.stepped()
        async with self._step_done:
            self._step_done.notify_all()
        return not self.progress.fault

    async def _reconcile(self, generation: int, began: datetime, work: contextlib.ExitStack) -> None:
        """Sources -> catalog -> selection -> dataplane -> kernel."""
        self._quarantine.begin()
        policy = await self._host.policy()
        merged = await self._snapshot.merge(self._host.claims(), self._host.check_problems)
        self._dirty.declared.update(dict.fromkeys(await self._due(merged.dirty, policy)))
        self._dirty.statuses.update(merged.taken)
        await self._log_problems(merged)
        if len(self._dirty.declared) > LARGE or self._backlog.services:
            work.enter_context(gc_paused())
        last_programmed = LastProgrammed(self.services, self.forwardings, self._policy)
        changes = await self._selector.select(policy, self._dirty, last_programmed)
        await self._yield_to_loop()
        await self._update_dataplane(changes)
        await self._yield_to_loop()
        with self.containment.contain("host", "preparing it"):
            self._host_warnings = await self._host.prepare()
        await self._yield_to_loop()
        try:
            wrote = await self._programming.write()
        except ApplyError as error:
            self._succeeded_in_part(frozenset(Family) - error.families, changes)
            raise
        self._quarantine.release_recovered(changes.attempted)
        self.observers.applied(wrote)
        self._succeeded(generation, began, wrote)

    async def _due(self, changed: Collection[str], policy: SelectionPolicy) -> Collection[str]:
        """The services to select in this step, of those that have changed now or before."""
        if not self.progress.applied:  # the first load is not divided
            return changed
        if policy != self._policy:  # all services are selected anew
            return (*changed, *self._backlog.clear())
        divide = partial(self._backlog.divide, changed, self.services.get, self._declared, self._requester)
        return await asyncio.to_thread(divide) if len(changed) > LARGE else divide()

    def _requester(self, service: Service) -> str:
        """Whose share of a step a service's change takes: of the store's, that of the user who changed it."""
        author = service.origin.author
        return self.causes.of(service.name) or author if author == CLI else author

    def _declared(self, name: str) -> Service | None:
        """A service as it is declared now; after an exception, with which the selection deals, as it was."""
        try:
            return self._snapshot.service(name)
        except Exception:
            return self.services.get(name)

    async def _yield_to_loop(self) -> None:
        """Send a heartbeat, and let the event loop run other tasks, between two parts of a step. A part may
        take seconds with a hundred thousand services."""
        self.observers.heartbeat()
        await asyncio.sleep(0)

    async def exclusive(self, work: Callable[[], Awaitable[bool]]) -> bool:
        """Run work on the dataplane while no step runs; returns its result."""
        async with self._lock:
            return await work()

    async def collect_garbage(self) -> None:
        """Make the dataplane delete what earlier changes left unused. After a failure, the next step reads
        the kernel again, and this method raises the exception: ApplyError, or an unexpected one."""
        async with self._lock:
            try:
                await self._dataplane.collect_garbage()
            except Exception:
                self._dataplane.invalidate_all()
                self.request_sync()
                raise

    async def _log_problems(self, merged: MergeResult) -> None:
        """Log new problems of declarations and sources, and those that ended."""
        faults = self._snapshot.faults()
        before, self.problems = self.problems, merged.problems
        await log_problems(before, merged.problems)
        log_faults(self._source_faults, faults)
        self._source_faults = faults

    async def _update_dataplane(self, changes: Changes) -> None:
        """Pass the changes to the dataplane, then record that it has them."""
        if changes.policy != self._policy:
            await self._dataplane.host_changed(changes.policy.host.addresses)
            self.observers.host_changed(changes.policy.host.addresses)
        self._dirty.in_doubt |= changes.forwardings.keys()
        later: Mapping[ForwardingKey, Forwarding | None] = {}
        if self.progress.applied:  # the first load is not divided
            later = await self._postponed(changes.forwardings)
        now = {key: f for key, f in changes.forwardings.items() if key not in later}
        async for part in in_batches(now, weight=_weight):
            with self.containment.contain("dataplane", "preparing changed services"):
                await self._dataplane.prepare(part)
            self._programming.record_changes(part, self._programmed)
            self._programming.update(part)
            self.observers.heartbeat()
        # All in one batch, except for the first load, so that a frontend that moves between services is never
        # missing.
        async for part in in_batches(now, len(now) if self.services else BATCH_SIZE):
            with self.containment.contain("host", "taking changed services"):
                self._host.services_changed(part)
            self.observers.services_changed(part)
            self.observers.heartbeat()
        if resets := self._flow_resets.changes():
            self._programming.record_changes(resets, self._programmed)
            self._programming.update(resets)
        async for selected in in_batches(changes.selected):
            for name, forwardings in selected.items():
                service, statuses = self._snapshot.service(name), changes.statuses.get(name, {})
                twofold = self.twofold_addresses(service) if service else TwofoldAddresses()
                self.readiness.update(name, service, forwardings, statuses, twofold)
            self.observers.heartbeat()
        self._programmed_of_postponed = dict(later)
        self._record_programmed(changes)
        self._dirty = Dirty(in_doubt=set(later))

    def _programmed(self, key: ForwardingKey) -> Forwarding | None:
        """The forwarding that the dataplane has now."""
        if key in self._programmed_of_postponed:
            return self._programmed_of_postponed[key]
        return next((f for f in self.forwardings.get(key.service, ()) if f.key == key), None)

    async def _postponed(self, changes: Forwardings) -> Forwardings:
        """The changes to leave for a later step, as the dataplane has them; many are divided in a thread."""
        order = self._write_order.postponed
        if len(changes) > LARGE:
            return await asyncio.to_thread(order, changes, self._programmed, self._author)
        return order(changes, self._programmed, self._author)

    def _author(self, service: str) -> str:
        declared = self._snapshot.service(service)
        return declared.origin.author if declared else ""

    def _record_programmed(self, changes: Changes) -> None:
        before = {name: self.services[name] for name in changes.services if name in self.services}
        after = {name: service for name, service in changes.services.items() if service is not None}
        causes = self.causes.take(self._backlog.services)
        if self._policy is not None:  # the log contains only the number of services of the first load
            with self.containment.contain("log", "logging changed services"):
                log_changes(before, after, [n for n in changes.selected if n in after], causes)
        # A new dictionary, because other tasks may iterate over the old one.
        services = dict(self.services) if changes.services else self.services
        services.update(after)
        for name in before.keys() - after.keys():
            del services[name]
            self.forwardings.pop(name, None)
            self.readiness.update(name, None)
        self.forwardings.update(changes.selected)
        self._policy, self.services = changes.policy, services
        self._count_serving(before.values(), after.values())

    def _count_serving(self, before: Iterable[Service], after: Iterable[Service]) -> None:
        changes = serving_by_owner(after)
        changes.subtract(serving_by_owner(before))
        for owner, change in changes.items():
            self.serving[owner] += change
            if not self.serving[owner]:
                del self.serving[owner]

    def _succeeded(self, generation: int, began: datetime, wrote: bool) -> None:
        progress, now = self.progress, self.clock()
        if wrote or not progress.applied:
            progress.last_apply, progress.last_seconds = now, (now - began).total_seconds()
            progress.applies += wrote
            log_applied(len(self.services), progress.last_seconds, first=not progress.applied)
        if progress.fault:
            log_recovered(progress.fault)
        self._take_quarantined()
        progress.succeed(generation)
        self._backlog.stepped((now - began).total_seconds())
        waiting = frozenset(
            (*self._backlog.services, *(key.service for key in self._programmed_of_postponed))
        )
        progress.postpone(waiting, self.clock())
        if progress.postponed:
            self._requested.set()

    def _succeeded_in_part(self, families: frozenset[Family], changes: Changes) -> None:
        """The step has failed, but the kernel's rules of these families are as requested: whatever follows a
        write follows it for them."""
        if not families:
            return
        self.progress.begun |= families
        self._quarantine.release_recovered(
            [name for name in changes.attempted if self._families_of(name) <= families]
        )
        self._take_quarantined()
        self.observers.applied(True, families)
        if self._programmed_of_postponed or self._backlog.services:
            self._requested.set()

    def _families_of(self, service: str) -> frozenset[Family]:
        return frozenset(forwarding.key.family for forwarding in self.forwardings.get(service, ()))

    def _take_quarantined(self) -> None:
        """Take the dataplane's quarantined services and warnings into the progress."""
        progress = self.progress
        refused = {key.service: why for key, why in self._dataplane.quarantined().items()}
        self._quarantine.refuse(refused)
        quarantined = {**refused, **self._quarantine.reasons}
        log_readmitted(progress.quarantined, quarantined, self.services)
        progress.quarantined = quarantined
        left_out = self._snapshot.warnings()
        progress.warnings = (*left_out, *self._host_warnings, *self._dataplane.warnings())

    def _failed(self, generation: int, fault: str, error: Exception | None = None) -> None:
        """Record and log that a step failed; `error`: the exception, if it was unexpected."""
        if fault != self.progress.fault:
            extra = fields(Event.APPLY_FAILED, cause="vipd" if error else "kernel", reason=fault)
            log.error("%s", fault, extra=extra, exc_info=error)
        self.progress.fault, self.progress.attempted = fault, generation
        self.progress.failures += 1


def _weight(forwarding: Forwarding | None) -> int:
    """The work that a forwarding causes; one of ten endpoints adds 1."""
    return 1 if forwarding is None else 1 + forwarding.compile_cost() // 10
