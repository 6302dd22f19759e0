"""Makes the kernel equal to what the sources declare. The whole path of data is in `step`.

Level-triggered: a step always means the whole snapshot, and costs what changed. It is woken by sources and by
the API, gathers whatever came meanwhile, and after a failure tries again with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Protocol

from vipd.admission import AddressPolicy, admit_unit
from vipd.catalog import Claims, Merged, Unit, merge
from vipd.dataplane.base import ApplyError, Dataplane
from vipd.declaration.problems import Problem
from vipd.model import Forwarding, ForwardingKey, Service
from vipd.observe.events.causes import Causes
from vipd.observe.service_log import tell_changes
from vipd.observe.trouble_log import (
    tell_applied,
    tell_faults,
    tell_problems,
    tell_readmitted,
    tell_recovered,
)
from vipd.progress import Progress
from vipd.pulse import Pulse
from vipd.registrations import Registrar, Registrations
from vipd.selection import SelectionPolicy, choose
from vipd.sources.base import Source
from vipd.standing import Standings
from vipd.systemd.fields import Event, fields

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 30.0


@dataclass(slots=True)
class Selection:
    """What a step found to differ from the one before."""

    policy: SelectionPolicy
    services: Mapping[str, Service]
    """The whole snapshot."""
    changes: dict[ForwardingKey, Forwarding | None] = field(default_factory=dict)
    forwardings: dict[str, tuple[Forwarding, ...]] = field(default_factory=dict)
    """Those of each service that was chosen for anew."""
    gone: list[str] = field(default_factory=list)
    """Services that are no more."""
    judged: frozenset[str] = frozenset()
    """Services whose backends may stand otherwise than before; this is taken up here."""


class Surroundings(Protocol):
    """This host, besides its rules."""

    async def policy(self) -> SelectionPolicy:
        """What settings and host say now; the host's addresses may have changed. Raises OSError."""

    def claims(self) -> AddressPolicy:
        """Which addresses services may claim."""

    async def prepare(self, forwardings: Collection[Forwarding]) -> tuple[str, ...]:
        """Make the host fit for all these forwardings; returns a warning for each thing that is amiss."""


class Judges(Protocol):
    """What says how backends stand beside their declaration."""

    def follow(self, services: Mapping[str, Service]) -> None:
        """These are all services now."""

    def moved(self) -> frozenset[str]:
        """Services whose backends may stand otherwise since `taken_up`."""

    def standings(self, service: Service) -> Standings:
        """How the service's backends stand now."""

    def taken_up(self, services: frozenset[str]) -> None:
        """What had moved of these services has been taken up."""


class Undisputed:
    """Every backend stands as declared."""

    def follow(self, services: Mapping[str, Service]) -> None:
        """Nothing depends on them."""

    def moved(self) -> frozenset[str]:
        """None, ever."""
        return frozenset()

    def standings(self, service: Service) -> Standings:
        """All as declared."""
        return {}

    def taken_up(self, services: frozenset[str]) -> None:
        """Nothing had moved."""


class Follower(Protocol):
    """Told what the dataplane is told, and when the kernel has it."""

    def host_changed(self, addresses: frozenset[str]) -> None:
        """This host's own addresses are these from now on."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Forwardings are new, or gone."""

    def applied(self, wrote: bool = True) -> None:
        """The kernel is as told; `wrote`: rules had to be written for that."""


