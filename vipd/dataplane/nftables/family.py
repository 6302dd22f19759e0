"""Programs one address family's table: reads it, writes plans, and finds the forwarding at fault.

A transaction that the kernel refuses is planned anew from what is read again: another program may have
changed the table. If that is refused too, the frame is tried without forwardings; then these, in halves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from vipd.dataplane.base import ApplyError
from vipd.dataplane.engine import Difference, ObjectId, Objects
from vipd.dataplane.family import (
    LARGE,
    FamilyProgrammer,
    bisect,
    without_former_frontends,
    without_removed,
)
from vipd.dataplane.nftables.codec import deleted_counts, element_batch
from vipd.dataplane.nftables.layout import (
    DISPATCH_MAP,
    FLOWS,
    TABLE_COMMENT,
    NftSet,
    refused_flows,
)
from vipd.dataplane.nftables.options import TableOptions, table_name
from vipd.dataplane.nftables.plan import Plan, Transaction, removals
from vipd.dataplane.nftables.probe import Capabilities, probe, shortcomings
from vipd.dataplane.nftables.reader import OWNED, TableReader
from vipd.dataplane.nftables.table import CHAIN, SET, WantedTable, as_read
from vipd.dataplane.nftables.tools import Nft, apply_transaction, check_transaction
from vipd.dataplane.nftables.writer import ElementWriter
from vipd.dataplane.programs import Programs, require_found
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import Sockets
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

log = logging.getLogger(__name__)

T = TypeVar("T")

Attempt = Callable[[Sequence[ForwardingKey]], Awaitable[None]]
"""Writes some forwardings, or checks whether they are taken. Raises ApplyError."""

FULL = 0.9
"""The part of a set of counts from which on status warns."""
COUNTS_A_DELETION = 100
"""The kernel answers with a message for each, which must fit into the socket's buffer together."""

_TABLE = ("table", "")
"""The object whose text is the table's comment."""
_IN_DOUBT = "in doubt"
"""Stands for the rules of a chain that has to be written again, whatever their comments say."""


