"""The iptables dataplane: both address families, each on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace

from vipd.dataplane.dual_stack import DualStackDataplane
from vipd.dataplane.iptables.counters.counter import RuleCounter
from vipd.dataplane.iptables.family import FamilyRules
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.other_variant import KeptVariants
from vipd.dataplane.iptables.plan import Plan
from vipd.dataplane.iptables.watch.poll import WatchedFamily
from vipd.dataplane.iptables.watch.stream import WatchOptions
from vipd.dataplane.iptables.watch.watcher import RuleWatch
from vipd.host.host_changes import HostChanges
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import Family


class IptablesDataplane(DualStackDataplane[FamilyRules, Plan]):
    """Implements `vipd.dataplane.base.Dataplane`. Make it with `start`."""

    name = "iptables"

    def __init__(self, families: Mapping[Family, FamilyRules], names: Names, counter: RuleCounter) -> None:
        super().__init__(families)
        self._names = names
        self.counter: RuleCounter = counter
        """Its `on_message` wants the kernel's notifications of nf_tables rules."""

    @classmethod
    async def start(
        cls, settings: Settings, record: HostChanges, run: Runner, kept: KeptVariants = tuple
    ) -> IptablesDataplane:
        """Find the tools of both families. Writes nothing. A family without tools fails when it is needed,
        and looks for them again then."""
        names = Names(settings.chain_prefix)
        counter = RuleCounter(names)
        families = {family: FamilyRules(family, settings, record, run, counter, kept) for family in Family}
        await asyncio.gather(*(rules.find_tools() for rules in families.values()))
        return cls(families, names, counter)

    def invalidate(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Exactly these chains may have changed: the next plan reads them alone."""
        for family, rules in self._families.items():
            rules.invalidate({chain for of, chain in chains if of is family})

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The SVC chain and each endpoint's SEP chain."""
        key = forwarding.key
        return self._names.service(key), {e: self._names.endpoint(key, e) for e in forwarding.reachable()}

    def watch(self, options: WatchOptions) -> RuleWatch:
        """Watches for changes by other programs; the counter receives the counts of deleted rules."""
        return RuleWatch(self.watched(), self._names, replace(options, on_message=self.counter.on_message))

    def watched(self) -> tuple[WatchedFamily, ...]:
        """How to watch for foreign changes of vipd's rules, for each family that has tools."""
        return tuple(watched for rules in self._families.values() if (watched := rules.watched()))
