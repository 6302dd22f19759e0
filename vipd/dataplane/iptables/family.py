"""One address family's rules at work: what is wanted, what the kernel is known to hold, and the way between.

A restore that fails because of its rules is tried again in halves until the forwarding at fault is alone. It
is quarantined: the kernel keeps what it had for it, and all others are programmed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.base_chains import entry_jumps
from vipd.dataplane.iptables.former import FormerRules, Kept
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.options import KUBE_PREFIX, RuleOptions
from vipd.dataplane.iptables.plan import Installed, Plan, make_plan
from vipd.dataplane.iptables.probe import Abilities, probe, shortcomings
from vipd.dataplane.iptables.reading import absent_tables, read_all, read_chain
from vipd.dataplane.iptables.restore_text import Batches
from vipd.dataplane.iptables.ruleset import Ruleset, Wanted
from vipd.dataplane.iptables.saved import recognise
from vipd.dataplane.iptables.tools import Tools, find_tools, program_names, restore, save
from vipd.dataplane.iptables.watch.poll import Expected, WatchedFamily
from vipd.dataplane.programs import Programs, usable
from vipd.host.changes import HostRecord
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.host.systemd.fields import Event, fields
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

log = logging.getLogger(__name__)

READ_WHOLE_ABOVE = 64
"""Doubtful chains above which everything is read: a process for each would take longer."""

SWEEP_LATER_ABOVE = 5000
"""Chains above which deletions wait for `sweep`."""

LARGE = 500
"""Endpoints that changes are about above which a plan is made beside the event loop."""

T = TypeVar("T")

KUBE_PROXY_CANARY = "KUBE-PROXY-CANARY"

Suspects = Sequence[tuple[ForwardingKey, Forwarding | None]]


class FamilyRules:
    """The rules of one family. Without tools it fails only when something is wanted of it."""

    def __init__(
        self, family: Family, settings: Settings, record: HostRecord, run: Runner, kept: Kept = tuple
    ) -> None:
        self._family, self._settings, self._record, self._run = family, settings, record, run
        variant = settings.iptables_variant
        self.programs = Programs(program_names(family, variant), lambda: find_tools(family, variant, run))
        self.ruleset = Ruleset(RuleOptions.of(settings, family, random_fully=False))
        self._former = FormerRules(family, settings.chain_prefix, run, kept)
        self._names = Names(settings.chain_prefix)
        self._installed: Installed | None = None
        """None: not known, so the next plan reads the kernel."""
        self._missing_tables: list[str] = []
        """`FAMILY TABLE` of tables that did not exist when the kernel was read."""
        self._unwritten = False
        """A plan for everything was made and not written: the next one must look at everything too."""
        self._doubtful: set[ChainId] = set()
        """Chains that somebody may have changed."""
        self._unswept: set[ChainId] = set()
        """Chains that are still there although nothing reaches them."""
        self._doubted = False
        self._writes = 0
        self._writing = False
        self._abilities: Abilities | None = None
        self._wrote = False
        self._quarantine: dict[ForwardingKey, tuple[Forwarding | None, str]] = {}

    @property
    def tools(self) -> Tools | ApplyError:
        """What is in use, or why nothing can be."""
        return self.programs.found

    def update(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Take a forwarding's new form, or its end. A new form gets a new chance."""
        self._quarantine.pop(key, None)
        self.ruleset.update(key, forwarding)

    def work_of(self, key: ForwardingKey, forwarding: Forwarding | None) -> int:
        """How much it is to take that: of the forwarding and of the one in its place, the larger."""
        return self.ruleset.work_of(key, forwarding)

    def compile_ahead(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Compile what the next `update` of this key needs. May run in a thread."""
        self.ruleset.compile_ahead(key, forwarding)

    def host_changed(self, addresses: frozenset[str]) -> None:
        """Node ports may be limited to some of this host's addresses."""
        limited = self._settings.node_addresses(self._family, addresses)
        self.ruleset.reconfigure(replace(self.ruleset.options, node_port_addresses=limited))

    def invalidate_all(self) -> None:
        """Trust nothing about the kernel, and give what is quarantined a new chance; as of the next plan, for
        one may be on its way into the kernel now."""
        self._doubted = True

    def invalidate(self, chains: Collection[ChainId]) -> None:
        """Somebody may have changed these chains, and no others: the next plan reads them alone."""
        if len(chains) > READ_WHOLE_ABOVE:
            self._doubted = True
        self._doubtful.update(chains)

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel does not take, and what it said."""
        return {key: reason for key, (_, reason) in self._quarantine.items()}

    def warnings(self) -> list[str]:
        """What the kernel's lack of something means for services."""
        found = [self._former.warning] if self._former.warning else []
        if self._abilities:
            pinned, accepts = self.ruleset.services_with_affinity(), self._settings.accept_forwarded
            found += shortcomings(self._abilities, self._family, pinned, accepts=accepts)
        return found

    def watched(self) -> WatchedFamily | None:
        """How to see that somebody else changes these rules; None without tools."""
        tools = self.tools
        if isinstance(tools, ApplyError):
            return None
        return WatchedFamily(self._family, tools.legacy, lambda: save(tools, self._run), self._expected)

    def _expected(self) -> Expected | None:
        if self._installed is None or self._writing or self._doubted:
            return None
        return Expected(self._writes, self._installed)

    async def find_tools(self) -> None:
        """Look for the programs, if that is due. Other ones than before know nothing of what was written."""
        wanted = self._wrote or bool(self.ruleset.shared())
        if not await self.programs.look(needed=wanted) or not isinstance(self.tools, Tools):
            return
        addresses = self.ruleset.options.node_port_addresses
        options = RuleOptions.of(self._settings, self._family, self.tools.random_fully)
        self.ruleset.reconfigure(replace(options, node_port_addresses=addresses))
        self._installed = self._abilities = None
        self._writes += 1

    async def plan(self) -> Plan:
        """What has to be written now. Raises ApplyError."""
        await self.find_tools()
        if isinstance(self.tools, ApplyError) and not (self._wrote or self.ruleset.shared()):
            return Plan()
        tools = usable(self.tools)
        if self._doubted:
            self._start_anew()
        fresh = self._installed is None or self._unwritten
        installed = self._installed or await self._observe(tools)
        if await self._beside(self.ruleset.shared):
            await self._prepare(tools)
        self._installed = installed
        if not fresh:
            await self._read_doubtful(tools, installed)
            return self._settled(await self._beside(lambda: self._changed(installed)))
        self._unswept.clear()
        self._doubtful.clear()
        plan = self._settled(await self._beside(lambda: self._whole(installed)))
        self._unwritten = bool(plan)
        return plan

    async def _beside(self, work: Callable[[], T]) -> T:
        """What some work comes to, done beside the event loop where there is much of it."""
        return await asyncio.to_thread(work) if self.ruleset.changes > LARGE else work()

    def _changed(self, installed: Installed) -> Plan:
        """The plan for what was touched."""
        return self._planned(self._without_deletions(self.ruleset.touched(), installed), installed)

    async def survey(self) -> Installed | None:
        """What the kernel holds now, nothing that is known of it being touched. None: no tools, and nothing
        wanted. Raises ApplyError."""
        if isinstance(self.tools, ApplyError) and not self.ruleset.shared():
            return None
        tools = usable(self.tools)
        return await self._read(await save(tools, self._run), tools)

    def difference(self, surveyed: Installed | None) -> Plan:
        """What would have to be written where the kernel is as surveyed."""
        return Plan() if surveyed is None else self._whole(surveyed)

    def _whole(self, installed: Installed) -> Plan:
        """The plan for everything."""
        wanted = self.ruleset.whole(installed.chains)
        for group in (*wanted.leaves, wanted.shared):
            recognise(installed, group)
        return self._planned(wanted, installed)

    async def collect_garbage(self) -> None:
        """Delete the chains that nothing reaches and that no change waited for. Raises ApplyError."""
        if not self._unswept or self._installed is None or self._doubted:
            return
        gone = frozenset(self._unswept - self.ruleset.chains_in_use())
        self._unswept.clear()
        wanted = Wanted((), {}, entry_jumps(self.ruleset.options), gone)
        plan = self._planned(wanted, self._installed)
        if plan:
            await self._write(plan, settles=False)

    def _planned(self, wanted: Wanted, installed: Installed) -> Plan:
        legacy = not isinstance(self.tools, ApplyError) and self.tools.legacy
        return make_plan(wanted, installed, self._names, Batches.of(legacy=legacy))

    def _without_deletions(self, wanted: Wanted, installed: Installed) -> Wanted:
        """In a large table one deletion makes iptables-nft-restore read every chain: 0.2 s of 0.25 s for one
        changed backend among 10,000 services. Nothing reaches those chains, so they can wait for `sweep`."""
        if len(installed.chains) <= SWEEP_LATER_ABOVE or not self.ruleset.shared():
            return wanted
        self._unswept |= wanted.gone
        return replace(wanted, gone=frozenset())

    async def apply(self, plan: Plan) -> None:
        """Write a plan. Raises ApplyError when no single forwarding is to blame."""
        if not plan:
            return
        try:
            await self._write(plan)
        except ApplyError as error:
            if not error.rules_at_fault:
                raise
            await self._bisect(error)

    async def _read_doubtful(self, tools: Tools, installed: Installed) -> None:
        chains, self._doubtful = self._doubtful, set()
        jumps = entry_jumps(self.ruleset.options)
        for chain in chains:
            try:
                rules = await read_chain(tools, self._names, chain, jumps.get(chain, ()), self._run)
            except ApplyError:
                self.invalidate_all()  # what has not been looked at must not be taken for known
                raise
            holder = installed.chains if self._names.owns(chain) else installed.builtins
            holder.pop(chain, None)
            if rules is not None:
                holder[chain] = rules
        if chains:
            self.ruleset.touch(chains)
            wanted = self.ruleset.touched()
            for group in (*wanted.leaves, wanted.shared):
                recognise(installed, {chain: group[chain] for chain in chains & group.keys()})

    def _start_anew(self) -> None:
        self._doubted, self._installed = False, None
        for key, (forwarding, _) in list(self._quarantine.items()):
            self.update(key, forwarding)

    def _settled(self, plan: Plan) -> Plan:
        plan = replace(plan, former=self._former.plan)
        if not plan:
            self.ruleset.written()
        return plan

    async def _observe(self, tools: Tools) -> Installed:
        text = await save(tools, self._run)
        if self._settings.chain_prefix == KUBE_PREFIX and not self._settings.force_chain_prefix:
            _refuse_beside_kube_proxy(text, self._family)
        self._missing_tables = [f"{self._family} {table}" for table in absent_tables(text)]
        await self._former.look(tools)
        return await self._read(text, tools)

    async def _read(self, saved: str, tools: Tools) -> Installed:
        jumps = entry_jumps(self.ruleset.options)
        return await read_all(saved, tools, self._names, self.ruleset.shared(), jumps, self._run)

    async def _prepare(self, tools: Tools) -> None:
        """Before the first write: say on disk what will be there, and find out what this host can do."""
        if self._missing_tables or self._abilities is None:
            try:
                self._record.rules(self._settings.chain_prefix, self._missing_tables)
            except OSError as error:
                what = "what is done to this host cannot be recorded"
                why = error.strerror or str(error)
                raise ApplyError(what, why, "mend state_dir; nothing was written") from None
            self._missing_tables = []
        if self._abilities is None:
            await self._probe(tools)

    async def _probe(self, tools: Tools) -> None:
        self._abilities = abilities = await probe(tools, self._names, self._family, self._run)
        options = self.ruleset.options
        self.ruleset.reconfigure(
            replace(
                options,
                affinity=abilities.affinity,
                accept_forwarded=options.accept_forwarded and abilities.flow_marks,
                flow_marks=abilities.flow_marks,
                ping=abilities.ping,
                random_fully=options.random_fully and abilities.random_fully,
            )
        )

    async def _write(self, plan: Plan, settles: bool = True) -> None:
        assert isinstance(self.tools, Tools)  # noqa: S101 (a plan with work exists only where tools do)
        assert self._installed is not None  # noqa: S101
        self._writing = self._wrote = True
        try:
            for text in plan.restores:
                await restore(self.tools, text, self._run)
            if plan.former:
                await self._former.remove(plan.former)
        except BaseException:
            # Some restores may have been done, also when this task was cancelled: look again first.
            self._installed = None
            raise
        finally:
            self._writing = False
            self._writes += 1
        plan.settle(self._installed)
        if settles:
            self._unwritten = False
            self.ruleset.written()

    async def _bisect(self, error: ApplyError) -> None:
        """Find which forwardings the kernel does not take, and program all others."""
        suspects = list(self.ruleset.hold_back().items())
        admitted = 0
        try:
            await self._rewrite()
            await self._require_tools(error)
            log.warning("%s; looking for the service at fault among %d", error, len(suspects))
            await self._reapply(suspects)
            admitted = len(suspects)
        finally:
            if not admitted:
                for key, forwarding in suspects:
                    self.ruleset.update(key, forwarding)

    async def _require_tools(self, error: ApplyError) -> None:
        """Raise the error when the tool takes no rules at all: then no service is to blame."""
        assert isinstance(self.tools, Tools)  # noqa: S101 (something was written, so there are tools)
        try:
            await probe(self.tools, self._names, self._family, self._run)
        except ApplyError:
            raise error from None

    async def _reapply(self, suspects: Suspects) -> None:
        """Program these forwardings; whoever fails alone is quarantined."""
        for key, forwarding in suspects:
            self.ruleset.update(key, forwarding)
        try:
            await self._rewrite()
        except ApplyError as error:
            if not error.rules_at_fault:
                raise
            self.ruleset.hold_back()
            await self._rewrite()
            if len(suspects) == 1:
                self._quarantine[suspects[0][0]] = (suspects[0][1], error.why)
                key = suspects[0][0]
                extra = fields(
                    Event.SERVICE_QUARANTINED, service=key.service, cause="kernel", reason=error.why
                )
                log.error("%s is quarantined: %s", key.service_port, error.why, extra=extra)
                return
            middle = len(suspects) // 2
            await self._reapply(suspects[:middle])
            await self._reapply(suspects[middle:])

    async def _rewrite(self) -> None:
        await self._write(await self.plan())


def _refuse_beside_kube_proxy(saved: str, family: Family) -> None:
    if f":{KUBE_PROXY_CANARY} " in saved:
        raise ApplyError(
            f"chain_prefix KUBE is refused for {family}",
            f"a kube-proxy is at work on this host (chain {KUBE_PROXY_CANARY})",
            "use another chain_prefix, or force_chain_prefix: true",
        )
