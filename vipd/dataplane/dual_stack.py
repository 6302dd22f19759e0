"""What a dataplane does in each address family: a family that fails does not hold back the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from vipd.dataplane.base import ApplyError, DataplanePlan
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

P = TypeVar("P", bound=DataplanePlan)

LARGE = 300
"""Of one forwarding (`Forwarding.work`), above which it is compiled beside the event loop."""


@dataclass(frozen=True, slots=True)
class FamilyPlans(Generic[P]):
    """One plan for each family, and why a family could not be planned."""

    plans: Mapping[Family, P]
    errors: tuple[ApplyError, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.errors) or any(self.plans.values())

    def __str__(self) -> str:
        parts = [f"# {family}\n{plan}" for family, plan in self.plans.items() if plan]
        return "".join([*parts, *(f"# {error}\n" for error in self.errors)])


class FamilyPart(Protocol[P]):
    """What a dataplane has in one family."""

    def update(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Take a forwarding's new form, or its end."""

    def work_of(self, key: ForwardingKey, forwarding: Forwarding | None) -> int:
        """How much it is to take that: of the forwarding and of the one in its place, the larger."""

    def compile_ahead(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Do so much of the next `update` of this key as may be done in a thread."""

    def host_changed(self, addresses: frozenset[str]) -> None:
        """This host's own addresses are these from now on."""

    def invalidate_all(self) -> None:
        """Trust nothing that is known about the kernel."""

    async def plan(self) -> P:
        """What has to be written now. Raises ApplyError."""

    async def survey(self) -> Any:
        """The rules that the kernel holds now. Raises ApplyError."""

    def difference(self, surveyed: Any) -> P:
        """What would have to be written if the kernel were like this. May run in a thread."""

    async def apply(self, plan: P) -> None:
        """Write a plan. Raises ApplyError."""

    async def collect_garbage(self) -> None:
        """Clear away what a change left behind. Raises ApplyError."""

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel does not take, and what it said."""

    def warnings(self) -> list[str]:
        """What this host lacks and what that means for services."""


F = TypeVar("F", bound=FamilyPart)  # type: ignore[type-arg]  # of whatever plans it makes


class Families(Generic[F, P]):
    """Implements of `vipd.dataplane.base.Dataplane` all that is the same for both families."""

    def __init__(self, families: Mapping[Family, F]) -> None:
        self._families = families
        self._host_addresses: frozenset[str] = frozenset()

    async def prepare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Compile beside the event loop what takes long; `update` then finds it done."""
        known = [(self._families[key.family], key, forwarding) for key, forwarding in changes.items()]
        large = [(part, key, f) for part, key, f in known if part.work_of(key, f) > LARGE]
        for part, key, forwarding in large:
            with contextlib.suppress(Exception):  # `update` meets it again, and knows for whom
                await asyncio.to_thread(part.compile_ahead, key, forwarding)

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are gone."""
        for key, forwarding in changes.items():
            self._families[key.family].update(key, forwarding)

    def host_changed(self, addresses: frozenset[str]) -> None:
        """Node ports may be limited to some of this host's addresses."""
        self._host_addresses = addresses
        for part in self._families.values():
            part.host_changed(addresses)

    def host_addresses(self) -> frozenset[str]:
        """This host's own addresses, as `host_changed` told them last."""
        return self._host_addresses

    def invalidate_all(self) -> None:
        """Trust nothing about the kernel: the next plan reads it."""
        for part in self._families.values():
            part.invalidate_all()

    async def plan(self) -> FamilyPlans[P]:
        """What has to be written now; a family that cannot be read does not hold back the other."""
        plans, errors = dict[Family, P](), []
        for family, part in self._families.items():
            try:
                plans[family] = await part.plan()
            except ApplyError as error:
                errors.append(error)
        return FamilyPlans(plans, tuple(errors))

    async def survey(self) -> Mapping[Family, object]:
        """The rules that the kernel holds now, or why they cannot be read, for each family."""
        found: dict[Family, object] = {}
        for family, part in self._families.items():
            try:
                found[family] = await part.survey()
            except ApplyError as error:
                found[family] = error
        return found

    async def difference(self, surveyed: object) -> FamilyPlans[P]:
        """What would have to be written where the kernel is as surveyed."""
        assert isinstance(surveyed, dict)  # noqa: S101 (each dataplane takes its own surveys only)
        errors = tuple(found for found in surveyed.values() if isinstance(found, ApplyError))
        plans = {
            family: await asyncio.to_thread(self._families[family].difference, found)
            for family, found in surveyed.items()
            if not isinstance(found, ApplyError)
        }
        return FamilyPlans(plans, errors)

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan, every family of it; raises the first ApplyError after all were tried."""
        assert isinstance(plan, FamilyPlans)  # noqa: S101 (each dataplane takes its own plans only)
        errors = list(plan.errors)
        for family, part in plan.plans.items():
            try:
                await self.write(family, part)
            except ApplyError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def write(self, family: Family, plan: P) -> None:
        """Write one family's plan. Raises ApplyError."""
        await self._families[family].apply(plan)

    async def collect_garbage(self) -> None:
        """Delete what nothing reaches any more and no change waited for. Raises ApplyError."""
        for part in self._families.values():
            await part.collect_garbage()

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel does not take, and what it said."""
        return {key: why for part in self._families.values() for key, why in part.quarantined().items()}

    def warnings(self) -> tuple[str, ...]:
        """What this host lacks and what that means for services."""
        return tuple(warning for part in self._families.values() for warning in part.warnings())