class FamilyTable(FamilyProgrammer[WantedTable, Plan]):
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
        self.desired = WantedTable(TableOptions.of(settings, family))
        self._engine = self.desired.engine
        self._abilities: Capabilities | None = None
        self._probed: Nft | None = None
        """The program with which the features were probed."""

    def invalidate(self, names: Collection[str]) -> None:
        """Exactly these chains and sets may have changed. An empty name: the table."""
        self._invalid = self._invalid or "" in names
        self._engine.doubted.update(names)
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
        needed = len(self.desired) > 0 or not self._engine.unknown
        await self._nft.refresh(needed=needed)
        if isinstance(self._nft.found, ApplyError) and not needed:
            return Plan(self.desired.options)
        nft = require_found(self._nft.found)
        if self._invalid:
            self._reset()
        if len(self.desired):
            await self._prepare(nft)
        if self._engine.unknown or self._engine.doubted:
            doubted = self._engine.take_doubt()
            plan = await asyncio.to_thread(
                self._with_reader, partial(self._read_and_compare, doubted=doubted)
            )
        else:
            large = self.desired.changes > LARGE
            plan = await asyncio.to_thread(self._compare) if large else self._compare()
        if not plan:
            self.desired.commit()
        return plan

    async def survey(self) -> Objects | None:
        """The kernel's current state; the cached state does not change. None: no nft, and nothing
        wanted. Raises ApplyError."""
        if isinstance(self._nft.found, ApplyError) and not len(self.desired):
            return None
        return await asyncio.to_thread(self._with_reader, self._read)

    def difference(self, surveyed: Objects | None) -> Plan:
        """The plan for a kernel in the surveyed state."""
        return Plan(self.desired.options) if surveyed is None else self._plan_for(surveyed)[0]

    async def apply(self, plan: Plan) -> None:
        """Write a plan. Raises ApplyError when no single forwarding is to blame."""
        if not plan:
            return
        try:
            try:
                await self._write(plan)
            except ApplyError as error:
                if not error.rules_at_fault:
                    raise
                # Another program may have changed what the plan was made from: an element to delete is gone.
                await self._write_again()
            self.desired.commit()
        except BaseException as error:
            # Some of it may have been written, also if this task was cancelled: read again first.
            self._engine.unknown = True
            if isinstance(error, ApplyError) and await asyncio.to_thread(self._is_owned):
                table = self.desired.options.table
                hint = f"table {table} belongs to another process, and none else may change it: end that one"
                raise ApplyError(error.what, error.why, hint) from None
            raise
        self._logged = {key: why for key, why in self._logged.items() if key in self._quarantine}

    async def _write_again(self) -> None:
        self._engine.unknown = True
        plan = await self.plan()
        try:
            await self._write(plan)
        except ApplyError as error:
            if not error.rules_at_fault:
                raise
            # When nft takes nothing at all, no forwarding is to blame.
            await self._require_nft(require_found(self._nft.found), error)
            await self._blame(error)

    async def _blame(self, error: ApplyError) -> None:
        """Quarantine the forwardings that are not taken, and write all others. Raises ApplyError when none is
        to blame."""
        kernel = dict(await asyncio.to_thread(self._with_reader, self._read))
        plan, _ = self._plan_for(kernel)
        attempt: Attempt = partial(self._attempt, kernel)
        if plan.replaces:
            # The old table serves until a new one is taken. A check misses some of what is refused.
            kernel, attempt = {}, partial(self._check_replacement, plan)
        await attempt([])  # the frame: if that is refused, nobody is to blame
        suspects = await asyncio.to_thread(self._engine.keys_of, plan.change)
        self._log_search(error, suspects)
        refused = await bisect(suspects, attempt)
        if plan.replaces and not refused:
            kernel = await self._replace_by_frame(plan)
            attempt = partial(self._attempt, kernel)
            refused = await bisect(suspects, attempt)
        await self._set_aside(dict(refused), kernel, attempt)
        self._engine.unknown = True
        plan = await self.plan()
        try:
            await self._write(plan)
        except ApplyError as left:
            if not left.rules_at_fault:
                raise
            what = "what is left without the quarantined services is not taken"
            raise ApplyError("nft failed", f"{what}: {left.why}") from None

    async def _set_aside(
        self, refused: Mapping[ForwardingKey, str], kernel: Objects, attempt: Attempt
    ) -> None:
        """Quarantine these: what the kernel has stays, but for frontends that they have not any more. Where
        another program has deleted that, a backend that a forwarding has not any more must not come back."""
        lost = []
        for key, why in refused.items():
            held = self._engine.wanted.get(key)
            before = without_former_frontends(self._engine.written.get(key), held)
            if before is None or not self._has(kernel, before):
                before = without_removed(before, held)
                lost.append(key)
            self.desired.update(key, before)
            self._quarantine_forwarding(key, held, why)
        for key, _ in await bisect(lost, attempt):
            self.desired.update(key, None)

    def _has(self, kernel: Objects, forwarding: Forwarding) -> bool:
        """Whether the kernel has all that a forwarding needs."""
        own, shared = self.desired.compile(forwarding)
        texts = {**own, **{name: each.text for name, each in shared.items()}}
        return all(
            text is None or kernel.get(name) in (text, as_read(text) if name[0] == CHAIN else text)
            for name, text in texts.items()
        )

    async def _attempt(self, kernel: dict[ObjectId, str], keys: Sequence[ForwardingKey]) -> None:
        """Write what the kernel lacks of these forwardings; nothing is removed yet."""
        wanted = self._engine.objects_of(keys)
        lacking = {name: text for name, text in wanted.items() if kernel.get(name) != text}
        change = Difference({name: kernel[name] for name in lacking if name in kernel}, lacking)
        plan = Plan(self.desired.options, change, self.desired.sets, exists=bool(kernel))
        for transaction in plan.transactions():
            await self._transact(transaction)
            if transaction.commands:
                kernel.update(plan.structure())
            kernel.update(transaction.added)

    async def _check_replacement(self, plan: Plan, keys: Sequence[ForwardingKey]) -> None:
        """Have the kernel check, without effect, the replacement of the table with these forwardings."""
        change = Difference({}, self._engine.objects_of(keys))
        for transaction in replace(plan, change=change).transactions():
            await check_transaction(transaction.text(), self._run)

    async def _replace_by_frame(self, plan: Plan) -> dict[ObjectId, str]:
        frame = dict(self._engine.frame())
        for transaction in replace(plan, change=Difference({}, frame)).transactions():
            await self._transact(transaction)
        return {_TABLE: TABLE_COMMENT, **frame}

    async def _require_nft(self, nft: Nft, error: ApplyError) -> None:
        try:
            await probe(nft, self.desired.options, self._run)
        except ApplyError:
            raise error from None

    async def collect_garbage(self) -> None:
        """Delete the chains and sets that are no longer referenced. Raises ApplyError."""
        if self._engine.unknown or self._invalid or not self._engine.left or not self._engine.in_use:
            return
        for text in removals(self.desired.options.table, self._engine.left):
            await apply_transaction(text, self._run)
        self.desired.collected()

    async def counters(self) -> dict[tuple[str, ...], int]:
        """New flows by frontend (address, protocol, port) and endpoint (address, port)."""
        if not self._holds(FLOWS.name):
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
        if not self._holds(nft_set.name):
            return {}
        table, found = table_name(self._settings.chain_prefix), dict[tuple[str, ...], int]()
        for at in range(0, len(keys), COUNTS_A_DELETION):
            part = [((nft_set.name, " . ".join(k)), "") for k in keys[at : at + COUNTS_A_DELETION]]
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
        counting = {limit: held for limit in Limit if self._holds((held := refused_flows(limit)).name)}
        if not counting:
            return {}

        def read(reader: TableReader) -> dict[tuple[str, ...], int]:
            return {
                (*frontend, limit): flows
                for limit, held in counting.items()
                for frontend, flows in self._read_counts(reader, held).items()
            }

        return await asyncio.to_thread(self._with_reader, read)

    def _holds(self, set_name: str) -> bool:
        """Whether the table is known to have a set."""
        known = not self._engine.unknown and self._engine.in_use
        return known and self._engine.text_of((SET, set_name)) is not None

    def _reconfigure(self, options: TableOptions) -> None:
        if options != self.desired.options:
            self.desired.reconfigure(options)

    def _forget_installed(self) -> None:
        self._engine.unknown = True

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

    def _read(self, reader: TableReader, doubted: Collection[str] | None = None) -> Objects:
        """The objects in the kernel, none without a table; elements of sets in doubt (None: of all). A chain
        has its wanted text, if the digests are those of that."""
        structure = reader.structure()
        if structure.comment is None:
            return {}
        kernel: dict[ObjectId, str] = {_TABLE: structure.comment}
        kernel.update(((SET, name), comment) for name, comment in structure.sets.items())
        for name, chain in structure.chains.items():
            hook = f"{chain.hook[0]} {chain.hook[1]}" if chain.hook else ""
            in_doubt = doubted is not None and name in doubted
            text = "\n".join((hook, *((_IN_DOUBT,) if in_doubt else chain.rules)))
            wanted = self._engine.text_of((CHAIN, name))
            kernel[CHAIN, name] = wanted if wanted is not None and as_read(wanted) == text else text
        to_read = [
            nft_set
            for nft_set in self.desired.element_sets()
            if (doubted is None or nft_set.name in doubted or nft_set is DISPATCH_MAP)
            and structure.sets.get(nft_set.name) == nft_set.digest(self._family)
        ]
        kernel.update(reader.elements(to_read))
        return kernel

    def _read_and_compare(self, reader: TableReader, doubted: Collection[str] | None) -> Plan:
        kernel = self._read(reader, doubted)

        def covers(name: ObjectId) -> bool:
            kind = name[0]
            return (
                kind in (SET, CHAIN, DISPATCH_MAP.name)
                or kind in (doubted or ())
                or (SET, kind) not in kernel
            )

        covered = covers if doubted is not None and kernel else None
        plan, left = self._plan_for(kernel, covered)
        self._engine.observe(left, None if plan.obstacle else covered)
        return plan

    def _plan_for(
        self, kernel: Objects, covers: Callable[[ObjectId], bool] | None = None
    ) -> tuple[Plan, dict[ObjectId, str]]:
        """The plan for a kernel with these objects, and the lasting ones that nothing wants. `covers` tells
        what was read; None: everything."""
        options, engine = self.desired.options, self._engine
        if not engine.wanted:
            return Plan(options, obstacle=kernel), {}
        if kernel and self._must_replace(kernel):
            change, _ = engine.compare({})
            return Plan(options, change, self.desired.sets, exists=False, obstacle=kernel), {}
        known = {name: text for name, text in kernel.items() if name != _TABLE}
        change, left = engine.compare(known, covers)
        return Plan(options, change, self.desired.sets, exists=bool(kernel), parts_late=True), left

    def _must_replace(self, kernel: Objects) -> bool:
        """Whether this table cannot be repaired piece by piece."""
        for name, text in kernel.items():
            if name[0] not in (SET, CHAIN) or (wanted := self._engine.text_of(name)) is None:
                continue
            if wanted.partition("\n")[0] != text.partition("\n")[0]:
                return True
        return kernel[_TABLE] != TABLE_COMMENT

    def _compare(self) -> Plan:
        """The difference from what was last written."""
        engine, options = self._engine, self.desired.options
        if not engine.wanted:
            return Plan(options, obstacle={_TABLE: TABLE_COMMENT} if engine.in_use else {})
        change = engine.difference()
        parts_late = bool(change.removed) and any(map(self.desired.moves, engine.dirty))
        return Plan(options, change, self.desired.sets, exists=engine.in_use, parts_late=parts_late)

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

    async def _write(self, plan: Plan) -> None:
        """Write a plan. Raises ApplyError."""
        require_found(self._nft.found)
        for transaction in plan.transactions():
            await self._transact(transaction)
        for text in plan.parting():
            await apply_transaction(text, self._run)

    async def _transact(self, transaction: Transaction) -> None:
        """Transactions of elements alone go over netlink; nft writes all others, and what is refused."""
        # Beside the event loop: sixty thousand elements take a tenth of a second to encode.
        large = transaction.size > LARGE
        batch = await asyncio.to_thread(self._batch, transaction) if large else self._batch(transaction)
        if batch is None or not await self._elements.write(batch):
            await apply_transaction(await asyncio.to_thread(transaction.text), self._run)

    def _batch(self, transaction: Transaction) -> bytes | None:
        """The netlink messages for a transaction of elements; None for others."""
        if transaction.commands:
            return None
        name, deleted, added = table_name(self._settings.chain_prefix), transaction.deleted, transaction.added
        return element_batch(name, self._family, self.desired.sets, deleted.items(), added.items())
