"""Programs one address family's table: the desired one, the known state of the kernel, and the plan between.

A transaction that fails because of its content is retried in parts (`vipd.dataplane.family`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from vipd.dataplane.base import ApplyError
from vipd.dataplane.family import LARGE, FamilyProgrammer, bisect, without_removed
from vipd.dataplane.nftables.codec import deleted_counts, element_batch
from vipd.dataplane.nftables.compile import ElementKey
from vipd.dataplane.nftables.layout import FLOWS, NftSet, refused_flows
from vipd.dataplane.nftables.options import TableOptions, table_name
from vipd.dataplane.nftables.plan import (
    FoundChain,
    Installed,
    Plan,
    Transaction,
    elements_text,
    make_plan,
    must_replace,
    removals,
)
from vipd.dataplane.nftables.probe import Capabilities, probe, shortcomings
from vipd.dataplane.nftables.reader import OWNED, TableReader
from vipd.dataplane.nftables.survey import Survey, difference, read_survey, service_sets
from vipd.dataplane.nftables.table import DesiredTable, Elements, Step
from vipd.dataplane.nftables.tools import Nft, apply_transaction, check_transaction
from vipd.dataplane.nftables.writer import ElementWriter
from vipd.dataplane.programs import Programs, require_found
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import Sockets
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family

log = logging.getLogger(__name__)

T = TypeVar("T")

FULL = 0.9
"""The part of a set of counts from which on status warns."""
COUNTS_A_DELETION = 100
"""The kernel answers with a message for each, which must fit into the socket's buffer together."""

_IN_DOUBT = FoundChain(None, ("doubted",))
"""Differs from every wanted chain, except in its hook."""


