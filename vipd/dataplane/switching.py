"""The dataplane in use, and the switch to another one while vipd runs.

The new one is written before the old one is removed, so that no new flow is refused: the kernel
translates a flow once, by the first one that matches. The same holds for a restart with other settings:
the rules of the other dataplane are removed once this one has written its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from vipd.dataplane.base import DATAPLANES, ApplyError, Dataplane, DataplaneName, DataplanePlan
from vipd.dataplane.counting import BackendKey, RefusedKey
from vipd.dataplane.forward_accept.accepts import AcceptPlan
from vipd.dataplane.forward_accept.driver import ForwardAccepts
from vipd.dataplane.forward_accept.watch import ForwardOwnershipFilter, ForwardPoll, concern_forward
from vipd.dataplane.iptables.names import TABLES, ChainId, Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.watch.stream import ExternalChangeStream, WatchOptions
from vipd.dataplane.nftables.options import TableOptions, table_name
from vipd.host.batches import in_batches
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Family

log = logging.getLogger(__name__)

MAX_COMPARED = 1000
"""Forwardings that are compared with refusing rules of others for the status."""

Ready = Callable[[], Awaitable[None]]


async def no_preparation() -> None:
    """Nothing is to be done before."""


class DataplaneRegistry(Protocol):
    """Creates dataplanes, and removes their rules from the kernel."""

    prefix: str
    accepts: ForwardAccepts

    async def open(self, name: DataplaneName) -> Dataplane:
        """A dataplane that has written nothing yet. Raises ApplyError when this host cannot do it."""

    async def remove(self, name: DataplaneName, ready: Ready = no_preparation) -> bool:
        """Remove everything of a dataplane from the kernel; returns whether there was anything. `ready` is
        awaited just before, when that is known. Raises ApplyError."""


@dataclass(frozen=True, slots=True)
class CombinedPlan:
    """The plan of the dataplane in use, and that of the accepts in foreign chains."""

    accepts: AcceptPlan
    rules: DataplanePlan
    fault: ApplyError | None = None
    """Why those chains could not be read: raised once the rules are written."""

    def __bool__(self) -> bool:
        return bool(self.accepts) or bool(self.rules) or self.fault is not None

    def __str__(self) -> str:
        fault = f"# {self.fault}\n" if self.fault else ""
        return f"{self.accepts}{self.rules}{fault}"


class SwitchableDataplane:
    """Implements `Dataplane` by the one in use. Calls that write must not overlap."""

    def __init__(
        self,
        name: DataplaneName,
        current: Dataplane,
        registry: DataplaneRegistry,
        switched: Callable[[], None] = lambda: None,
    ) -> None:
        """`switched` is called after a switch, before the old one is removed; and
        when the one in use has found other tools, before it writes with them."""
        self._name, self.current, self._registry = name, current, registry
        self.accepts = registry.accepts
        self._forwardings: dict[ForwardingKey, Forwarding] = {}
        self._families: Counter[Family] = Counter()
        self._host_addresses: frozenset[str] = frozenset()
        self._others_gone = self._written = False
        self._left: tuple[str, ...] = ()
        self.counter = SwitchedCounter(self)
        self._switched = switched

    @property
    def name(self) -> DataplaneName:
        """The dataplane in use."""
        return self._name

    @classmethod
    async def start(
        cls, name: DataplaneName, registry: DataplaneRegistry, switched: Callable[[], None] = lambda: None
    ) -> SwitchableDataplane:
        """Start with one. Raises ApplyError."""
        return cls(name, await registry.open(name), registry, switched)

    async def switch(self, name: DataplaneName, before_removal: Ready = no_preparation) -> bool:
        """Replace the dataplane in use by another one; returns whether it changed.

        `before_removal` is awaited when the rules of both exist and the old one is still in use, just before
        its rules are removed together with their counters. Raises ApplyError; then the one in use is
        unchanged, and nothing of the other remains.
        """
        if name == self.name:
            return False
        new = await self._registry.open(name)
        await new.host_changed(self._host_addresses)
        async for part in in_batches(dict(self._forwardings)):
            await new.prepare(part)
            new.update(part)

        async def hand_over() -> None:
            await before_removal()
            self._take_over(name, new)

        try:
            await self.accepts.require(name, self._families.keys())
            await new.apply(await new.plan())
            if refused := new.quarantined():
                key, why = next(iter(refused.items()))
                raise ApplyError(f"the {name} dataplane does not take {key.service}", why)
            await _discard_counts(new)
            await self._remove_others(name, hand_over)
            if self.current is not new:  # the old one could not even be read
                await hand_over()
        except BaseException:
            if self.current is not new:
                await self._undo()
                await self._settle_accepts()
            raise
        await self._settle_accepts()
        return True

    async def _undo(self) -> None:
        """Remove the rules of a dataplane after a failed switch, also if the request was cancelled.
        `collect_garbage` retries what cannot be removed now."""
        self._others_gone = False
        removing = asyncio.create_task(self._remove_others(self.name))
        while not removing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(removing)
        if error := removing.exception():
            log.error("what a failed switch has written cannot be removed", exc_info=error)

    async def prepare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Compute, off the event loop, what would take `update` long."""
        await self.current.prepare(changes)

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Add new forwardings, and remove those that are None."""
        self.current.update(changes)  # first: changes for which this raises must not reach another one either
        for key, forwarding in changes.items():
            if self._forwardings.pop(key, None) is not None:
                self._families[key.family] -= 1
            if forwarding is not None:
                self._forwardings[key] = forwarding
                self._families[key.family] += 1
        self._families = +self._families

    async def host_changed(self, addresses: frozenset[str]) -> None:
        """This host's own addresses are these from now on."""
        self._host_addresses = addresses
        await self.current.host_changed(addresses)

    async def plan(self) -> DataplanePlan:
        """The plan of what must be written now. Raises ApplyError."""
        tools = self.current.versions()
        plan = await self.current.plan()
        self._written = self._written or not plan
        if self.current.versions() != tools:
            self._switched()
        return await self._with_accepts(plan)

    async def survey(self) -> object:
        """The kernel's current rules. Raises ApplyError."""
        return await self.current.survey()

    async def difference(self, surveyed: object) -> DataplanePlan:
        """The plan for a kernel in the surveyed state."""
        self.accepts.invalidate()
        return await self._with_accepts(await self.current.difference(surveyed))

    async def _with_accepts(self, rules: DataplanePlan) -> CombinedPlan:
        """A plan of rules, with the plan of accepts in foreign chains. If those cannot be read, the rules are
        still written."""
        try:
            return CombinedPlan(await self.accepts.plan(self.name, self._families.keys()), rules)
        except ApplyError as error:
            return CombinedPlan(AcceptPlan(), rules, error)

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan to the kernel. Raises ApplyError."""
        assert isinstance(plan, CombinedPlan)  # noqa: S101 (this takes its own plans only)
        fault = plan.fault
        try:
            await self.accepts.apply(plan.accepts)
        except ApplyError as error:
            fault = error  # services on this host work without
        await self.current.apply(plan.rules)
        self._written = True
        try:
            await self.accepts.rules_written()
        except ApplyError as error:
            fault = fault or error
        if fault:
            fault.families = frozenset()
            raise fault

    def retry_quarantined(self, services: Collection[str]) -> None:
        """Try what the kernel rejects of these services once more, with the next plan."""
        self.current.retry_quarantined(services)

    async def collect_garbage(self) -> None:
        """Delete leftovers of changes, and once those of another dataplane. Raises ApplyError."""
        await self.current.collect_garbage()
        if self._written and not self._others_gone:
            await self._remove_others(self.name)

    def invalidate_all(self) -> None:
        """Drop the cached state of the kernel."""
        self.accepts.invalidate()
        self.current.invalidate_all()

    def invalidate(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Drop the cached state of these chains."""
        if concern_forward(chains, self._tables, Names(self._registry.prefix)):
            self.accepts.invalidate()
        self.current.invalidate({(family, chain) for family, chain in chains if chain.table in self._tables})

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel rejects, with its message."""
        return self.current.quarantined()

    def warnings(self) -> tuple[str, ...]:
        """What this host lacks and the effects on services."""
        accepts = self.accepts.warnings(self._shown_forwardings())
        return (*self._left, *accepts, *self.current.warnings())

    def warnings_of(self, services: Collection[str]) -> tuple[str, ...]:
        """The rules of other programs that may refuse flows of these services."""
        return self.accepts.warnings(
            [f for f in list(self._forwardings.values()) if f.key.service in services]
        )

    def _shown_forwardings(self) -> list[Forwarding]:
        """Those that rules of others are compared with."""
        return list(islice(self._forwardings.values(), MAX_COMPARED))

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The names of a forwarding and its endpoints in the kernel."""
        return self.current.chains_of(forwarding)

    def versions(self) -> dict[str, str]:
        """The tools in use, by family, as they name themselves."""
        return self.current.versions()

    def options_of(self, family: Family) -> RuleOptions | TableOptions:
        """What shapes a family's rules in the dataplane in use; explanations of packets use it."""
        return self.current.options_of(family)

    def watch(self, options: WatchOptions) -> ExternalChangeStream:
        """Watches for changes by other programs to rules of the dataplane in use, or to chains that it
        depends on."""
        accepts, names = self.accepts, Names(self._registry.prefix)
        with_forward = replace(
            options,
            extend_filter=lambda scope: ForwardOwnershipFilter(names, scope.families, scope, accepts),
            polls=((ForwardPoll(accepts), "polling chains of the forward hook"),),
        )
        return self.current.watch(with_forward)

    def host_addresses(self) -> frozenset[str]:
        """This host's own addresses, as reported last."""
        return self._host_addresses

    @property
    def _tables(self) -> tuple[str, ...]:
        """Those that the dataplane in use writes to."""
        return TABLES if self.name == "iptables" else (table_name(self._registry.prefix),)

    async def _settle_accepts(self) -> None:
        """Accept what the dataplane in use requires, and no more; the next step retries after a failure."""
        self.accepts.invalidate()
        try:
            await self.accepts.apply(await self.accepts.plan(self.name, self._families.keys()))
        except ApplyError as error:
            log.warning("%s", error)

    def _take_over(self, name: DataplaneName, new: Dataplane) -> None:
        self._name, self.current, self._written = name, new, True
        self._switched()

    async def _remove_others(self, kept: DataplaneName, ready: Ready = no_preparation) -> None:
        """Remove the rules of other dataplanes from the kernel. A failure is a warning, and retried."""
        left = []
        for name in DATAPLANES:
            if name == kept:
                continue
            try:
                if await self._registry.remove(name, ready):
                    log.info("the rules of the %s dataplane are removed; %s has taken over", name, kept)
            except ApplyError as error:
                left.append(f"rules of the {name} dataplane are still there: {error}")
        self._left, self._others_gone = tuple(left), not left


