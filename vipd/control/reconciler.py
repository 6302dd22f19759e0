"""Makes the kernel equal to what the sources declare. The whole path of data is in `step`.

Level-triggered: a step always means the whole snapshot, and costs what changed. It is woken by sources and by
the API, gathers whatever came meanwhile, and after a failure tries again with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import TypeVar

from vipd.control.catalog import Merged
from vipd.control.causes import Causes
from vipd.control.flow_resets import FlowResets
from vipd.control.heartbeat import Heartbeat
from vipd.control.programming import Programming
from vipd.control.progress import Progress
from vipd.control.readiness import Readiness
from vipd.control.reconciler_partners import AllServing, BackendStatusSource, Follower, HostProvider
from vipd.control.registrations import Registrations
from vipd.control.selection import SelectionPolicy, choose
from vipd.control.service_log import log_changes
from vipd.control.service_quarantine import ServiceQuarantine
from vipd.control.shared_run import SharedRun
from vipd.control.snapshot import Snapshot
from vipd.control.trouble_log import (
    log_applied,
    log_faults,
    log_problems,
    log_readmitted,
    log_recovered,
)
from vipd.control.write_order import WriteOrder
from vipd.dataplane.base import ApplyError, Dataplane
from vipd.declaration.problems import PLEASE_REPORT, Problem, internal_error
from vipd.declaration.service_size import networks_of_service
from vipd.host.batches import AT_ONCE, in_parts
from vipd.host.containment import Containment
from vipd.host.gc_control import loading
from vipd.host.systemd.fields import Event, fields
from vipd.model.backend_status import BackendStatuses
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.limits import size_of
from vipd.model.service import Service
from vipd.sources.base import Source

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 30.0

RETRY_UNITS_SECONDS = 30.0
"""A unit that cannot be merged is tried again so often: that may cost a merge of all units, some times
over."""
UNDISTURBED_TRIES = 3
"""How often a difference is looked for beside the steps. The last time they wait for it."""

Chosen = tuple[Forwarding, ...]
K = TypeVar("K")
V = TypeVar("V")

LARGE = 1000
"""Services touched by a step above which it is a load, and endpoints of one service above which it is chosen
for in a thread."""


@dataclass(slots=True)
class Selection:
    """What a step found to differ from the one before."""

    policy: SelectionPolicy
    services: dict[str, Service | None] = field(default_factory=dict)
    """Those that are new or other than before; None: gone."""
    forwardings: dict[str, tuple[Forwarding, ...]] = field(default_factory=dict)
    """Those of each service that was chosen for anew."""
    changes: dict[ForwardingKey, Forwarding | None] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    """Services whose backends may stand otherwise than before; this is taken up here."""
    tried: set[str] = field(default_factory=set)
    """Services that were chosen for, or are gone."""


class Reconciler:
    """Owns the snapshot and the only loop that writes to the kernel."""

    def __init__(
        self,
        sources: Sequence[Source],
        dataplane: Dataplane,
        foreign_chains: HostProvider,
        clock: Callable[[], datetime],
        judges: BackendStatusSource | None = None,
        registrations: Callable[[], Registrations] = dict,
    ) -> None:
        self._dataplane = dataplane
        self._judges = judges or AllServing()
        self.containment = Containment()
        """Exceptions that nobody expected, in what belongs to no unit and no service."""
        self._snapshot = Snapshot(sources, registrations, self.containment)
        self._quarantine = ServiceQuarantine()
        self.flow_resets = FlowResets()
        self._programming = Programming(dataplane, self._hold, lambda: self.pulse.beat())
        self._moved: set[str] = set()
        """Services whose backends may stand otherwise since they were last chosen for."""
        self._unsure: set[ForwardingKey] = set()
        """What may have been handed over only in part, or is left for a later step."""
        self._write_order = WriteOrder()
        self._given: dict[ForwardingKey, Forwarding | None] = {}
        """What the dataplane has of forwardings that are left for a later step."""
        self._surroundings, self.clock = foreign_chains, clock
        self._policy: SelectionPolicy | None = None
        self._woken = asyncio.Event()
        self._stepped = asyncio.Condition()
        self._one_at_a_time = asyncio.Lock()
        self._turns = 0
        """Counts those who had the lock in order to write."""
        self._differences = SharedRun(self._find_difference)
        self.followers: list[Follower] = []
        self.after_step: list[Callable[[], None]] = []
        """Called after each step, good or bad. They only look."""
        self.causes = Causes()
        """Whoever lets a source hold something else notes here who asked for it."""
        self._source_faults: Mapping[str, tuple[str, ...]] = {}
        self._host_warnings: tuple[str, ...] = ()
        self.progress = Progress()
        self.pulse = Heartbeat()
        """Beats while the loop is alive. Another one may take its place before `run`."""
        self.services: dict[str, Service] = {}
        self.forwardings: dict[str, tuple[Forwarding, ...]] = {}
        self.readiness = Readiness()
        self.problems: Mapping[str, tuple[Problem, ...]] = {}

    @property
    def host_addresses(self) -> frozenset[str]:
        """This host's addresses as of the last step."""
        return self._policy.host.addresses if self._policy else frozenset()

    def ignored(self, service: str) -> tuple[Problem, ...]:
        """Why backends that registered themselves for a service do not take part in it."""
        return self._snapshot.ignored(service)

    def backend_statuses(self, service: Service) -> BackendStatuses:
        """How a service's backends stand beside their declaration."""
        return self._judges.backend_statuses(service)

    def wake(self) -> int:
        """Ask for a step; the number returned is for `settled`."""
        self._woken.set()
        return self.progress.wish(self.clock())

    async def settled(self, wish: int, timeout: float, services: Collection[str] | None = None) -> bool:
        """Wait until a step took up a wish that is about these services (None: about all): True when the
        kernel is as wished, else False, also when vipd stops."""
        progress, names = self.progress, None if services is None else frozenset(services)

        def later() -> bool:
            return bool(progress.later if names is None else progress.later & names)

        def taken_up() -> bool:
            return progress.stopping or (progress.tried >= wish and (not later() or bool(progress.fault)))

        async with self._stepped:
            try:
                await asyncio.wait_for(self._stepped.wait_for(taken_up), timeout=timeout)
            except TimeoutError:
                return False
        return progress.done >= wish and not later()

    async def stop_waiting(self) -> None:
        """Nobody is to wait for a step any more: vipd stops."""
        self.progress.stopping = True
        async with self._stepped:
            self._stepped.notify_all()

    async def run(self) -> None:
        """Step when woken, for ever; after a failure also without being woken."""
        failed_in_row = 0
        while True:
            pause = min(FIRST_RETRY_SECONDS * 2 ** max(failed_in_row - 1, 0), LONGEST_RETRY_SECONDS)
            await self._woken_within(pause if failed_in_row else self._pause())
            failed_in_row = 0 if await self.step() else min(failed_in_row + 1, 10)

    def _pause(self) -> float:
        """Seconds until what is held because of an exception that nobody expected is to be tried again."""
        at = self._quarantine.next_retry()
        pause = inf if at is None else max(at - self._monotonic(), 0.0)
        return min(pause, RETRY_UNITS_SECONDS) if self._snapshot.internal_errors else pause

    def _monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def _hold(self, service: str, doing: str, error: Exception) -> None:
        """A service is quarantined because of an exception that nobody expected."""
        self._quarantine.hold(service, doing, error, self._monotonic())

    async def _in_parts(
        self, items: Mapping[K, V], size: int = AT_ONCE, weight: Callable[[V], int] = lambda _: 1
    ) -> AsyncIterator[Mapping[K, V]]:
        """Large work in parts, each of them a sign of life."""
        async for part in in_parts(items, size, weight):
            yield part
            self.pulse.beat()

    async def _woken_within(self, seconds: float) -> None:
        """Wait to be woken, for so long at most. The waiting itself is a sign of life."""
        while seconds > 0:
            self.pulse.beat()
            part = min(seconds, self.pulse.every)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the event.
                async with asyncio.timeout(part):
                    await self._woken.wait()
                return
            seconds -= part

    async def step(self) -> bool:
        """Sources -> catalog -> selection -> dataplane -> kernel, once. Returns whether all of it worked."""
        async with self._one_at_a_time:
            self._turns += 1
            self._woken.clear()
            wish, began = self.progress.take_up(), self.clock()
            try:
                with contextlib.ExitStack() as work:
                    await self._make_it_so(wish, began, work)
            except ApplyError as error:
                self._failed(wish, str(error))
            except Exception as error:
                self._snapshot.doubt(self.services)
                self._failed(wish, f"{internal_error(error, 'reconciling')}; {PLEASE_REPORT}", error)
            for look in self.after_step:
                with self.containment.around(_name_of(look), "looking at a step"):
                    look()
        async with self._stepped:
            self._stepped.notify_all()
        return not self.progress.fault

    async def _make_it_so(self, wish: int, began: datetime, work: contextlib.ExitStack) -> None:
        self._quarantine.begin()
        policy, host = await self._surroundings.policy(), self._surroundings
        if self._snapshot.internal_errors:
            self._snapshot.retry()
        await self._tell(await self._snapshot.look(host.claims(), host.check_problems))
        if len(self._snapshot.touched) > LARGE:
            work.enter_context(loading())
        selection = await self._select(policy)
        await self._yield_to_loop()
        await self._hand_over(selection)
        await self._yield_to_loop()
        with self.containment.around("host", "preparing it"):
            self._host_warnings = await host.prepare()
        await self._yield_to_loop()
        wrote = await self._programming.write()
        self._quarantine.settle(selection.tried)
        self._succeeded(wish, began, wrote)

    async def _yield_to_loop(self) -> None:
        """A part of a step is done, which takes seconds with a hundred thousand services: the event loop
        gets its turn, and that is a sign of life."""
        self.pulse.beat()
        await asyncio.sleep(0)

    async def difference(self) -> str:
        """What a step would write now, by a reading of the kernel that disturbs nothing; empty when in sync.
        Those who ask at the same time share a run."""
        return await self._differences.result()

    async def _find_difference(self) -> str:
        for _ in range(UNDISTURBED_TRIES):
            async with self._one_at_a_time:
                turn = self._turns
            surveyed = await self._dataplane.survey()  # seconds, if there are many rules: steps go on
            async with self._one_at_a_time:
                if turn == self._turns:
                    return await self._told(surveyed)
        async with self._one_at_a_time:
            return await self._told(await self._dataplane.survey())

    async def _told(self, surveyed: object) -> str:
        return await asyncio.to_thread(str, await self._dataplane.difference(surveyed))

    async def between_steps(self, work: Callable[[], Awaitable[bool]]) -> bool:
        """Do something to the dataplane while no step does; returns what it returned."""
        async with self._one_at_a_time:
            self._turns += 1
            return await work()

    async def sweep(self) -> None:
        """Have the dataplane clear away what changes left behind. A failure means a look at the kernel, and
        is raised: ApplyError, unless nobody expected it."""
        async with self._one_at_a_time:
            self._turns += 1
            try:
                await self._dataplane.sweep()
            except Exception:
                self._dataplane.forget()
                self.wake()
                raise

    async def _tell(self, merged: Merged) -> None:
        """Have the log say what is wrong with declarations and sources, or is not any more."""
        faults = self._snapshot.faults()
        before, self.problems = self.problems, merged.problems
        await log_problems(before, merged.problems)
        log_faults(self._source_faults, faults)
        self._source_faults = faults

    async def _select(self, policy: SelectionPolicy) -> Selection:
        """What differs from the last step. Changes nothing here yet, so that a failure loses nothing."""
        touched, same_policy = self._snapshot.touched, policy == self._policy
        again = self._quarantine.due(self._monotonic())
        async for part in self._in_parts(dict.fromkeys((*touched, *again))):
            self._follow(part)
        moved = self._judges.moved()
        self._moved |= moved
        self._judges.taken_up(moved)  # what moves from here on is for the next step
        selection = Selection(policy, moved=set(self._moved))
        names = dict.fromkeys((*touched, *self._moved, *again), None)
        names.update({} if same_policy else dict.fromkeys(self._snapshot.names))
        async for part in self._in_parts(names):
            for name in part:
                anew = not same_policy or name in self._moved or name in again
                self._consider_alone(name, selection, anew, await self._chosen_aside(name, policy))
        for key in self._unsure - selection.changes.keys():
            known = selection.forwardings.get(key.service) or self.forwardings.get(key.service, ())
            selection.changes[key] = next((f for f in known if f.key == key), None)
        return selection

    def _follow(self, names: Iterable[str]) -> None:
        """Have these services' backends checked as they are declared now."""
        for name in names:
            try:
                self._judges.follow({name: self._snapshot.service(name)})
            except Exception as error:
                self._hold(name, "following its backends", error)

    async def _chosen_aside(self, name: str, policy: SelectionPolicy) -> Chosen | None:
        """What is chosen for a service that is so large that this is done beside the event loop; None for
        others. An exception is left to whoever chooses again."""
        with contextlib.suppress(Exception):
            service = self._snapshot.service(name)
            if service is not None and size_of(service) + networks_of_service(service) > LARGE:
                backend_statuses = dict(self._judges.backend_statuses(service))
                return await asyncio.to_thread(choose, service, policy, backend_statuses)
        return None

    def _consider_alone(self, name: str, selection: Selection, anew: bool, chosen: Chosen | None) -> None:
        """Choose for a service. An exception that nobody expected is its own: what it has stays."""
        selection.tried.add(name)
        try:
            self._consider(name, selection, anew, chosen)
            if anew or name in selection.services:
                selection.changes.update(
                    {k: f for k, f in self._programming.withheld(name).items() if k not in selection.changes}
                )
        except Exception as error:
            selection.forwardings[name] = self.forwardings.get(name, ())
            self._hold(name, "selecting its backends", error)

    def _consider(self, name: str, selection: Selection, anew: bool, chosen: Chosen | None) -> None:
        """Choose for a service, unless it says what it said before and nothing else asks for it."""
        service, before = self._snapshot.service(name), self.services.get(name)
        if service is None:
            if before is not None:
                selection.services[name] = None
                selection.changes.update({f.key: None for f in self.forwardings[name]})
            return
        if service is not before:
            selection.services[name] = service
        if not anew and before == service:  # it has only moved to another line
            return
        old = {f.key: f for f in self.forwardings.get(name, ())}
        new = chosen
        if new is None:
            new = choose(service, selection.policy, self._judges.backend_statuses(service))
        selection.forwardings[name] = new
        selection.changes.update(dict.fromkeys(old.keys() - {f.key for f in new}))
        selection.changes.update({f.key: f for f in new if old.get(f.key) != f})

    async def _hand_over(self, selection: Selection) -> None:
        """Give the dataplane what differs, then remember it."""
        if selection.policy != self._policy:
            self._host_changed(selection.policy.host.addresses)
        self._unsure |= selection.changes.keys()
        # At the start all of it is wanted at once.
        later = self._write_order.postponed(selection.changes, self._forwarding) if self.progress.done else {}
        changes = {key: f for key, f in selection.changes.items() if key not in later}
        async for part in self._in_parts(changes, weight=_weight):
            with self.containment.around("dataplane", "preparing changed services"):
                await self._dataplane.prepare(part)
            self._programming.update(part, self._forwarding)
        # All at once, but for the first load: what moves from one service to another is never missing there.
        parts = self._in_parts(changes, len(changes) if self.services else AT_ONCE)
        async for part in parts:
            with self.containment.around("host", "taking changed services"):
                self._surroundings.update(part)
            for follower in self.followers:
                with self.containment.around(_name_of(follower), "taking changed services"):
                    follower.update(part)
        self._programming.update(self.flow_resets.changes(), self._forwarding)
        async for chosen in self._in_parts(selection.forwardings):
            for name, forwardings in chosen.items():
                self.readiness.update(name, self._snapshot.service(name), forwardings)
        self._given = dict(later)
        self._remember(selection)
        self._unsure = set(later)

    def _host_changed(self, addresses: frozenset[str]) -> None:
        self._dataplane.host_changed(addresses)
        for follower in self.followers:
            with self.containment.around(_name_of(follower), "taking this host's addresses"):
                follower.host_changed(addresses)

    def _forwarding(self, key: ForwardingKey) -> Forwarding | None:
        """What the dataplane was given last."""
        if key in self._given:
            return self._given[key]
        return next((f for f in self.forwardings.get(key.service, ()) if f.key == key), None)

    def _remember(self, selection: Selection) -> None:
        before = {name: self.services[name] for name in selection.services if name in self.services}
        after = {name: service for name, service in selection.services.items() if service is not None}
        causes = self.causes.take()
        if self._policy is not None:  # of the first load the log tells the number alone
            with self.containment.around("log", "telling of changed services"):
                log_changes(before, after, [n for n in selection.forwardings if n in after], causes)
        # A new one, so that whoever is going through the old one is not disturbed.
        services = dict(self.services) if selection.services else self.services
        services.update(after)
        for name in before.keys() - after.keys():
            del services[name]
            self.forwardings.pop(name, None)
            self.readiness.update(name, None)
        self.forwardings.update(selection.forwardings)
        self._policy, self.services = selection.policy, services
        self._snapshot.taken_up()
        self._moved -= selection.moved

    def _succeeded(self, wish: int, began: datetime, wrote: bool) -> None:
        progress, now = self.progress, self.clock()
        if wrote or not progress.done:
            progress.last_apply, progress.last_seconds = now, (now - began).total_seconds()
            progress.applies += wrote
            log_applied(len(self.services), progress.last_seconds, first=not progress.done)
        if progress.fault:
            log_recovered(progress.fault)
        quarantined = {key.service: why for key, why in self._dataplane.quarantined().items()}
        quarantined.update(self._quarantine.reasons)
        log_readmitted(progress.quarantined, quarantined, self.services)
        progress.quarantined = quarantined
        left_out = self._snapshot.warnings()
        progress.warnings = (*left_out, *self._host_warnings, *self._dataplane.warnings())
        for follower in self.followers:
            with self.containment.around(_name_of(follower), "hearing of written rules"):
                follower.applied(wrote)
        progress.fulfilled(wish)
        progress.postponed(frozenset(key.service for key in self._given), self.clock())
        if progress.later:
            self._woken.set()

    def _failed(self, wish: int, fault: str, error: Exception | None = None) -> None:
        """A step has failed; `error`: in a way that nobody expected."""
        if fault != self.progress.fault:
            extra = fields(Event.APPLY_FAILED, cause="vipd" if error else "kernel", reason=fault)
            log.error("%s", fault, extra=extra, exc_info=error)
        self.progress.fault, self.progress.tried = fault, wish
        self.progress.failures += 1


def _weight(forwarding: Forwarding | None) -> int:
    """How much work a forwarding is, in such as have ten endpoints at most."""
    return 1 if forwarding is None else 1 + forwarding.work() // 10


def _name_of(part: object) -> str:
    """What a part of vipd is called in status: its class, or that of the method."""
    owner = getattr(part, "__self__", part)
    return type(owner).__name__
