"""Programs one address family's rules: the desired ones, the known state of the kernel, and the plan between.

A restore that fails because of its rules is retried in parts (`vipd.dataplane.family`): all changes
since the last good write are reverted, and then programmed again in halves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from vipd.dataplane.base import ApplyError
from vipd.dataplane.family import LARGE, FamilyProgrammer, bisect, without_removed
from vipd.dataplane.iptables.base_chains import entry_jumps
from vipd.dataplane.iptables.counters.counter import RuleCounter
from vipd.dataplane.iptables.digest import text_of
from vipd.dataplane.iptables.jump_order import JumpNeighbours, JumpOrder
from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.options import KUBE_PREFIX, RuleOptions
from vipd.dataplane.iptables.other_variant import KeptVariants, OtherVariantRules
from vipd.dataplane.iptables.plan import Installed, Plan, make_plan
from vipd.dataplane.iptables.probe import Capabilities, probe, shortcomings
from vipd.dataplane.iptables.reading import absent_tables, read_all, read_called, read_chain
from vipd.dataplane.iptables.restore_text import Batches
from vipd.dataplane.iptables.ruleset import DesiredChains, Ruleset
from vipd.dataplane.iptables.tools import Tools, find_tools, program_names, restore, save
from vipd.dataplane.iptables.watch.external_change import ENTRIES
from vipd.dataplane.iptables.watch.poll import Expected, WatchedFamily
from vipd.dataplane.nftables.foreign_chains import in_iptables_way
from vipd.dataplane.programs import Programs, require_found
from vipd.host.host_changes import HostChanges
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

log = logging.getLogger(__name__)

READ_WHOLE_ABOVE = 64
"""Above this number of chains in doubt everything is read: a process for each would take longer."""

COLLECT_LATER_ABOVE = 5000
"""Chains above which deletions wait for `collect_garbage`."""

_LEGACY_COUNTS = (
    "{}: limits count connections from zero after every change of a nat rule: iptables-legacy writes the "
    "whole table; hint: iptables_variant: nft, or dataplane: nftables"
)

KUBE_PROXY_CANARY = "KUBE-PROXY-CANARY"

Suspects = Sequence[tuple[ForwardingKey, Forwarding | None]]


class FamilyRules(FamilyProgrammer[Ruleset, Plan]):
    """The rules of one family. Without tools it fails only when rules are wanted."""

    def __init__(
        self,
        family: Family,
        settings: Settings,
        record: HostChanges,
        run: Runner,
        counter: RuleCounter,
        kept: KeptVariants = tuple,
    ) -> None:
        """`counter` counts the flows of these rules: before a write it reads the counts that would be
        lost."""
        super().__init__(family, settings, record, run)
        self._counter = counter
        variant = settings.iptables_variant
        self.programs = Programs(program_names(family, variant), lambda: find_tools(family, variant, run))
        self.desired = Ruleset(RuleOptions.of(settings, family, random_fully=False))
        self._other_variant = OtherVariantRules(family, settings.chain_prefix, run, kept)
        self._names = Names(settings.chain_prefix)
        self._installed: Installed | None = None
        """None: unknown, so the next plan reads the kernel."""
        self._missing_tables: list[str] = []
        """`FAMILY TABLE` of tables that did not exist when the kernel was read."""
        self._neighbours: JumpNeighbours = {}
        """What was around vipd's jumps, also when the kernel's state has to be read anew."""
        self._unwritten = False
        """A plan for everything was made and not written: the next one must cover everything too."""
        self._in_doubt: set[ChainId] = set()
        """Chains that another program may have changed."""
        self._garbage: set[ChainId] = set()
        """Chains that are still there although nothing reaches them."""
        self._writes = 0
        self._writing = False
        self._capabilities: Capabilities | None = None
        self._wrote = False

    @property
    def tools(self) -> Tools | ApplyError:
        """The tools in use, or why none can be used."""
        return self.programs.found

    def version(self) -> str:
        """iptables as it names itself, or why there is none."""
        return str(self.tools) if isinstance(self.tools, ApplyError) else self.tools.version_text

    def _reconfigure(self, options: RuleOptions) -> None:
        self.desired.reconfigure(options)

    def _forget_installed(self) -> None:
        self._installed = None

    def invalidate(self, chains: Collection[ChainId]) -> None:
        """Exactly these chains may have changed: the next plan reads them alone."""
        known = [chain for chain in chains if chain in ENTRIES or self._names.owns(chain)]
        if len(known) > READ_WHOLE_ABOVE:
            self._invalid = True
        self._in_doubt.update(known)
        self._doubted = self._doubted or bool(known)

    def warnings(self) -> list[str]:
        """The effects on services of features that the kernel lacks."""
        found = [self._other_variant.warning] if self._other_variant.warning else []
        if self._capabilities:
            pinned, accepts = self.desired.services_with_affinity(), bool(self._settings.accept_forwarded)
            limited = self.desired.services_with_limits()
            if limited and isinstance(self.tools, Tools) and self.tools.legacy:
                found.append(_LEGACY_COUNTS.format(self._family))
            found += shortcomings(self._capabilities, self._family, pinned, limited, accepts=accepts)
        return found

    def watched(self) -> WatchedFamily | None:
        """How to watch for foreign changes of these rules; None without tools."""
        tools = self.tools
        if isinstance(tools, ApplyError):
            return None
        return WatchedFamily(self._family, tools.legacy, lambda: save(tools, self._run), self._expected)

    def _expected(self) -> Expected | None:
        if self._installed is None or self._writing or self._invalid:
            return None
        return Expected(self._writes, self._installed)

    async def find_tools(self) -> None:
        """Look for the programs, if that is due. After a change of programs the kernel's state is unknown."""
        wanted = self._wrote or bool(self.desired.shared())
        if not await self.programs.refresh(needed=wanted):
            return
        if not isinstance(self.tools, Tools):
            self._counter.stop(self._family)
            return
        save_counted = partial(save, self.tools, self._run, counters=True)
        self._counter.use(self._family, save_counted if self.tools.legacy else None)
        addresses = self.desired.options.node_port_addresses
        options = RuleOptions.of(self._settings, self._family, self.tools.random_fully)
        self.desired.reconfigure(replace(options, node_port_addresses=addresses))
        self._installed = self._capabilities = None
        self._writes += 1

    async def plan(self) -> Plan:
        """The plan of what must be written now. Raises ApplyError."""
        await self.find_tools()
        if isinstance(self.tools, ApplyError) and not (self._wrote or self.desired.shared()):
            return Plan()
        tools = require_found(self.tools)
        if self._invalid:
            self._reset()
        fresh = self._installed is None or self._unwritten
        installed = self._installed or await self._observe(tools)
        if self.desired.changes > LARGE:
            await asyncio.to_thread(self.desired.shared)  # the following code uses the cached result
        if self.desired.shared():
            await self._prepare(tools)
        self._installed = installed
        if fresh:
            self._garbage.clear()
            self._in_doubt.clear()
        else:
            await self._read_in_doubt(tools, installed)
        make = partial(self._plan, installed, everything=fresh)
        plan = await asyncio.to_thread(make) if fresh or self.desired.changes > LARGE else make()
        plan = replace(plan, other_variant=self._other_variant.plan)
        if not plan:
            self.desired.mark_clean()
        self._unwritten = bool(plan) if fresh else self._unwritten
        return plan

    def _plan(self, installed: Installed, *, everything: bool) -> Plan:
        """The plan to write for everything, or for what is dirty."""
        if everything:
            wanted = self._compare(installed)
        else:
            wanted = self._without_deletions(self.desired.dirty(), installed)
        return make_plan(wanted, installed, self._names, self._batches(), self.desired.digests())

    def _compare(self, installed: Installed) -> DesiredChains:
        """Everything, except for the forwardings that are installed."""
        installed.keep_digests(self.desired.digests())
        return self.desired.whole(installed.chains)

    async def survey(self) -> Installed | None:
        """The kernel's current state; the cached state does not change. None: no tools, and no rules
        wanted. Raises ApplyError."""
        if isinstance(self.tools, ApplyError) and not self.desired.shared():
            return None
        tools = require_found(self.tools)
        surveyed = await self._read(await save(tools, self._run), tools)
        surveyed.neighbours = dict(self._neighbours)
        return surveyed

    def difference(self, surveyed: Installed | None) -> Plan:
        """The plan for a kernel in the surveyed state."""
        if surveyed is None:
            return Plan()
        return make_plan(self._compare(surveyed), surveyed, self._names, self._batches())

    async def collect_garbage(self) -> None:
        """Delete the chains that nothing reaches and that no change waited for. Raises ApplyError."""
        if not self._garbage or self._installed is None or self._invalid:
            return
        gone = frozenset(self._garbage - self.desired.chains_in_use())
        self._garbage.clear()
        options = self.desired.options
        wanted = DesiredChains((), {}, entry_jumps(options), gone, options.chains_to_be_first)
        plan = make_plan(wanted, self._installed, self._names, self._batches())
        if plan:
            await self._write(plan, marks_clean=False)

    def _batches(self) -> Batches:
        return Batches.of(legacy=not isinstance(self.tools, ApplyError) and self.tools.legacy)

    def _without_deletions(self, wanted: DesiredChains, installed: Installed) -> DesiredChains:
        """In a large table one deletion makes iptables-nft-restore read every chain: 0.2 s of 0.25 s for one
        changed backend among 10,000 services. No packet reaches those chains, so they can wait for
        `collect_garbage`."""
        if len(installed.chains) <= COLLECT_LATER_ABOVE or not self.desired.shared():
            return wanted
        self._garbage |= wanted.obsolete
        return replace(wanted, obsolete=frozenset())

    async def apply(self, plan: Plan) -> None:
        """Write a plan. Raises ApplyError when no single forwarding is to blame."""
        await self._counter.before_write(self._family, plan.changes)
        try:
            if plan:
                await self._write(plan)
        except ApplyError as error:
            if not error.rules_at_fault:
                raise
            await self._write_again()
        self._counter.after_write(self._family, plan.changes)
        self._logged = {key: why for key, why in self._logged.items() if key in self._quarantine}

    async def _write_again(self) -> None:
        """Write what was refused, planned from rules that are read again: another program may have changed
        them. Raises ApplyError when no single forwarding is to blame."""
        try:
            await self._rewrite()
        except ApplyError as error:
            if not error.rules_at_fault:
                raise
            try:
                await self._bisect(error)
            except ApplyError as refused:
                if not refused.rules_at_fault:
                    raise
                hint = ""
                if isinstance(self.tools, Tools) and not self.tools.legacy:
                    prefix = self._settings.chain_prefix
                    hint = await asyncio.to_thread(in_iptables_way, self._family, prefix)
                raise ApplyError(refused.what, refused.why, hint) from None

    async def _read_in_doubt(self, tools: Tools, installed: Installed) -> None:
        chains, self._in_doubt = self._in_doubt, set()
        jumps = entry_jumps(self.desired.options)
        for chain in chains:
            try:
                rules = await read_chain(tools, self._names, chain, jumps.get(chain, ()), self._run)
            except ApplyError:
                self.invalidate_all()  # unread chains must not count as known
                raise
            holder = installed.chains if self._names.owns(chain) else installed.builtins
            holder.pop(chain, None)
            if rules is not None:
                holder[chain] = rules
                await self._note_jumps(tools, installed, chain, jumps.get(chain, ()))
        if chains:
            self.desired.invalidate(chains)

    async def _note_jumps(self, tools: Tools, installed: Installed, builtin: ChainId, jumps: Rules) -> None:
        """Remember what is around vipd's jumps in a chain that was just read; if one is missing, read what
        decides where it goes."""
        rules = installed.builtins.get(builtin, ())
        if builtin.table == "filter" and not set(jumps) <= set(rules):
            try:
                installed.foreign.update(await read_called(tools, self._names, rules, self._run))
            except ApplyError:
                self.invalidate_all()
                raise
        JumpOrder(self._names, installed.foreign, installed.neighbours).note(builtin, rules)

    async def _observe(self, tools: Tools) -> Installed:
        text = await save(tools, self._run)
        if self._settings.chain_prefix == KUBE_PREFIX and not self._settings.force_chain_prefix:
            _refuse_beside_kube_proxy(text, self._family)
        self._missing_tables = [f"{self._family} {table}" for table in absent_tables(text)]
        await self._other_variant.refresh(tools)
        installed = await self._read(text, tools)
        installed.neighbours = self._neighbours
        order = JumpOrder(self._names, installed.foreign, self._neighbours)
        for builtin, rules in installed.builtins.items():
            order.note(builtin, rules)
        return installed

    async def _read(self, saved: str, tools: Tools) -> Installed:
        jumps = entry_jumps(self.desired.options)
        return await read_all(saved, tools, self._names, self.desired.shared(), jumps, self._run)

    async def _prepare(self, tools: Tools) -> None:
        """Before the first write: record on disk that rules will exist, and probe this host's features."""
        self._record_rules(self._missing_tables)
        self._missing_tables = []
        if self._capabilities is None:
            await self._probe(tools)

    async def _probe(self, tools: Tools) -> None:
        self._capabilities = abilities = await probe(tools, self._names, self._family, self._run)
        options = self.desired.options
        self.desired.reconfigure(
            replace(
                options,
                affinity=abilities.affinity,
                accept_forwarded=options.accept_forwarded and abilities.flow_marks,
                flow_marks=abilities.flow_marks,
                ping=abilities.ping,
                limits=abilities.limits,
                random_fully=options.random_fully and abilities.random_fully,
            )
        )

    async def _write(self, plan: Plan, marks_clean: bool = True) -> None:
        assert isinstance(self.tools, Tools)  # noqa: S101 (a plan with work exists only where tools do)
        assert self._installed is not None  # noqa: S101
        self._writing = self._wrote = True
        try:
            for text in plan.restores:
                await restore(self.tools, text, self._run)
            if plan.other_variant:
                await self._other_variant.remove(plan.other_variant)
        except BaseException:
            # Some restores may have been applied, also if this task was cancelled: read again first.
            self._installed = None
            raise
        finally:
            self._writing = False
            self._writes += 1
        plan.record_applied(self._installed)
        order = JumpOrder(self._names, self._installed.foreign, self._neighbours)
        for change in plan.changes:
            if change.builtin:
                order.note(change.chain, text_of(change.after))
        if marks_clean:
            self._unwritten = False
            self.desired.mark_clean()

    async def _bisect(self, error: ApplyError) -> None:
        """Find which forwardings the kernel rejects, and program all others."""
        suspects = list(self.desired.revert().items())
        admitted = 0
        try:
            await self._take_back(suspects)
            await self._require_tools(error)
            await self._write_frame()
            self._log_search(error, [key for key, _ in suspects])
            for (key, forwarding), why in await bisect(suspects, self._reapply):
                self._quarantine_forwarding(key, forwarding, why)
            admitted = len(suspects)
        finally:
            if not admitted:
                for key, forwarding in suspects:
                    self.desired.update(key, forwarding)

    async def _take_back(self, suspects: Suspects) -> None:
        """Write the rules as they were before these changes. Where another program has deleted them, a
        backend that a service has not any more must not come back."""
        plan = await self.plan()
        assert self._installed is not None  # noqa: S101 (it was read for the plan)
        lost = self.desired.differing(self._installed.chains)
        own = self.desired.digests()
        if any(change.chain.table == "nat" and change.chain not in own for change in plan.changes):
            lost.update(key for key, _ in suspects)  # the way to the chains
        before = {f.key: f for f in self.desired.forwardings() if f.key in lost}
        reduced = {
            key: form
            for key, wanted in suspects
            if key in before and (form := without_removed(before[key], wanted)) != before[key]
        }
        for key, form in reduced.items():
            self.desired.update(key, form)
        await self._write(await self.plan() if reduced else plan)

    async def _write_frame(self) -> None:
        """Write what all services share. Raises ApplyError: then no service is to blame."""
        assert self._installed is not None  # noqa: S101 (all was just written)
        frame = self.desired.frame(self._installed.chains)
        if plan := make_plan(frame, self._installed, self._names, self._batches()):
            await self._write(plan, marks_clean=False)

    async def _require_tools(self, error: ApplyError) -> None:
        """Raise the error if the tool accepts no rules at all: then no service causes it."""
        assert isinstance(self.tools, Tools)  # noqa: S101 (something was written, so there are tools)
        try:
            await probe(self.tools, self._names, self._family, self._run)
        except ApplyError:
            raise error from None

    async def _reapply(self, suspects: Suspects) -> None:
        """Program these forwardings, all or, when it raises, none."""
        for key, forwarding in suspects:
            self.desired.update(key, forwarding)
        try:
            await self._rewrite()
        except ApplyError as error:
            if error.rules_at_fault:
                self.desired.revert()
                await self._rewrite()
            raise

    async def _rewrite(self) -> None:
        await self._write(await self.plan())


def _refuse_beside_kube_proxy(saved: str, family: Family) -> None:
    if f":{KUBE_PROXY_CANARY} " in saved:
        raise ApplyError(
            f"chain_prefix KUBE is refused for {family}",
            f"a kube-proxy is at work on this host (chain {KUBE_PROXY_CANARY})",
            "use another chain_prefix, or force_chain_prefix: true",
        )