class Reconciler:
    """Owns the snapshot and the only loop that writes to the kernel."""

    def __init__(
        self,
        sources: Sequence[Source],
        dataplane: Dataplane,
        surroundings: Surroundings,
        clock: Callable[[], datetime],
        judges: Judges | None = None,
        registrations: Callable[[], Registrations] = dict,
    ) -> None:
        self._sources, self._dataplane = sources, dataplane
        self._judges = judges or Undisputed()
        self._registrations, self._registrar = registrations, Registrar()
        self._surroundings, self.clock = surroundings, clock
        self._policy: SelectionPolicy | None = None
        self._woken = asyncio.Event()
        self._stepped = asyncio.Condition()
        self._one_at_a_time = asyncio.Lock()
        self.followers: list[Follower] = []
        self.after_step: list[Callable[[], None]] = []
        """Called after each step, good or bad. They only look; what raises here ends the loop."""
        self.causes = Causes()
        """Whoever lets a source hold something else notes here who asked for it."""
        self._claims = Claims()
        self._source_faults: Mapping[str, tuple[str, ...]] = {}
        self._host_warnings: tuple[str, ...] = ()
        self._admitted: dict[str, tuple[AddressPolicy, Unit, Unit]] = {}
        self.progress = Progress()
        self.pulse = Pulse()
        """Beats while the loop is alive. Another one may take its place before `run`."""
        self.services: Mapping[str, Service] = {}
        self.forwardings: dict[str, tuple[Forwarding, ...]] = {}
        self.problems: Mapping[str, tuple[Problem, ...]] = {}

    @property
    def host_addresses(self) -> frozenset[str]:
        """This host's addresses as of the last step."""
        return self._policy.host.addresses if self._policy else frozenset()

    def standings(self, service: Service) -> Standings:
        """How a service's backends stand beside their declaration."""
        return self._judges.standings(service)

    def wake(self) -> int:
        """Ask for a step; the number returned is for `settled`."""
        self._woken.set()
        return self.progress.wish(self.clock())

    async def settled(self, wish: int, timeout: float) -> bool:
        """Wait until a step took up a wish: True when the kernel is as wished, else False."""
        async with self._stepped:
            try:
                await asyncio.wait_for(
                    self._stepped.wait_for(lambda: self.progress.tried >= wish), timeout=timeout
                )
            except TimeoutError:
                return False
        return self.progress.done >= wish

    async def run(self) -> None:
        """Step when woken, for ever; after a failure also without being woken."""
        failed_in_row = 0
        while True:
            pause = min(FIRST_RETRY_SECONDS * 2 ** max(failed_in_row - 1, 0), LONGEST_RETRY_SECONDS)
            if not await self._woken_within(pause if failed_in_row else inf):
                log.info("trying again after: %s", self.progress.fault)
            failed_in_row = 0 if await self.step() else min(failed_in_row + 1, 10)

    async def _woken_within(self, seconds: float) -> bool:
        """Wait to be woken, for so long at most; whether it was. The waiting itself is a sign of life."""
        while seconds > 0:
            self.pulse.beat()
            part = min(seconds, self.pulse.every)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the event.
                async with asyncio.timeout(part):
                    await self._woken.wait()
                return True
            seconds -= part
        return False

    async def step(self) -> bool:
        """Sources -> catalog -> selection -> dataplane -> kernel, once. Returns whether all of it worked."""
        async with self._one_at_a_time:
            self._woken.clear()
            wish, began = self.progress.take_up(), self.clock()
            try:
                policy = await self._surroundings.policy()
                merged = merge(self._units(), self._claims)
                self._adopt(merged)
                services = self._registrar.extended(merged.services, self._registrations())
                self._hand_over(self._select(services, policy))
                self.pulse.beat()  # each of these takes seconds with ten thousand services
                await self._prepare_host()
                self.pulse.beat()
                plan = await self._dataplane.plan()
                self.pulse.beat()
                if plan:
                    await self._dataplane.apply(plan)
                self._succeeded(wish, began, wrote=bool(plan))
            except ApplyError as error:
                self._failed(wish, str(error))
            except Exception as error:
                log.exception("reconciling failed")
                self._failed(
                    wish, f"{type(error).__name__}: {error}; hint: this is a fault in vipd, see the log"
                )
            for look in self.after_step:
                look()
        async with self._stepped:
            self._stepped.notify_all()
        return not self.progress.fault

    async def difference(self) -> str:
        """What a step would write now, having looked at the kernel afresh; empty when in sync."""
        async with self._one_at_a_time:
            self._dataplane.forget()
            try:
                return str(await self._dataplane.plan())
            finally:
                self._dataplane.forget()  # a plan that is not applied leaves its difference for the next step

    async def between_steps(self, work: Callable[[], Awaitable[bool]]) -> bool:
        """Do something to the dataplane while no step does; returns what it returned."""
        async with self._one_at_a_time:
            return await work()

    async def sweep(self) -> None:
        """Have the dataplane clear away what changes left behind; a failure means a look at the kernel."""
        async with self._one_at_a_time:
            try:
                await self._dataplane.sweep()
            except ApplyError as error:
                log.warning("old rules cannot be deleted: %s", error)
                self._dataplane.forget()
                self.wake()

    def _units(self) -> dict[str, Unit]:
        """Every source's units, as far as they may serve. What has not changed is not looked at again."""
        policy, before, self._admitted = self._surroundings.claims(), self._admitted, {}
        for source in self._sources:
            for name, unit in source.units().items():
                known = before.get(name)
                fresh = known is None or known[0] != policy or not _same_unit(known[1], unit)
                # What was refused may have been mended on the host, such as a program that was missing.
                fresh = fresh or (known is not None and not known[2].candidate.ok)
                admitted = admit_unit(unit, policy) if fresh or known is None else known[2]
                self._admitted[name] = (policy, unit, admitted)
        return {name: admitted for name, (_, _, admitted) in self._admitted.items()}

    def _adopt(self, merged: Merged) -> None:
        """Tell the sources which of their versions serve, and the log what is wrong."""
        for source in self._sources:
            source.accepted(merged.chosen)
        faults = {source.location: source.faults() for source in self._sources}
        tell_problems(self.problems, merged.problems)
        tell_faults(self._source_faults, faults)
        self.problems, self._source_faults = merged.problems, faults

    def _select(self, services: Mapping[str, Service], policy: SelectionPolicy) -> Selection:
        """What differs from the last step. Touches nothing yet, so that a failure loses nothing."""
        before, same_policy = self.services, policy == self._policy
        self._judges.follow(services)
        moved = self._judges.moved()
        selection = Selection(policy, services, judged=moved)
        for name in before.keys() - services.keys():
            selection.changes.update({f.key: None for f in self.forwardings[name]})
            selection.gone.append(name)
        for name, service in services.items():
            if same_policy and before.get(name) is service and name not in moved:
                continue
            old = {f.key: f for f in self.forwardings.get(name, ())}
            selection.forwardings[name] = new = choose(service, policy, self._judges.standings(service))
            selection.changes.update(dict.fromkeys(old.keys() - {f.key for f in new}))
            selection.changes.update({f.key: f for f in new if old.get(f.key) != f})
        return selection

    def _hand_over(self, selection: Selection) -> None:
        """Give the dataplane what differs, then remember it."""
        listeners: list[Dataplane | Follower] = [self._dataplane, *self.followers]
        for listener in listeners:
            if selection.policy != self._policy:
                listener.host_changed(selection.policy.host.addresses)
            listener.update(selection.changes)
        causes = self.causes.take()
        if self._policy is not None:  # of the first load the log tells the number alone
            tell_changes(self.services, selection.services, selection.forwardings, causes)
        self._policy, self.services = selection.policy, selection.services
        for name in selection.gone:
            del self.forwardings[name]
        self.forwardings.update(selection.forwardings)
        self._judges.taken_up(selection.judged)

    async def _prepare_host(self) -> None:
        wanted = [f for part in self.forwardings.values() for f in part]
        self._host_warnings = await self._surroundings.prepare(wanted)

    def _succeeded(self, wish: int, began: datetime, wrote: bool) -> None:
        progress, now = self.progress, self.clock()
        if wrote or not progress.done:
            progress.last_apply, progress.last_seconds = now, (now - began).total_seconds()
            progress.applies += wrote
            tell_applied(len(self.services), progress.last_seconds, first=not progress.done)
        if progress.fault:
            tell_recovered(progress.fault)
        quarantined = {key.service: why for key, why in self._dataplane.quarantined().items()}
        tell_readmitted(progress.quarantined, quarantined, self.services)
        progress.quarantined = quarantined
        progress.warnings = (*self._host_warnings, *self._dataplane.warnings())
        for follower in self.followers:
            follower.applied(wrote)
        progress.fulfilled(wish)

    def _failed(self, wish: int, fault: str) -> None:
        if fault != self.progress.fault:
            log.error("%s", fault, extra=fields(Event.APPLY_FAILED, cause="kernel", reason=fault))
        self.progress.fault, self.progress.tried = fault, wish
        self.progress.failures += 1


def _same_unit(one: Unit, other: Unit) -> bool:
    return one.candidate is other.candidate and one.accepted is other.accepted