class FamilyTable(FamilyProgrammer[DesiredTable, Plan]):
    """The table of one family. Without nft it fails only when something is wanted."""

    def __init__(
        self,
        family: Family,
        nft: Programs[Nft],
        settings: Settings,
        record: HostChanges,
        run: Runner,
        sockets: Sockets,
    ) -> None:
        super().__init__(family, settings, record, run)
        self._nft, self._open, self._elements = nft, sockets.reading, ElementWriter(sockets.writing)
        self._counts = ElementWriter(sockets.writing)
        """Deletes counts beside whatever else is written."""
        self._fullness: dict[str, int] = {}
        """Number of elements of each set of counts that is nearly full."""
        self.desired = DesiredTable(TableOptions.of(settings, family))
        self._installed: Installed | None = None
        """Excludes elements. None: unknown, so the next plan reads all."""
        self._elements_known = False
        """The elements are those that were last written."""
        self._in_doubt: set[str] = set()
        """Chains and holders that another program may have changed."""
        self._abilities: Capabilities | None = None
        self._probed: Nft | None = None
        """The program with which the features were probed."""

    def invalidate(self, names: Collection[str]) -> None:
        """Exactly these chains and holders may have changed. An empty name: the table."""
        self._invalid = self._invalid or "" in names
        self._in_doubt.update(names)
        self._doubted = self._doubted or bool(names)

    def warnings(self) -> list[str]:
        """The effects on services of features that the kernel lacks."""
        if self._abilities is None:
            return []
        if self._abilities == Capabilities():  # mostly; each step asks
            return [*self._full_sets()]
        pinned = {f.key.service for f in self.desired.forwardings() if f.affinity_timeout is not None}
        limited = {f.key.service for f in self.desired.forwardings() if f.limits}
        known = shortcomings(self._abilities, self._family, sorted(pinned), sorted(limited))
        return [*known, *self._full_sets()]

    def _full_sets(self) -> Iterator[str]:
        for name, number in sorted(self._fullness.items()):
            what = "flows to further backends" if name == FLOWS.name else "refused flows at further addresses"
            where = f"the set {name} of the table {self.desired.options.table}"
            hint = "counts of removed backends go when the totals are on disk"
            yield f"{where} is nearly full, with {number} counts: {what} will not be counted; hint: {hint}"

    def version(self) -> str:
        """nft as it names itself, or why there is none."""
        found = self._nft.found
        return str(found) if isinstance(found, ApplyError) else found.version_text

    async def plan(self) -> Plan:
        """The plan of what must be written now. Raises ApplyError."""
        needed = len(self.desired) > 0 or self._installed is not None
        await self._nft.refresh(needed=needed)
        if isinstance(self._nft.found, ApplyError) and not needed:
            return Plan(self.desired.options.table)
        nft = require_found(self._nft.found)
        if self._invalid:
            self._reset()
        if len(self.desired):
            await self._prepare(nft)
        if self._must_read():
            plan = await self._read_and_compare()
        else:
            large = self.desired.changes > LARGE
            plan = await asyncio.to_thread(self._compare) if large else self._compare()
        if not plan:
            self._settle(plan)
        return plan

    async def survey(self) -> Survey | None:
        """The kernel's current state; the cached state does not change. None: no nft, and nothing
        wanted. Raises ApplyError."""
        if isinstance(self._nft.found, ApplyError) and not len(self.desired):
            return None
        holders = service_sets(self.desired)
        return await asyncio.to_thread(self._with_reader, lambda reader: read_survey(reader, holders))

    def difference(self, surveyed: Survey | None) -> Plan:
        """The plan for a kernel in the surveyed state."""
        return difference(self.desired, surveyed) if surveyed else Plan(self.desired.options.table)

    async def apply(self, plan: Plan) -> None:
        """Write a plan. Raises ApplyError when no single forwarding is to blame."""
        if not plan:
            return
        try:
            try:
                failed = await self._write(plan)
            except ApplyError as error:
                if not error.rules_at_fault:
                    raise
                # Another program may have changed what the plan was made from: an element to delete is gone.
                self._installed = None
                plan = await self.plan()
                failed = await self._write(plan, blame=True)
            if failed:
                await self._set_aside(failed)
            else:
                self._settle(plan)
        except BaseException as error:
            # Some of it may have been written, also if this task was cancelled: read again first.
            self._installed = None
            if isinstance(error, ApplyError) and await asyncio.to_thread(self._is_owned):
                table = self.desired.options.table
                hint = f"table {table} belongs to another process, and none else may change it: end that one"
                raise ApplyError(error.what, error.why, hint) from None
            raise
        self._logged = {key: why for key, why in self._logged.items() if key in self._quarantine}

    async def _set_aside(self, failed: Mapping[ForwardingKey, str]) -> None:
        """Quarantine these, and write what is left without them."""
        held = self.desired.revert(failed)
        for key, why in failed.items():
            self._quarantine_forwarding(key, held[key], why)
        # Elements that the failed ones shared with others may be missing now.
        self._installed = None
        plan = await self.plan()
        # Whose last rules another program has deleted: a backend that it has not any more must not come back.
        if lost := {key for step in plan.steps for key in step.keys if key in held and step.added}:
            before = {f.key: f for f in self.desired.forwardings() if f.key in lost}
            for key in lost:
                self.desired.update(key, without_removed(before.get(key), held[key]))
            self._installed = None
            plan = await self.plan()
        try:
            await self._write(plan)
        except ApplyError as error:
            if not error.rules_at_fault:
                raise
            what = "what is left without the quarantined services is not taken"
            raise ApplyError("nft failed", f"{what}: {error.why}") from None
        self._settle(plan)

    async def collect_garbage(self) -> None:
        """Delete the chains and maps that are no longer referenced. Not in the change itself: before 6.2 the
        kernel may count a just deleted element as a reference. Raises ApplyError."""
        installed, wanted = self._installed, self.desired.structure()
        if installed is None or self._invalid or not wanted.chains:
            return
        texts = removals(self.desired.options, wanted, installed)
        for text in texts:
            await apply_transaction(text, self._run)
        if texts:
            installed.chains = {n: c for n, c in installed.chains.items() if n in wanted.chains}
            installed.sets = {n: d for n, d in installed.sets.items() if n in wanted.sets}
            installed.dispatch_map = {
                n: v for n, v in installed.dispatch_map.items() if n in wanted.dispatch_map
            }

    async def counters(self) -> dict[tuple[str, ...], int]:
        """New flows by frontend (address, protocol, port) and endpoint (address, port)."""
        if self._installed is None or FLOWS.name not in self._installed.sets:
            return {}
        return await asyncio.to_thread(self._with_reader, lambda reader: self._read_counts(reader, FLOWS))

    def _read_counts(self, reader: TableReader, nft_set: NftSet) -> dict[tuple[str, ...], int]:
        found = reader.counters(nft_set)
        if len(found) > FULL * nft_set.size:
            self._fullness[nft_set.name] = len(found)
        else:
            self._fullness.pop(nft_set.name, None)
        return found

    async def delete_counts(
        self, nft_set: NftSet, keys: Sequence[tuple[str, ...]]
    ) -> dict[tuple[str, ...], int]:
        """Delete elements that packets have added; returns the last count of each that is deleted. Raises
        ApplyError."""
        if self._installed is None or nft_set.name not in self._installed.sets:
            return {}
        table, found = table_name(self._settings.chain_prefix), dict[tuple[str, ...], int]()
        for at in range(0, len(keys), COUNTS_A_DELETION):
            part = [(ElementKey(nft_set.name, " . ".join(k)), "") for k in keys[at : at + COUNTS_A_DELETION]]
            batch = element_batch(table, self._family, {nft_set.name: nft_set}, part, (), echo=True)
            echoes: list[bytes] = []
            # If one is missing, the kernel deletes none of them; the next reading lacks it.
            if await self._counts.write(batch, echoes):
                found.update(
                    deleted
                    for datagram in echoes
                    for deleted in deleted_counts(datagram, nft_set, self._family)
                )
        return found

    async def refused(self) -> dict[tuple[str, ...], int]:
        """Flows over each limit, by frontend (address, protocol, port) and limit."""
        there = self._installed.sets if self._installed else {}
        counting = {limit: held for limit in Limit if (held := refused_flows(limit)).name in there}
        if not counting:
            return {}

        def read(reader: TableReader) -> dict[tuple[str, ...], int]:
            return {
                (*frontend, limit): flows
                for limit, held in counting.items()
                for frontend, flows in self._read_counts(reader, held).items()
            }

        return await asyncio.to_thread(self._with_reader, read)

    def _reconfigure(self, options: TableOptions) -> None:
        if options != self.desired.options:
            self.desired = self.desired.reconfigured(options)
            self._elements_known = False

    def _must_read(self) -> bool:
        return self._installed is None or not self._elements_known or bool(self._in_doubt)

    def _forget_installed(self) -> None:
        self._installed = None

    async def _read_and_compare(self) -> Plan:
        doubtful, self._in_doubt = self._in_doubt, set()
        try:
            return await asyncio.to_thread(
                self._with_reader, lambda reader: self._compare_with(reader, doubtful)
            )
        except BaseException:
            self._installed = None  # also if this task was cancelled: doubts remain
            raise

    def _is_owned(self) -> bool:
        """Whether the table has the flag `owner` of another process, for as long as that runs."""
        kind, name = self.desired.options.table.split()
        try:
            with TableReader(None, open_socket=self._open) as reader:
                return bool(reader.table_flags().get((kind, name), 0) & OWNED)
        except ApplyError:
            return False

    def _with_reader(self, work: Callable[[TableReader], T]) -> T:
        with TableReader(self._family, table_name(self._settings.chain_prefix), self._open) as reader:
            return work(reader)

    def _compare_with(self, reader: TableReader, doubtful: Collection[str]) -> Plan:
        """The difference from the kernel; reads everything that is not known."""
        options, wanted = self.desired.options, self.desired.structure()
        everything = self._installed is None or not self._elements_known
        installed = self._installed = reader.structure()
        for name in installed.chains.keys() & doubtful:
            installed.chains[name] = replace(_IN_DOUBT, hook=installed.chains[name].hook)
        ours = service_sets(self.desired)
        if must_replace(options, wanted, installed) or installed.comment is None:
            self._elements_known = False
            return make_plan(options, wanted, installed, *self.desired.compare({}, ours))
        if not wanted.chains:
            return make_plan(options, wanted, installed, (), Step((), {}, {}))
        looked_at = ours if everything else {n: h for n, h in ours.items() if n in doubtful}
        self._elements_known = False  # until the difference is written
        found = reader.elements([h for n, h in looked_at.items() if n in installed.sets])
        steps, shared = self.desired.compare(found, looked_at)
        if not everything:
            steps, shared = _joined(*self.desired.dirty(), steps, shared, looked_at)
        return make_plan(options, wanted, installed, steps, shared)

    def _compare(self) -> Plan:
        """The difference from what was last written."""
        assert self._installed is not None  # noqa: S101 (else the kernel is read)
        return make_plan(
            self.desired.options, self.desired.structure(), self._installed, *self.desired.dirty()
        )

    def _settle(self, plan: Plan) -> None:
        """Everything wanted is in the kernel."""
        if plan.installed_after is not None:
            self._installed = plan.installed_after
        self._elements_known = True
        self.desired.mark_clean()

    async def _prepare(self, nft: Nft) -> None:
        """Before the first write: record on disk that rules will exist, and probe this host's features."""
        self._record_rules(())
        if self._probed != nft:
            wanted = TableOptions.of(self._settings, self._family)
            self._abilities = able = await probe(nft, wanted, self._run)
            self._probed = nft
            options = replace(
                self.desired.options,
                affinity=able.affinity,
                random_fully=wanted.random_fully and able.random_fully,
                ping=able.ping,
                counts=able.counts,
                limits=able.limits,
            )
            # In a thread: if this host lacks a feature, all forwardings are compiled again.
            await asyncio.to_thread(self._reconfigure, options)

    async def _write(self, plan: Plan, *, blame: bool = False) -> dict[ForwardingKey, str]:
        """Write a plan. With `blame` a transaction that is refused is searched for forwardings at fault:
        returns those that were not taken, and why. Raises ApplyError.

        Transactions of elements alone go over netlink; nft writes all others, and what the kernel refuses.
        """
        nft = require_found(self._nft.found)
        written = 0
        for number, transaction in enumerate(plan.transactions()):
            try:
                # Beside the event loop: sixty thousand elements take a tenth of a second to encode.
                large = transaction.size > LARGE
                batch = (
                    await asyncio.to_thread(self._batch, transaction) if large else self._batch(transaction)
                )
                if batch is None or not await self._elements.write(batch):
                    await apply_transaction(await asyncio.to_thread(transaction.text), self._run)
            except ApplyError as error:
                at_fault = error.rules_at_fault and any(step.keys for step in transaction.steps)
                if not blame or not at_fault:
                    raise
                # When nft takes nothing at all, no service is to blame.
                await self._require_nft(nft, error)
                self._log_search(error, [key for step in plan.steps[written:] for key in step.keys])
                has_structure = number > 0 and not plan.replaces
                if failed := await self._refused(plan, plan.steps[written:], structure_written=has_structure):
                    return {key: why for step, why in failed for key in step.keys}
                await self._transact_steps(plan.table, [plan.late])
                break
            written += len(transaction.steps)
        for text in plan.deferred_deletes():
            await apply_transaction(text, self._run)
        return {}

    def _batch(self, transaction: Transaction) -> bytes | None:
        """The netlink messages for a transaction of elements; None for others."""
        if transaction.commands:
            return None
        name, sets = table_name(self._settings.chain_prefix), self.desired.structure().sets
        try:
            return element_batch(name, self._family, sets, transaction.deleted(), transaction.added())
        except KeyError:  # an element of a set that is no longer wanted
            return None

    async def _require_nft(self, nft: Nft, error: ApplyError) -> None:
        try:
            await probe(nft, self.desired.options, self._run)
        except ApplyError:
            raise error from None

    async def _refused(
        self, plan: Plan, suspects: Sequence[Step], *, structure_written: bool
    ) -> list[tuple[Step, str]]:
        """The steps that are not taken, and why. If it returns none, all are written. Raises ApplyError."""
        # The old table serves until a new one is taken. A check misses some of what is refused.
        if plan.replaces and suspects:
            await self._check_replacement(plan, [])  # what all share: if that is refused, nobody is to blame
        if plan.replaces and (failed := await bisect(suspects, partial(self._check_replacement, plan))):
            return failed
        if not structure_written and (common := plan.without_steps().text()):
            await apply_transaction(common, self._run)
        return await bisect(suspects, partial(self._transact_steps, plan.table))

    async def _check_replacement(self, plan: Plan, steps: Sequence[Step]) -> None:
        """Have the kernel check, without effect, the replacement of the table with some of the steps."""
        text = plan.without_steps().text() + elements_text(plan.table, steps)
        await check_transaction(text, self._run)

    async def _transact_steps(self, table: str, steps: Sequence[Step]) -> None:
        """Write some steps in one transaction. A second plan does the rest."""
        if text := elements_text(table, steps):
            await apply_transaction(text, self._run)


def _joined(
    steps: list[Step], shared: Step, read: list[Step], read_shared: Step, looked_at: Collection[str]
) -> tuple[list[Step], Step]:
    """Differences from what was written, without those of holders that were read, which have current ones."""

    def unread(elements: Elements) -> Elements:
        return {slot: value for slot, value in elements.items() if slot.set_name not in looked_at}

    def others(step: Step) -> Step:
        return Step(step.keys, unread(step.deleted), unread(step.added), unread(step.deferred_deletes))

    def merged(one: Step, other: Step) -> Step:
        return Step(
            one.keys,
            {**one.deleted, **other.deleted},
            {**one.added, **other.added},
            {**one.deferred_deletes, **other.deferred_deletes},
        )

    by_key: dict[tuple[ForwardingKey, ...], Step] = {}
    for step in (*map(others, steps), *read):
        by_key[step.keys] = merged(by_key[step.keys], step) if step.keys in by_key else step
    return [step for step in by_key.values() if step], merged(others(shared), read_shared)
