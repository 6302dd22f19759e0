"""Makes the dataplanes that this program knows, removes what they have in the kernel, and watches them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeAlias

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.counting import FlowCounter, Place
from vipd.dataplane.forward_accept.driver import ForwardAccepts
from vipd.dataplane.forward_accept.watch import ForwardPoll, ForwardScope
from vipd.dataplane.iptables import removal as iptables_removal
from vipd.dataplane.iptables.driver import IptablesDataplane
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.watch.own import OwnProcesses
from vipd.dataplane.iptables.watch.watcher import Watch
from vipd.dataplane.nftables import removal as nftables_removal
from vipd.dataplane.nftables.driver import NftablesDataplane
from vipd.dataplane.nftables.flow_counter import ElementCounter
from vipd.dataplane.nftables.foreign_chains import dropping_chains
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.probe import Abilities, probe
from vipd.dataplane.nftables.tools import find_nft
from vipd.dataplane.nftables.watch import TableWatch
from vipd.dataplane.switching import DataplaneName, InvalidatedDataplane, Ready, SwitchableDataplane, at_once
from vipd.host.changes import HostRecord
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.service import Family

log = logging.getLogger(__name__)

RuleWatch: TypeAlias = Watch | TableWatch


class HostDataplanes:
    """Implements `Opening` on this host, in the network namespace in which `run` runs programs."""

    def __init__(self, settings: Settings, record: HostRecord, run: Runner) -> None:
        self._settings, self._record, self._run = settings, record, run
        self.prefix = settings.chain_prefix
        self.accepts = ForwardAccepts(settings, record, run)

    async def open(self, name: DataplaneName) -> InvalidatedDataplane:
        """A dataplane that has written nothing yet. Raises ApplyError when this host cannot do it."""
        if name == "nftables":
            return await NftablesDataplane.start(self._settings, self._record, self._run)
        return await IptablesDataplane.start(self._settings, self._record, self._run, self.accepts.kept)

    def options_of(self, dataplane: InvalidatedDataplane, family: Family) -> RuleOptions | TableOptions:
        """What shapes a family's rules in a dataplane that this has opened."""
        assert isinstance(dataplane, IptablesDataplane | NftablesDataplane)  # noqa: S101 (there are two)
        return dataplane.options_of(family)

    async def remove(self, name: DataplaneName, ready: Ready = at_once) -> bool:
        """Remove everything under our prefix that a dataplane has in the kernel; whether there was anything.
        Accepts in FORWARD stay where `accepts` has a need of them.

        `ready` is awaited just before. Raises ApplyError.
        """
        prefixes = (self._settings.chain_prefix,)
        if name == "nftables":
            tables = await nftables_removal.find_leftovers(prefixes)
            await ready()
            await nftables_removal.remove(tables, self._run)
            return bool(tables)
        rules = await iptables_removal.find_leftovers(prefixes, self._run, self.accepts.kept())
        await ready()
        await iptables_removal.remove(rules, self._run)
        return bool(rules)


def watch_of(dataplane: SwitchableDataplane, settings: Settings, own: OwnProcesses) -> RuleWatch:
    """What sees that somebody else changes the rules of the dataplane in use, or what they need of others."""
    names, current, accepts = Names(settings.chain_prefix), dataplane.current, dataplane.accepts
    watch: RuleWatch
    if isinstance(current, IptablesDataplane):
        watch = Watch(current.watched(), names, own)
        watch.hear = current.counter.hear
    else:
        watch = TableWatch(names, own)
    watch.widen = lambda scope: ForwardScope(names, scope.families, scope, accepts)
    watch.beside = ((ForwardPoll(accepts), "polling chains of the forward hook"),)
    return watch


class FlowCounters:
    """Implements `FlowCounter` by whichever dataplane is in use."""

    def __init__(self, dataplane: SwitchableDataplane) -> None:
        self._dataplane = dataplane
        self._of: tuple[InvalidatedDataplane, FlowCounter] | None = None

    @property
    def seconds(self) -> float:
        """CPU time that the last `take` took, about."""
        return self._counter().seconds

    async def take(self) -> Mapping[Place, int]:
        """The new flows since the last time. Raises ApplyError or OSError."""
        return await self._counter().take()

    def memory(self) -> object:
        """What has been taken, and of which dataplane."""
        return {self._dataplane.name: self._counter().memory()}

    def remember(self, memory: object) -> None:
        """Go on from what an earlier run had taken of the same dataplane."""
        if isinstance(memory, dict) and self._dataplane.name in memory:
            self._counter().remember(memory[self._dataplane.name])

    def _counter(self) -> FlowCounter:
        current = self._dataplane.current
        if self._of is None or self._of[0] is not current:
            self._of = (current, _counter_of(current))
        return self._of[1]


def _counter_of(dataplane: InvalidatedDataplane) -> FlowCounter:
    if isinstance(dataplane, IptablesDataplane):
        return dataplane.counter
    assert isinstance(dataplane, NftablesDataplane)  # noqa: S101 (there are two)
    return ElementCounter(dataplane.counted, dataplane.forwardings)


async def dataplane_meant(setting: str, settings: Settings, run: Runner) -> DataplaneName:
    """The dataplane that a setting means. `auto` is nftables where nft and kernel have all that it may need,
    and where no other table drops what is for health ports, or forwarded flows that vipd cannot accept there;
    else iptables. An nft that is there and fails decides nothing while a table of ours stands: it may work
    again in a moment.
    """
    if setting != "auto":
        return "nftables" if setting == "nftables" else "iptables"
    try:
        nft = await find_nft(run)
        able = [await probe(nft, TableOptions.of(settings, family), run) for family in Family]
        accepts = ForwardAccepts(settings, HostRecord(settings.state_dir), run)
        drops = await dropping_chains() or await accepts.obstacles("nftables")
        if any(abilities != Abilities() for abilities in able) or drops:
            return "iptables"
    except MissingProgramError:
        return "iptables"
    except (ApplyError, OSError) as error:
        chosen: DataplaneName = "nftables" if await _has_table(settings) else "iptables"
        log.warning("dataplane auto: %s, for nftables cannot be tried: %s", chosen, error)
        return chosen
    return "nftables"


async def _has_table(settings: Settings) -> bool:
    try:
        return bool(await nftables_removal.find_leftovers((settings.chain_prefix,)))
    except ApplyError:
        return False
