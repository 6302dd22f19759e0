"""The part of a dataplane for each address family: a failure of one family does not block the other."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from vipd.dataplane.base import ApplyError, DataplaneName, DataplanePlan
from vipd.dataplane.counting import FlowCounter
from vipd.dataplane.family import FamilyProgrammer
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

P = TypeVar("P", bound=DataplanePlan)

LARGE = 300
"""`Forwarding.work` of one forwarding, above which it is compiled in a thread."""


@dataclass(frozen=True, slots=True)
class FamilyPlans(Generic[P]):
    """One plan for each family, and why a family could not be planned."""

    plans: Mapping[Family, P]
    errors: Mapping[Family, ApplyError] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.errors) or any(self.plans.values())

    def __str__(self) -> str:
        parts = [f"# {family}\n{plan}" for family, plan in self.plans.items() if plan]
        return "".join([*parts, *(f"# {error}\n" for error in self.errors.values())])


F = TypeVar("F", bound=FamilyProgrammer)  # type: ignore[type-arg]  # of whatever plans it makes


class ForwardingsCounter(FlowCounter, Protocol):
    """A counter that receives the forwardings."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are deleted."""


class DualStackDataplane(ABC, Generic[F, P]):
    """Implements the part of `vipd.dataplane.base.Dataplane` that both dataplanes share."""

    name: DataplaneName
    counter: ForwardingsCounter
    """Counts new flows."""

    def __init__(self, families: Mapping[Family, F]) -> None:
        self._families = families

    async def prepare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Compile slow forwardings in a thread; `update` then uses the result."""
        known = [(self._families[key.family], key, forwarding) for key, forwarding in changes.items()]
        large = [(part, key, f) for part, key, f in known if part.desired.work_of(key, f) > LARGE]
        for part, key, forwarding in large:
            with contextlib.suppress(Exception):  # `update` raises it again, for the right service
                await asyncio.to_thread(part.desired.compile_ahead, key, forwarding)

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Add new forwardings, and remove those that are None."""
        for key, forwarding in changes.items():
            part = self._families[key.family]
            part.release(key)
            part.desired.update(key, forwarding)
        self.counter.update(changes)

    async def host_changed(self, addresses: frozenset[str]) -> None:
        """Node ports may be limited to some of this host's addresses."""
        for part in self._families.values():
            await part.host_changed(addresses)

    def invalidate_all(self) -> None:
        """Trust nothing about the kernel: the next plan reads it."""
        for part in self._families.values():
            part.invalidate_all()

    async def plan(self) -> FamilyPlans[P]:
        """The plan of what must be written now; a family that cannot be read does not block the other."""
        plans, errors = dict[Family, P](), dict[Family, ApplyError]()
        for family, part in self._families.items():
            part.retry_if_doubted()
            try:
                plans[family] = await part.plan()
            except ApplyError as error:
                errors[family] = error
        return FamilyPlans(plans, errors)

    async def survey(self) -> Mapping[Family, object]:
        """The kernel's current rules, or why they cannot be read, for each family."""
        found: dict[Family, object] = {}
        for family, part in self._families.items():
            try:
                found[family] = await part.survey()
            except ApplyError as error:
                found[family] = error
        return found

    async def difference(self, surveyed: object) -> FamilyPlans[P]:
        """The plan for a kernel in the surveyed state."""
        assert isinstance(surveyed, dict)  # noqa: S101 (each dataplane takes its own surveys only)
        errors = {family: found for family, found in surveyed.items() if isinstance(found, ApplyError)}
        plans = {
            family: await asyncio.to_thread(self._families[family].difference, found)
            for family, found in surveyed.items()
            if not isinstance(found, ApplyError)
        }
        return FamilyPlans(plans, errors)

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan, every family of it; raises the first ApplyError after all were tried."""
        assert isinstance(plan, FamilyPlans)  # noqa: S101 (each dataplane takes its own plans only)
        errors = dict(plan.errors)
        for family, part in plan.plans.items():
            try:
                await self._families[family].apply(part)
            except ApplyError as error:
                errors[family] = error
        if errors:
            first = next(iter(errors.values()))
            first.families = frozenset(errors)
            raise first

    def retry_quarantined(self, services: Collection[str]) -> None:
        """Try what the kernel rejects of these services once more, with the next plan."""
        for part in self._families.values():
            part.retry_quarantined(services)

    async def collect_garbage(self) -> None:
        """Delete chains that are no longer reachable, and that no change had to delete. Raises ApplyError."""
        for part in self._families.values():
            await part.collect_garbage()

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel rejects, with its message."""
        return {key: why for part in self._families.values() for key, why in part.quarantined().items()}

    def warnings(self) -> tuple[str, ...]:
        """What this host lacks and the effects on services."""
        return tuple(warning for part in self._families.values() for warning in part.warnings())

    def options_of(self, family: Family) -> RuleOptions | TableOptions:
        """Everything besides the forwardings that shapes a family's rules."""
        options: RuleOptions | TableOptions = self._families[family].desired.options
        return options

    def versions(self) -> dict[str, str]:
        """The tools in use, by family, as they name themselves."""
        return {str(family): part.version() for family, part in self._families.items()}
