"""Follows etcd: lists at a revision, watches from the next one on, and probes a stream that is silent.

A watch may fail silently (a frozen member, a cut cable, a member that lost its cluster). A probe every 30
seconds detects that: it is a read that the watched member must answer, and that shows whether keys were
written or counted which the watch has not reported. Everything is listed anew every ten minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from vipd.declaration.problems import printable
from vipd.host.supervisor import Backoff, LoopState, until_first_ends
from vipd.model import limits
from vipd.sources.etcd.client import EtcdClient, Listing
from vipd.sources.etcd.errors import CompactedError, EndpointError, EtcdError, MalformedAnswerError
from vipd.sources.etcd.keys import EtcdKeys, KeyWrite, StoreChange
from vipd.sources.etcd.messages import Header, KeyRange, KeyValue, RangeResponse
from vipd.sources.etcd.snapshot_file import StoredKey
from vipd.sources.etcd.values import REFUSED, FolderBudget, Layout, read_value, short_key
from vipd.sources.etcd.watch import Watch, WatchBatch

log = logging.getLogger(__name__)

THREAD_MIN_VALUES = 50
THREAD_MIN_BYTES = 20_000
"""From this many values or bytes on they are read in a thread, so that the loop continues."""


@dataclass(frozen=True, slots=True)
class WatchIntervals:
    """Durations, in seconds."""

    probe: float = 30.0
    grace: float = 5.0
    """For a watch to report what a probe has seen."""
    relist: float = 600.0
    initial_backoff: float = 0.2
    max_backoff: float = 30.0


class RelistError(EtcdError):
    """The known state cannot be continued: the store is another one, or changes were missed."""


class ListWatcher:
    """Keeps `keys` equal to the store. `changed` is called after every difference."""

    def __init__(
        self,
        client: EtcdClient,
        keys: EtcdKeys,
        layout: Layout,
        changed: Callable[[], None],
        random: Random,
        times: WatchIntervals,
    ) -> None:
        self._client, self._keys, self._layout, self._changed = client, keys, layout, changed
        self._random, self._times = random, times
        self._ranges = layout.ranges()
        self._positions: dict[KeyRange, int] = {}
        self._lock = asyncio.Lock()
        self._budget = FolderBudget(layout)
        self._size = 0
        """Bytes of all keys and values, at most."""
        self.loop_state = LoopState(
            Backoff(times.initial_backoff, times.max_backoff, jitter=0.5), reported_elsewhere=True
        )
        """How the loop is run, and its state: its fault is the source's."""
        self.endpoint = ""
        """The watched member; empty while there is none."""
        self.last_contact: float | None = None
        """When the keys were last known to equal the store's, by the loop's clock."""
        self.store_revision = 0
        """The newest revision that any answer has reported."""
        self.listed = asyncio.Event()
        """Set once the store has been listed."""

    @property
    def applied_revision(self) -> int:
        """The store's revision up to which everything is known; 0: none in this run."""
        return max(self._positions.values(), default=0)

    async def run(self) -> None:
        """Follow until that fails. Raises EtcdError; run it again then, with `loop_state`."""
        try:
            await self._follow()
        except (CompactedError, RelistError):
            self._positions.clear()
            raise
        except MalformedAnswerError:
            # Another member may work; a list skips what this one cannot report.
            self._client.connection.mark_failed(self.endpoint)
            self._positions.clear()
            raise
        finally:
            self.endpoint = ""

    async def _follow(self) -> None:
        """List if need be, watch until something fails. Raises EtcdError."""
        if not self._positions:
            await self._list()
        async with contextlib.AsyncExitStack() as stack:
            watches = [
                await stack.enter_async_context(self._client.watch(keys, at + 1))
                for keys, at in self._positions.items()
            ]
            # If one watch has another member than the rest, the first probe detects it.
            self.endpoint = watches[0].endpoint
            work = [asyncio.create_task(self._probe_periodically(watches), name="probe etcd")]
            work += [asyncio.create_task(self._read(watch), name=f"watch {watch.keys}") for watch in watches]
            await until_first_ends(work)

    async def _read(self, watch: Watch) -> None:
        async for changes in watch:
            await self._on_events(changes)

    async def _probe_periodically(self, watches: Sequence[Watch]) -> None:
        """Probe at once, because a watch of a future revision is silent, and then from time to time."""
        clock = asyncio.get_running_loop().time
        listed = clock()
        while True:
            await self._probe(watches)
            self.loop_state.clear_fault()
            await asyncio.sleep(self._times.probe * self._random.uniform(0.8, 1.0))
            if clock() - listed >= self._times.relist:
                if self._keys.retry_failed_reads():
                    self._changed()
                await self._list()
                listed = clock()

    async def _probe(self, watches: Sequence[Watch]) -> None:
        """Check that the watches still report everything. Raises EtcdError if they do not."""
        behind = await self._lagging_ranges(watches)
        if not behind:
            return
        await asyncio.sleep(self._times.grace)
        still = await self._lagging_ranges(watches)
        if any(behind[keys] == still.get(keys) for keys in behind):
            self._client.connection.mark_failed(self.endpoint)
            raise RelistError(f"a watch at {self.endpoint} does not tell what is written")

    async def _lagging_ranges(self, watches: Sequence[Watch]) -> dict[KeyRange, int]:
        """The ranges with more keys stored than reported, each with the last reported revision."""
        before = dict(self._positions)
        header, found = await self._client.changed_since(self._ranges, min(before.values()))
        self._same_store(header, max(before.values()))
        for watch in watches:
            if watch.endpoint != self._client.connection.endpoint:
                raise EndpointError(f"{watch.endpoint} does not answer")
        async with self._lock:
            told = dict(zip(self._ranges, found, strict=True))
            behind = {keys: self._positions[keys] for keys in told if self._lags(keys, told[keys])}
            for keys in told.keys() - behind.keys():
                # Keys that were added and deleted in between make no difference, and are skipped when
                # reported.
                self._positions[keys] = max(self._positions[keys], header.revision)
        if not behind:
            self._contact(header)
        return behind

    def _lags(self, keys: KeyRange, found: RangeResponse) -> bool:
        newer = any(kv.mod_revision > self._positions[keys] for kv in found.kvs)
        start = keys.start.decode()
        return newer or found.count != self._keys.count(start) + self._budget.left_out(start)

    def _same_store(self, header: Header, revision: int) -> None:
        """Raises RelistError. `revision`: one that the store had before the request."""
        if header.cluster_id != self._keys.cluster:
            raise RelistError(f"cluster {header.cluster_id} answers, and not {self._keys.cluster}")
        if header.revision < revision:
            raise RelistError(f"the store went back from revision {revision} to {header.revision}")

    async def _list(self) -> None:
        """Read the whole store at one revision."""
        live = dict(self._positions)
        before = max(live.values(), default=self._keys.revision)
        known = frozenset(key for key, kept in self._keys.kept.items() if not kept.held)
        budget = await asyncio.to_thread(FolderBudget, self._layout, known)

        def shorten(kv: KeyValue) -> KeyValue | None:
            return budget.shortened(kv, known=_text(short_key(kv.key)) in known)

        listing = await self._client.list(self._ranges, shorten=shorten)
        header = listing.header
        foreign = bool(self._keys.cluster) and (
            header.cluster_id != self._keys.cluster or header.revision < before
        )
        foreign = foreign or await self._history_replaced(listing)
        async with self._lock:
            if live and not foreign and header.revision < self.applied_revision:
                return  # the watch has reported more in the meantime
            change = await self._difference(listing, foreign)
            missed = [w for w in change.written if w.mod_revision <= min(live.values(), default=0)]
            if missed and not foreign:
                first = printable(missed[0].key)
                log.warning("the watch of etcd had missed %d keys, such as %s", len(missed), first)
            self._positions = dict.fromkeys(self._ranges, header.revision)
            self._size = sum(len(kv.key) + len(kv.value) for kv in listing.kvs)
            budget.forget(change.removed & known)
            self._budget = budget
            self._apply(change)
        self.listed.set()
        self._contact(header)

    async def _history_replaced(self, listing: Listing) -> bool:
        """Whether the store has another history than the known one: a backup was restored, and then written
        past its former revision. Raises EtcdError.

        Existing keys are compared with their known state; of the deleted ones the newest is read
        at the revision at which it was written. If that was compacted, its history is unknown.
        """
        kept = {key: k for key, k in self._keys.kept.items() if not k.held}
        found = {_text(kv.key): kv.mod_revision for kv in listing.kvs}
        if any(found.get(key, k.mod_revision) < k.mod_revision for key, k in kept.items()):
            return True
        gone = [key for key in kept if key not in found and "\0" not in key]  # a shortened key is in no store
        if not gone:
            return False
        newest = max(gone, key=lambda key: kept[key].mod_revision)
        written = kept[newest].mod_revision
        try:
            then = await self._client.range(
                KeyRange(newest.encode(errors="surrogateescape")), revision=written
            )
        except CompactedError:
            return False
        return not any(kv.mod_revision == written for kv in then.kvs)

    async def _difference(self, listing: Listing, foreign: bool) -> StoreChange:
        if len(listing.kvs) < THREAD_MIN_VALUES:
            written, removed = self._diff(dict(self._keys.kept), listing, foreign)
        else:
            kept = dict(self._keys.kept)  # removals may be accepted concurrently
            written, removed = await asyncio.to_thread(self._diff, kept, listing, foreign)
        header = listing.header
        return StoreChange(
            header.cluster_id, header.revision, await self._parse_values(written), removed, foreign
        )

    @staticmethod
    def _diff(
        kept: Mapping[str, StoredKey], listing: Listing, foreign: bool
    ) -> tuple[dict[str, KeyValue], frozenset[str]]:
        """The keys that differ from their known state, and those that are gone."""
        found = {_text(kv.key): kv for kv in listing.kvs}
        written = {
            key: kv
            for key, kv in found.items()
            if (known := kept.get(key)) is None
            or known.held
            or known.mod_revision != kv.mod_revision
            or known.create_revision != kv.create_revision
            or ((foreign or known.value.startswith(REFUSED)) and known.value != _value(kv))
        }
        return written, frozenset(key for key, k in kept.items() if not k.held and key not in found)

    async def _on_events(self, changes: WatchBatch) -> None:
        """Apply the changes that a watch reports, of several revisions only the outcome."""
        async with self._lock:
            position = self._positions[changes.keys]
            fresh = [event for event in changes.events if event.kv.mod_revision > position]
            self.store_revision = max(self.store_revision, changes.header.revision)
            if not fresh:
                return
            last = {_text(short_key(event.kv.key)): event for event in fresh}
            removed = frozenset(key for key, event in last.items() if event.deleted)
            for key in removed:  # first: they make room
                self._budget.remove(key, self._present(key))
            written = self._shortened({key: event.kv for key, event in last.items() if not event.deleted})
            revision = fresh[-1].kv.mod_revision
            self._check_size(written)
            change = StoreChange(self._keys.cluster, revision, await self._parse_values(written), removed)
            self._positions[changes.keys] = revision
            self._apply(change)

    def _shortened(self, written: dict[str, KeyValue]) -> dict[str, KeyValue]:
        """These keys as they are kept, without those that are left out."""
        kept: dict[str, KeyValue] = {}
        for key, kv in written.items():
            known = self._present(key)
            if (short := self._budget.shortened(kv, before=known)) is not None:
                kept[key] = short
        return kept

    def _present(self, key: str) -> str | None:
        """The value that a key has in the store, as it is kept; None if it is not there, or left out."""
        known = self._keys.kept.get(key)
        return None if known is None or known.held else known.value

    def _check_size(self, written: dict[str, KeyValue]) -> None:
        """Check that there is room for these: otherwise a listing reports the problem. Raises
        RelistError."""
        fresh = sum(len(kv.key) + len(kv.value) for kv in written.values())
        if self._size + fresh > limits.ETCD_BYTES:
            # Values overwritten or removed since the last time are counted there, too.
            kept = self._keys.kept.items()
            self._size = sum(len(key) + len(each.value) for key, each in kept if key not in written)
        self._size += fresh
        if self._size > limits.ETCD_BYTES or len(self._keys.kept) > limits.ETCD_KEYS:
            raise RelistError("the keys together are larger than what is followed")

    async def _parse_values(self, written: dict[str, KeyValue]) -> tuple[KeyWrite, ...]:
        size = sum(len(kv.value) for kv in written.values())
        if len(written) < THREAD_MIN_VALUES and size < THREAD_MIN_BYTES:
            return tuple(self._parsed(written.items()))
        return tuple(await asyncio.to_thread(lambda: list(self._parsed(written.items()))))

    def _parsed(self, items: Iterable[tuple[str, KeyValue]]) -> Iterable[KeyWrite]:
        for key, kv in items:
            value = _value(kv)
            yield KeyWrite(
                key, value, kv.mod_revision, read_value(self._layout, key, value), kv.create_revision
            )

    def _apply(self, change: StoreChange) -> None:
        if self._keys.apply(change, asyncio.get_running_loop().time()):
            self._changed()

    def _contact(self, header: Header) -> None:
        self.store_revision = header.revision
        self.last_contact = asyncio.get_running_loop().time()


def _text(key: bytes) -> str:
    """A key as text. Bytes that are no UTF-8 become lone surrogates, so that no two keys are the same."""
    return key.decode(errors="surrogateescape")


def _value(kv: KeyValue) -> str:
    return kv.value.decode(errors="surrogateescape")
