"""Services declared in etcd, one key each, followed as they change.

vipd lists the keys at a revision, watches from the next one on, and probes a watch that is silent: it may
fail silently (a frozen member, a cut cable, a member that lost its cluster). A probe every 30 seconds detects
that: it is a read that the watched member must answer, and that shows whether keys were written or counted
which the watch has not reported. Everything is listed anew every ten minutes.

Each key is a separate unit: one that cannot be accepted keeps its last good version, and does not block
others. The known state is also on disk, and serves at once after a start, whether etcd is reachable or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from heapq import nsmallest
from random import Random
from typing import NamedTuple

from vipd.declaration.problems import Declaration, printable
from vipd.declaration.unit import Unit
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.supervisor import Backoff, Loop, LoopState, Work, until_first_ends
from vipd.model import limits
from vipd.model.service import RegisteredBackend
from vipd.sources.cache import Cache, Value
from vipd.sources.etcd.client import EtcdClient, Event, Header, KeyValue, Page, Watch
from vipd.sources.etcd.connection import in_thread_if_large
from vipd.sources.etcd.errors import CompactedError, EndpointError, EtcdError, MalformedAnswerError
from vipd.sources.etcd.keys import EtcdKeys, StoreChange, StoredKey
from vipd.sources.etcd.values import REFUSED, FolderBudget, Layout, ParsedValue, read_value, short_key
from vipd.sources.removal_guard import RemovalGuard

log = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
GRACE_SECONDS = 5.0
"""For a watch to report what a probe has seen."""
RELIST_SECONDS = 600.0


_ABOUT_KEY = ""
"""Beside the keys of etcd."""
_GARBAGE = (LookupError, TypeError, ValueError, OverflowError, RecursionError)


class _Known(NamedTuple):
    """What the kept keys are: those of a prefix, at one revision of one store."""

    prefix: str
    cluster: str
    revision: int


class RelistError(EtcdError):
    """The known state cannot be continued: the store is another one, or changes were missed."""


class Follower:
    """Keeps `keys` equal to the store. `changed` is called after every difference."""

    def __init__(
        self,
        client: EtcdClient,
        keys: EtcdKeys,
        layout: Layout,
        changed: Callable[[], None],
        random: Random,
    ) -> None:
        self._client, self._keys, self._layout = client, keys, layout
        self._changed, self._random = changed, random
        self._positions: dict[str, int] = {}
        """For each followed prefix the revision up to which it is known; empty: list anew."""
        self._lock = asyncio.Lock()
        self._budget = FolderBudget(layout)
        self.loop_state = LoopState(Backoff(0.2, 30.0, jitter=0.5), reported_elsewhere=True)
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
            if not self._positions:
                await self._list()
            async with contextlib.AsyncExitStack() as stack:
                watches = {
                    prefix: await stack.enter_async_context(self._client.watch(prefix, position + 1))
                    for prefix, position in self._positions.items()
                }
                # If one watch has another member than the rest, the first probe detects it.
                self.endpoint = next(iter(watches.values())).endpoint
                work = [asyncio.create_task(self._probe_periodically([*watches.values()]))]
                work += [asyncio.create_task(self._read(*item)) for item in watches.items()]
                await until_first_ends(work)
        except (CompactedError, RelistError, MalformedAnswerError) as error:
            if isinstance(error, MalformedAnswerError):
                # Another member may work; a list skips what this one cannot report.
                self._client.connection.mark_failed(self.endpoint)
            self._positions.clear()
            raise
        finally:
            self.endpoint = ""

    async def _read(self, prefix: str, watch: Watch) -> None:
        async for events in watch:
            self.store_revision = max(self.store_revision, watch.revision)
            await self._on_events(prefix, events)

    async def _probe_periodically(self, watches: Sequence[Watch]) -> None:
        """Probe at once, because a watch of a future revision is silent, and then from time to time."""
        clock = asyncio.get_running_loop().time
        listed = clock()
        while True:
            await self._probe(watches)
            self.loop_state.clear_fault()
            await asyncio.sleep(PROBE_SECONDS * self._random.uniform(0.8, 1.0))
            if clock() - listed >= RELIST_SECONDS:
                if self._keys.retry_failed_reads():
                    self._changed()
                await self._list()
                listed = clock()

    async def _probe(self, watches: Sequence[Watch]) -> None:
        """Check that the watches still report everything. Raises EtcdError if they do not."""
        behind = await self._lagging(watches)
        if not behind:
            return
        await asyncio.sleep(GRACE_SECONDS)
        still = await self._lagging(watches)
        if behind.items() & still.items():
            self._client.connection.mark_failed(self.endpoint)
            raise RelistError(f"a watch at {self.endpoint} does not tell what is written")

    async def _lagging(self, watches: Sequence[Watch]) -> dict[str, int]:
        """The prefixes with more keys stored than reported, each with the last reported revision."""
        before = self._positions.values()
        oldest, newest = min(before), max(before)
        pages = await self._client.changed_since(self._layout.followed, oldest)
        header = pages[0].header
        if header.cluster != self._keys.cluster:
            raise RelistError(f"cluster {header.cluster} answers, and not {self._keys.cluster}")
        if header.revision < newest:
            raise RelistError(f"the store went back from revision {newest} to {header.revision}")
        for watch in watches:
            if watch.endpoint != self._client.connection.endpoint:
                raise EndpointError(f"{watch.endpoint} does not answer")
        behind = {}
        async with self._lock:
            for prefix, page in zip(self._layout.followed, pages, strict=True):
                if self._lags(prefix, page):
                    behind[prefix] = self._positions[prefix]
                else:
                    # Keys that were added and deleted in between make no difference, and are skipped when
                    # reported.
                    self._positions[prefix] = max(self._positions[prefix], header.revision)
        if not behind:
            self._contact(header)
        return behind

    def _lags(self, prefix: str, page: Page) -> bool:
        known = self._keys.count(prefix) + self._budget.left_out(prefix)
        newer = any(kv.mod_revision > self._positions[prefix] for kv in page.kvs)
        return newer or page.count != known

    async def _list(self) -> None:
        """Read the whole store at one revision."""
        positions = dict(self._positions)
        before = max(positions.values(), default=self._keys.revision)
        known = [key for key, stored in self._keys.kept.items() if not stored.held]
        budget = await asyncio.to_thread(FolderBudget, self._layout, known)
        listing = await self._client.list_keys(self._layout.followed, shorten=budget.shortened)
        header = listing.header
        replaced = bool(self._keys.cluster) and (
            header.cluster != self._keys.cluster or header.revision < before
        )
        replaced = replaced or await self._history_replaced(listing)
        async with self._lock:
            if positions and not replaced and header.revision < self.applied_revision:
                return  # the watch has reported more in the meantime
            change = await self._difference(listing, replaced)
            missed = [
                kv.key for kv in change.written if kv.mod_revision <= min(positions.values(), default=0)
            ]
            if missed and not replaced:
                first = printable(missed[0])
                log.warning("the watch of etcd had missed %d keys, such as %s", len(missed), first)
            self._positions = dict.fromkeys(self._layout.followed, header.revision)
            budget.listed(change.removed)
            self._budget = budget
            self._apply(change)
        self.listed.set()
        self._contact(header)

    async def _history_replaced(self, listing: Page) -> bool:
        """Whether the store has another history than the known one: a backup was restored, and then written
        past its former revision. Raises EtcdError.

        Existing keys are compared with their known state; of the deleted ones the newest is read
        at the revision at which it was written. If that was compacted, its history is unknown.
        """
        kept = {
            key: stored.mod_revision
            for key, stored in self._keys.kept.items()
            # A watch may have told newer ones while the listing was read.
            if not stored.held and stored.mod_revision <= listing.header.revision
        }
        listed = {kv.key: kv.mod_revision for kv in listing.kvs}
        if any(listed.get(key, revision) < revision for key, revision in kept.items()):
            return True
        # A shortened key is in no store.
        gone = [key for key in kept.keys() - listed.keys() if "\0" not in key]
        if not gone:
            return False
        newest = max(gone, key=lambda key: kept[key])
        try:
            kv = await self._client.get(newest, revision=kept[newest])
        except CompactedError:
            return False
        return kv is None or kv.mod_revision != kept[newest]

    async def _difference(self, listing: Page, replaced: bool) -> StoreChange:
        kept = dict(self._keys.kept)  # removals may be accepted concurrently

        def compare() -> tuple[list[KeyValue], frozenset[str]]:
            written = [kv for kv in listing.kvs if _differs(kept.get(kv.key), kv, replaced)]
            gone = kept.keys() - {kv.key for kv in listing.kvs}
            return written, frozenset(key for key in gone if not kept[key].held)

        written, removed = await in_thread_if_large(len(listing.kvs) * 1000, compare)
        return await self._change(listing.header.revision, written, removed, listing.header.cluster, replaced)

    async def _on_events(self, prefix: str, events: Sequence[Event]) -> None:
        """Apply the changes that a watch reports, of several revisions only the outcome."""
        async with self._lock:
            position = self._positions[prefix]
            last = {short_key(e.kv.key): e for e in events if e.kv.mod_revision > position}
            if not last:
                return
            removed = frozenset(key for key, event in last.items() if event.deleted)
            for key in removed:  # first: they make room
                self._budget.remove(key, self._stored_value(key))
            written = [
                short
                for key, event in last.items()
                if not event.deleted
                and (short := self._budget.shortened(event.kv, self._stored_value(key))) is not None
            ]
            if self._budget.size > limits.ETCD_BYTES or len(self._keys.kept) > limits.ETCD_KEYS:
                # A listing reports the problem.
                raise RelistError("the keys together are larger than what is followed")
            revision = max(event.kv.mod_revision for event in last.values())
            change = await self._change(revision, written, removed, self._keys.cluster)
            self._positions[prefix] = revision
            self._apply(change)

    def _stored_value(self, key: str) -> str | None:
        """The value that a key has in the store, as it is kept; None if it is not there, or left out."""
        stored = self._keys.kept.get(key)
        return None if stored is None or stored.held else stored.value

    async def _change(
        self,
        revision: int,
        written: Sequence[KeyValue],
        removed: frozenset[str],
        cluster: str,
        replaced: bool = False,
    ) -> StoreChange:
        """A change whose values are read, in a thread if they are many."""
        layout = self._layout

        def read() -> dict[KeyValue, ParsedValue]:
            return {kv: read_value(layout, kv.key, kv.value) for kv in written}

        # YAML takes six times as long to read as JSON does.
        size = sum(2500 + 6 * len(kv.value) for kv in written)
        return StoreChange(cluster, revision, await in_thread_if_large(size, read), removed, replaced)

    def _apply(self, change: StoreChange) -> None:
        if self._keys.apply(change, asyncio.get_running_loop().time()):
            self._changed()

    def _contact(self, header: Header) -> None:
        self.store_revision = header.revision
        self.last_contact = asyncio.get_running_loop().time()


class EtcdSource:
    """The services in etcd. `load` first, then its loops beside the daemon, and `close` after them."""

    name = "etcd"
    writes = False

    def __init__(self, settings: EtcdSettings, cache: Cache, client: EtcdClient, random: Random) -> None:
        self._settings = settings
        layout = Layout(settings.prefix)
        self._cached = cache.bucket("etcd", _encode, self._whole)
        guard = RemovalGuard(settings.max_removal, author_of=layout.folder)
        self.keys = EtcdKeys(layout, guard, self._note)
        """The keys as last known."""
        self._changed = asyncio.Event()
        self._follower = Follower(client, self.keys, layout, self._changed.set, random)

    @property
    def location(self) -> str:
        """The endpoints and the prefix."""
        return f"{', '.join(self._settings.endpoints)} {self._settings.prefix}"

    def load(self) -> None:
        """Load the state that an earlier run saved, if it had the same prefix. Blocks."""
        rows = self._cached.load()
        if not rows:
            return
        try:
            about = _Known(*json.loads(rows.pop(_ABOUT_KEY)))
            keys = {key: _decode(text) for key, text in rows.items()}
        except _GARBAGE as error:
            log.warning("the kept keys of etcd cannot be read: %s; etcd is asked for all of them", error)
            self._cached.clear()
            return
        if about.prefix == self._settings.prefix:
            self.keys.restore(about.cluster, about.revision, keys)
        else:
            self._cached.clear()

    def _about(self) -> _Known:
        return _Known(self._settings.prefix, self.keys.cluster, self.keys.revision)

    def _note(self, changes: Mapping[str, StoredKey | None]) -> None:
        self._cached.put({**changes, _ABOUT_KEY: self._about()})

    def _whole(self) -> dict[str, StoredKey | _Known]:
        # A copy in one step: this runs in a thread.
        return {**self.keys.kept.copy(), _ABOUT_KEY: self._about()}

    def loops(self) -> dict[str, Work]:
        """The loop that follows etcd. Its failures are among `faults`."""
        return {"following etcd": Loop(self._follower.run, self._follower.loop_state)}

    async def changes(self) -> AsyncIterator[None]:
        """Yields whenever the units or the registrations have changed. For one reader."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield

    async def wait_ready(self, timeout: float) -> bool:
        """Wait until there is a state, from disk or from etcd; False if there is none in time."""
        if self.keys.cluster:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._follower.listed.wait(), timeout)
        return self._follower.listed.is_set()

    @property
    def connected(self) -> bool:
        """Whether etcd is followed now, as far as is known."""
        return bool(self._follower.endpoint) and not self.fault

    @property
    def fault(self) -> str:
        """Why etcd cannot be followed; empty while it is."""
        return self._follower.loop_state.fault

    def units(self) -> Mapping[str, Unit]:
        """One unit a key, named `etcd:KEY`."""
        return self.keys.units

    def faults(self) -> tuple[str, ...]:
        """Set while etcd cannot be followed, or removals are held."""
        known = any(unit.accepted.services for unit in self.keys.units.values())
        kept = "the last known services go on serving" if known else "no service of it is known"
        lost = self.fault and f"{self.fault}; {kept}"
        return tuple(filter(None, (lost, self._held())))

    def held(self) -> Mapping[str, str]:
        """The held keys, as owners of services."""
        return {f"etcd:{printable(key)}": "its key is gone" for key in self.keys.held}

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Save these versions as the ones to fall back to."""
        self.keys.accept(chosen)

    def accept_removal(self) -> int:
        """Remove all held keys; returns their number."""
        released = self.keys.accept_removal()
        if released:
            self._changed.set()
        return released

    @property
    def registrations(self) -> Mapping[str, tuple[RegisteredBackend, ...]]:
        """Backends that registered themselves, by the name of their service, each list in order of its keys.

        Unchanged lists are the same object.
        """
        return self.keys.registrations

    def status(self) -> dict[str, object]:
        """The part of the API's Status.

        `endpoint`: the watched member; empty while there is none. `lag`: seconds since the keys were last
        known to equal the store's; None: never in this run. `rejected`: keys of services whose current value
        does not serve. `held`: keys that are gone from the store and continue to serve.
        """
        follower, last = self._follower, self._follower.last_contact
        return {
            "endpoint": follower.endpoint,
            "connected": self.connected,
            "applied_revision": follower.applied_revision,
            "store_revision": follower.store_revision,
            "last_change": self.keys.last_change,
            "lag": None if last is None else round(asyncio.get_running_loop().time() - last, 1),
            "keys": len(self.keys.kept),
            "rejected": tuple(map(printable, sorted(self.keys.rejected))),
            "held": tuple(map(printable, sorted(self.keys.held))),
            "fault": self.fault,
            "prefix": self._settings.prefix,
        }

    def _held(self) -> str:
        held = self.keys.held
        if not held:
            return ""
        names = ", ".join(map(printable, nsmallest(3, held))) + (", ..." if len(held) > 3 else "")
        why = f"more than {self._settings.max_removal}% of the services of their folder at once"
        if self.keys.store_replaced:
            why = "the store is another one than before, or an older state of it"
        return (
            f"{len(held)} keys are gone from etcd and go on serving: {why} ({names}); "
            "hint: write them again, or vipctl accept-removal"
        )


def _encode(value: StoredKey | _Known) -> str:
    if isinstance(value, StoredKey):
        fields = (value.value, value.mod_revision, value.accepted, value.held, value.create_revision)
        return json.dumps(fields, separators=(",", ":"))
    return json.dumps(value)


def _decode(text: Value) -> StoredKey:
    """Raises one of _GARBAGE."""
    value, mod_revision, accepted, held, create_revision = json.loads(text)
    if not isinstance(value, str) or not isinstance(accepted, str | None):
        raise TypeError("a value is no text")
    return StoredKey(value, int(mod_revision), accepted, bool(held), int(create_revision))


def _differs(known: StoredKey | None, kv: KeyValue, replaced: bool) -> bool:
    """Whether a listed key differs from its known state."""
    if known is None or known.held:
        return True
    if (known.mod_revision, known.create_revision) != (kv.mod_revision, kv.create_revision):
        return True
    return (replaced or known.value.startswith(REFUSED)) and known.value != kv.value
