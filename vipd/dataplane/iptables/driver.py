"""The iptables dataplane: both address families, each on its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from vipd.dataplane.base import ApplyError, DataplanePlan
from vipd.dataplane.iptables.counters.counter import RuleCounter
from vipd.dataplane.iptables.family import FamilyRules
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.plan import Plan
from vipd.dataplane.iptables.tools import Tools, find_tools, save
from vipd.dataplane.iptables.watch.poll import WatchedFamily
from vipd.host_record import HostRecord
from vipd.model import Endpoint, Family, Forwarding, ForwardingKey
from vipd.process import Runner
from vipd.settings import Settings


@dataclass(frozen=True, slots=True)
class IptablesPlan:
    """One plan for each family, and why a family could not be planned."""

    plans: Mapping[Family, Plan]
    errors: tuple[ApplyError, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.errors) or any(self.plans.values())

    def __str__(self) -> str:
        parts = [f"# {family}\n{plan}" for family, plan in self.plans.items() if plan]
        return "".join([*parts, *(f"# {error}\n" for error in self.errors)])


class IptablesDataplane:
    """Implements `vipd.dataplane.base.Dataplane`. Make it with `start`."""

    name = "iptables"

    def __init__(self, families: Mapping[Family, FamilyRules], names: Names, counter: RuleCounter) -> None:
        self._families = families
        self._names = names
        self.counter = counter
        """Counts new flows. Its `hear` wants the kernel's notifications of nf_tables rules."""
        self._host_addresses: frozenset[str] = frozenset()

    @classmethod
    async def start(cls, settings: Settings, record: HostRecord, run: Runner) -> IptablesDataplane:
        """Find the tools of both families. Writes nothing. A family without tools fails when it is needed."""
        families = {}
        for family in Family:
            tools: Tools | ApplyError
            try:
                tools = await find_tools(family, settings.iptables_variant, run)
            except ApplyError as error:
                tools = error
            families[family] = FamilyRules(family, tools, settings, record, run)
        names = Names(settings.chain_prefix)
        return cls(families, names, _counter(families, names, run))

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are gone."""
        for key, forwarding in changes.items():
            self._families[key.family].update(key, forwarding)
        self.counter.update(changes)

    def host_changed(self, addresses: frozenset[str]) -> None:
        """Node ports may be limited to some of this host's addresses."""
        self._host_addresses = addresses
        for rules in self._families.values():
            rules.host_changed(addresses)

    def forget(self) -> None:
        """Trust nothing about the kernel: the next plan reads it."""
        for rules in self._families.values():
            rules.forget()

    def doubt(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Somebody may have changed these chains, and no others: the next plan reads them alone."""
        for family, rules in self._families.items():
            rules.doubt({chain for of, chain in chains if of is family})

    async def plan(self) -> IptablesPlan:
        """What has to be written now; a family that cannot be read does not hold back the other."""
        plans, errors = {}, []
        for family, rules in self._families.items():
            try:
                plans[family] = await rules.plan()
            except ApplyError as error:
                errors.append(error)
        return IptablesPlan(plans, tuple(errors))

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan, every family of it; raises the first ApplyError after all were tried."""
        assert isinstance(plan, IptablesPlan)  # noqa: S101 (each dataplane takes its own plans only)
        errors = list(plan.errors)
        for family, part in plan.plans.items():
            try:
                await self.counter.before(family, part.changes)
                await self._families[family].apply(part)
                self.counter.written(family, part.changes)
            except ApplyError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def sweep(self) -> None:
        """Delete what nothing reaches any more and no change waited for. Raises ApplyError."""
        for rules in self._families.values():
            await rules.sweep()

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel does not take, and what it said."""
        return {k: reason for rules in self._families.values() for k, reason in rules.quarantined().items()}

    def warnings(self) -> tuple[str, ...]:
        """What this host lacks and what that means for services."""
        return tuple(warning for rules in self._families.values() for warning in rules.warnings())

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The SVC chain and each endpoint's SEP chain."""
        key = forwarding.key
        return self._names.service(key), {e: self._names.endpoint(key, e) for e in forwarding.reachable()}

    def watched(self) -> tuple[WatchedFamily, ...]:
        """How to see that somebody else changes our rules, for each family that has tools."""
        return tuple(watched for rules in self._families.values() if (watched := rules.watched()))

    def options_of(self, family: Family) -> RuleOptions:
        """Everything besides the forwardings that shapes a family's rules."""
        return self._families[family].ruleset.options

    def host_addresses(self) -> frozenset[str]:
        """This host's own addresses, as `host_changed` told them last."""
        return self._host_addresses

    def versions(self) -> dict[str, str]:
        """Each family's iptables, as it names itself."""
        return {
            str(family): rules.tools.version_text if isinstance(rules.tools, Tools) else str(rules.tools)
            for family, rules in self._families.items()
        }


def _counter(families: Mapping[Family, FamilyRules], names: Names, run: Runner) -> RuleCounter:
    usable = {family: rules.tools for family, rules in families.items() if isinstance(rules.tools, Tools)}
    legacy = {
        family: partial(save, tools, run, counters=True) for family, tools in usable.items() if tools.legacy
    }
    return RuleCounter(names, usable, legacy)