async def _discard_counts(new: Dataplane) -> None:
    """Drop what the new dataplane has counted while the old one translated: a table of nftables also counts
    the flows that rules of iptables translate, and have counted."""
    with contextlib.suppress(ApplyError, OSError):  # the periodic reading reports it
        await new.counter.take()
        await new.counter.refused()


class SwitchedCounter:
    """Implements `FlowCounter` by that of the dataplane in use."""

    def __init__(self, dataplane: SwitchableDataplane) -> None:
        self._dataplane = dataplane

    @property
    def seconds(self) -> float:
        """CPU time that the last `take` took, about."""
        return self._dataplane.current.counter.seconds

    async def take(self) -> Mapping[BackendKey, int]:
        """The new flows since the last time. Raises ApplyError or OSError."""
        return await self._dataplane.current.counter.take()

    async def refused(self) -> Mapping[RefusedKey, int]:
        """The new flows that limits have refused since the last time. Raises ApplyError or OSError."""
        return await self._dataplane.current.counter.refused()

    async def collect_garbage(self) -> Mapping[BackendKey, int]:
        """Delete the counts of backends that are gone. Raises ApplyError or OSError."""
        return await self._dataplane.current.counter.collect_garbage()

    def saved_state(self) -> object:
        """The counts that have been taken, and the dataplane that they belong to."""
        return {self._dataplane.name: self._dataplane.current.counter.saved_state()}

    def restore(self, memory: object) -> None:
        """Continue from what an earlier run had taken of the same dataplane."""
        if isinstance(memory, dict) and self._dataplane.name in memory:
            self._dataplane.current.counter.restore(memory[self._dataplane.name])
