"""The iptables dataplane: both address families, each on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from typing import TypeAlias

from vipd.dataplane.dual_stack import Families, FamilyPlans
from vipd.dataplane.iptables.counters.counter import RuleCounter
from vipd.dataplane.iptables.family import FamilyRules
from vipd.dataplane.iptables.former import Kept
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.plan import Plan
from vipd.dataplane.iptables.tools import Tools, save
from vipd.dataplane.iptables.watch.poll import WatchedFamily
from vipd.host.changes import HostRecord
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Family

IptablesPlan: TypeAlias = FamilyPlans[Plan]


class IptablesDataplane(Families[FamilyRules, Plan]):
    """Implements `vipd.dataplane.base.Dataplane`. Make it with `start`."""

    name = "iptables"

    def __init__(self, families: Mapping[Family, FamilyRules], names: Names, run: Runner) -> None:
        super().__init__(families)
        self._names, self._run = names, run
        self.counter = RuleCounter(names, (), {})
        """Counts new flows. Its `hear` wants the kernel's notifications of nf_tables rules."""
        self._count_with_tools()

    @classmethod
    async def start(
        cls, settings: Settings, record: HostRecord, run: Runner, kept: Kept = tuple
    ) -> IptablesDataplane:
        """Find the tools of both families. Writes nothing. A family without tools fails when needed, and
        looks for them again then."""
        families = {family: FamilyRules(family, settings, record, run, kept) for family in Family}
        await asyncio.gather(*(rules.find_tools() for rules in families.values()))
        return cls(families, Names(settings.chain_prefix), run)

    async def plan(self) -> FamilyPlans[Plan]:
        """What has to be written now. The programs may be others than before; then so is what counts."""
        plans = await super().plan()
        self._count_with_tools()
        return plans

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are gone."""
        super().update(changes)
        self.counter.update(changes)

    def invalidate(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Somebody may have changed these chains, and no others: the next plan reads them alone."""
        for family, rules in self._families.items():
            rules.invalidate({chain for of, chain in chains if of is family})

    async def write(self, family: Family, plan: Plan) -> None:
        """Write one family's plan, what the old rules have counted being read before. Raises ApplyError."""
        await self.counter.before(family, plan.changes)
        await super().write(family, plan)
        self.counter.written(family, plan.changes)

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

    def versions(self) -> dict[str, str]:
        """Each family's iptables, as it names itself."""
        return {
            str(family): rules.tools.version_text if isinstance(rules.tools, Tools) else str(rules.tools)
            for family, rules in self._families.items()
        }

    def _count_with_tools(self) -> None:
        usable = {f: rules.tools for f, rules in self._families.items() if isinstance(rules.tools, Tools)}
        legacy = {
            family: partial(save, tools, self._run, counters=True)
            for family, tools in usable.items()
            if tools.legacy
        }
        self.counter.use(usable, legacy)
